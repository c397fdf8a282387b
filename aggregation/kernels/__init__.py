"""Arithmetic on whole vectors: compiled, on CUDA, or in plain torch, always with the same bits."""
