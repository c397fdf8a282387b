"""Integers as entropy-coded bytes."""
