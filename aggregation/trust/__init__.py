"""Trust in keys: member lists, public keys, fingerprints and signed requests."""
