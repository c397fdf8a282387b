"""What is summed under masks: a client's contribution, and what the coordinator makes of the sum."""
