"""A Flower app with its own ServerApp, simulated: umbel's devices, windows and engines, Flower's strategy."""
