"""What clients of secure rounds draw for their contributions, in tests: by a number or a name, the same each time."""

import hashlib

from umbel.aggregation.codec.rotated import Dither
from umbel.aggregation.secagg.numbers.contribution import own_dither


def secret_of(client: int | str) -> bytes:
    """The secret of one client's contributions."""
    return hashlib.sha256(str(client).encode()).digest()


def dither_of(client: int | str) -> Dither:
    return own_dither(secret_of(client))
