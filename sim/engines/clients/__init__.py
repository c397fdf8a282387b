"""Simulated clients that are real `Client` objects: made by the user's `make_client`, trained by their own code."""
