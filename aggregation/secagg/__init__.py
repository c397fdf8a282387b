"""Secure aggregation: the coordinator learns the sum of what a cohort sends, and nothing of any one client."""
