"""The engines of Flower apps: they call the ClientApp of each simulated node."""
