"""Clients over threads, processes, GPUs or a Ray cluster."""
