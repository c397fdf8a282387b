"""An experiment: its file, its trials, and what is kept of them on disk."""
