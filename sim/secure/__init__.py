"""Rounds of secure aggregation in virtual time."""
