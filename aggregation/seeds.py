"""Seeds made of seeds: one for each purpose, the same in every language."""

import hashlib


def derive_seed(seed: int, *labels: str | int) -> int:
    """A 63-bit seed for one purpose: SHA-256 over the parent seed and the labels, the same in every language."""
    text = "\x1f".join(["umbel/seed/1", str(seed), *map(str, labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
