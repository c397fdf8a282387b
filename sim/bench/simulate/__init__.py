"""`umbel bench simulate`: simulated rounds against plain loops and peers."""
