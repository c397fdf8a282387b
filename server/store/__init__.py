"""What is in the database."""
