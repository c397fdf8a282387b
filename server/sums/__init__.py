"""A round's updates: read, checked, added up, and made into the next model."""
