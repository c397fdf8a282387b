"""What is asked of rounds and of clients, as plain data: nothing here imports a codec, a protocol or torch."""
