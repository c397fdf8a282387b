"""What operators, auditors and officers do through the API or on their own disk."""
