"""Distributed differential privacy: noise in integers that clients add to what they send, and what it promises."""
