"""Runs under way: what devices and operators ask of them, and the driver that moves each round."""
