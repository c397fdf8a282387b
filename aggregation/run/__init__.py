"""A whole run: its file, what follows each round, the records of its rounds, and when it ends."""
