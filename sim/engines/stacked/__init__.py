"""Many clients at once, as one stacked computation."""
