"""`umbel bench secagg`: what secure aggregation costs."""
