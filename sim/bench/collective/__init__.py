"""`umbel bench collective`: the time, bytes and loss of a step whose gradients are averaged over a slow network."""
