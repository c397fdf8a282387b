"""umbel: federated learning whose every aggregation is an exact sum of integers."""

__version__ = "0.1.0"
