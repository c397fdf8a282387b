"""A simulated run, round after round, in virtual time."""
