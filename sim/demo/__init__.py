"""`umbel demo`: the whole system on one machine, in real processes."""
