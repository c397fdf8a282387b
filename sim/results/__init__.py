"""What an experiment showed: numbers, tables and plots."""
