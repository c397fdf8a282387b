"""Which codecs can be added up by those who must not, or cannot, read each one: secure aggregation and all-reduce.

Both add what clients send, position by position, before anyone decodes it. That has a meaning only if the codec is
linear over the cohort. Whatever else, the integers of a step (`rotated.py`) are: modulo 2^m for secure aggregation
(`modular.py`), in bytes or lanes for an all-reduce (`lanes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from umbel.aggregation.codec.codec import VectorCodec
from umbel.aggregation.codec.eden import Eden
from umbel.aggregation.codec.lossless import Planes
from umbel.aggregation.codec.mask import RandomMask
from umbel.aggregation.codec.qsgd import Qsgd
from umbel.aggregation.codec.sign import Sign
from umbel.aggregation.codec.ternary import Ternary
from umbel.aggregation.codec.topk import TopK
from umbel.aggregation.wire import Codec


class Adding(StrEnum):
    """Who adds the clients' vectors up without reading each. The values are for sentences."""

    SECURE = "secure aggregation"
    ALL_REDUCE = "an all-reduce"


_INTEGERS: Mapping[Adding, str] = MappingProxyType(
    {
        Adding.SECURE: "the integer codec rotated, modulo 2^m",
        Adding.ALL_REDUCE: "the integer codec rotated, in bytes or lanes",
    }
)
_OWN_SCALES = "each client has scales of its own, and levels of different scales do not add up"
_WHY: Mapping[type | Codec, str] = MappingProxyType(
    {
        Codec.FLOAT32: "sums of float32 depend on their order, and a mask does not come off again exactly",
        Codec.INTEGER: "its integers add up, but are sent entropy coded, and coded bytes do not",
        Eden: "each client rotates with a key of its own and has scales of its own, so positions and levels differ",
        Sign: "each side of zero has a scale of each client's own, so the signs alone say nothing of the sum",
        Ternary: _OWN_SCALES,
        Qsgd: "each client counts levels by norms of its own, and sends them compressed; neither adds up",
        TopK: "each client sends coordinates of its own choosing, so the same position means different weights",
        Planes: "compressed bytes do not add up, and each client's have another length",
        RandomMask: "each client rounds to bfloat16 for itself, and sums of that are no bfloat16",
    }
)
_INSTEAD: Mapping[type, str] = MappingProxyType({RandomMask: "the mask with float32"})


def require_summable(codec: VectorCodec | Codec, adding: Adding) -> None:
    """Raise `ValueError`, with why and what to use, unless sums of what this codec sends can be decoded.

    `codec`: a codec of the registry with its parameters, or one of those that have a number on the wire. A linear one
    passes: its vector is float32, and is put on a step as a weight change would be.
    """
    kind = codec if isinstance(codec, Codec) else type(codec)
    if not isinstance(codec, Codec) and codec.is_linear:
        return
    name = codec.name.lower() if isinstance(codec, Codec) else type(codec).__name__
    why = _WHY.get(kind, "sums of what clients send with it cannot be decoded")
    instead = _INSTEAD.get(type(codec), _INTEGERS[adding])
    raise ValueError(f"{name} does not work with {adding}: {why}; use {instead}")
