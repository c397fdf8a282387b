"""Means and sums of few bits in training loops of one's own."""
