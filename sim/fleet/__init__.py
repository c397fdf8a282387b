"""What simulated devices are like: how fast, how well connected, when there, and what goes wrong with them."""
