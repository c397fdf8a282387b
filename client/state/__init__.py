"""What a client keeps on disk."""
