"""`umbel bench coordinator`: rounds, check-ins and a fleet under load."""
