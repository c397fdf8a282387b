"""The cryptography of secure aggregation: key agreement, secret sharing, masks, sealing, signing."""
