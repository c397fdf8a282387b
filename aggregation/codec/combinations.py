"""Which codecs can be added up by those who must not, or cannot, read each one: secure aggregation and all-reduce.

Both add what clients send, position by position, before anyone decodes it. That has a meaning only if the codec is
linear over the cohort. Whatever else, the integers of a step (`rotated.py`) are: modulo 2^m for secure aggregation
(`modular.py`), in bytes or lanes for an all-reduce (`lanes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from umbel.aggregation.codec.feedback import MomentumCorrection
from umbel.aggregation.codec.vectors.registry import CODECS, vector_codec
from umbel.aggregation.plans.codec import Codec, CodecPlan


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
_WHY: Mapping[Codec, str] = MappingProxyType(
    {
        Codec.FLOAT32: "sums of float32 depend on their order, and a mask does not come off again exactly",
        Codec.INTEGER: "its integers add up, but are sent entropy coded, and coded bytes do not",
        Codec.EDEN: "each client rotates with a key of its own and has scales of its own, so nothing stands where it "
        "does with another",
        Codec.SIGN: "each side of zero has a scale of each client's own, so the signs alone say nothing of the sum",
        Codec.TERNARY: "each client has scales of its own, and levels of different scales do not add up",
        Codec.QSGD: "each client counts levels by norms of its own, and sends them compressed; neither adds up",
        Codec.TOPK: "each client sends coordinates of its own choosing, so the same place means different weights",
        Codec.PLANES: "compressed bytes do not add up, and each client's have another length",
        Codec.MASK: "with bfloat16 each client rounds for itself, and sums of that are no bfloat16",
    }
)
# The float32 of a linear codec adds up in an all-reduce as it is; a secure round masks integers alone.
_INSTEAD: Mapping[tuple[Codec, Adding], str] = MappingProxyType(
    {(Codec.MASK, Adding.ALL_REDUCE): "the mask with float32"}
)


def require_summable(plan: CodecPlan, adding: Adding) -> None:
    """Raise `ValueError`, with why and what to use, unless sums of what this plan's codec sends can be decoded.

    A linear codec passes: what it sends is a float32 vector, to be put on a step as a weight change is.
    """
    codec = plan.codec
    if codec in CODECS and vector_codec(codec, plan.parameters).is_linear:
        return
    why = _WHY.get(codec, "sums of what clients send with it cannot be decoded")
    instead = _INSTEAD.get((codec, adding), _INTEGERS[adding])
    raise ValueError(f"{codec.name.lower()} does not work with {adding}: {why}; use {instead}")


def require_codec(plan: CodecPlan) -> None:
    """Raise `ValueError` for parameters that the plan's codec does not take, and for combinations that cannot work."""
    if plan.codec not in CODECS:
        return
    name, codec = plan.codec.name.lower(), vector_codec(plan.codec, plan.parameters)
    if plan.feedback and not codec.is_contraction:
        raise ValueError(
            f"error feedback needs a codec that never moves away from what it is given; {name}, as it is set here, "
            "does, to be right on average, so that what is left over would grow from round to round. Leave "
            'error_feedback out, or take "topk", "sign", "planes", or a structured "mask" or "lowrank"'
        )
    if plan.momentum is None:
        return
    if not plan.feedback or plan.codec is not Codec.TOPK:
        raise ValueError(
            'momentum corrects what waits to be sent (deep gradient compression): it needs name = "topk" and '
            "error_feedback = true"
        )
    MomentumCorrection(plan.momentum)
