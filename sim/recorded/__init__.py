"""Simulations of a recorded fleet, beside its record."""
