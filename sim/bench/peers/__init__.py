"""Other simulators, run as their users run them."""
