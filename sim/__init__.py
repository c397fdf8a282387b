"""The simulator and the demo."""
