"""Experiments: a file that says what to simulate, the simulated runs of it, and what they showed."""
