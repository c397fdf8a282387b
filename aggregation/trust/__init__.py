"""Whose keys are believed: member lists, public keys, fingerprints and signed requests."""
