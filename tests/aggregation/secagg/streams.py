"""Random bytes that can be had again."""

import hashlib

from umbel.aggregation.secagg.crypto.shamir import RandomBytes


def stream_of(seed: bytes) -> RandomBytes:
    """SHA-256(seed || u64(0)) || SHA-256(seed || u64(1)) || ..., in pieces as they are asked for."""
    n_blocks, rest = 0, b""

    def random(n_bytes: int) -> bytes:
        nonlocal n_blocks, rest
        while len(rest) < n_bytes:
            rest += hashlib.sha256(seed + n_blocks.to_bytes(8, "little")).digest()
            n_blocks += 1
        drawn, rest = rest[:n_bytes], rest[n_bytes:]
        return drawn

    return random
