"""What a codec can be combined with: its parameters, error feedback, momentum, secure aggregation, an all-reduce.

Secure aggregation and an all-reduce add what clients send, position by position, before anyone decodes it. The result
has a meaning only if the codec is linear over the cohort. The integers of a step (`rotated.py`) always are: modulo 2^m
for secure aggregation (`modular.py`), in bytes or lanes for an all-reduce (`lanes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from umbel.aggregation.plans.codec import Codec, CodecPlan

if TYPE_CHECKING:
    from umbel.aggregation.codec.vectors.codec import VectorCodec


class Adding(StrEnum):
    """Who adds the clients' vectors without reading each one. Error texts contain the values."""

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
        Codec.EDEN: "each client has its own rotation and its own scales, so the same place means different things",
        Codec.SIGN: "each client has its own scales for the two sides of zero, so the sum of signs means nothing",
        Codec.TERNARY: "each client has its own scales, and levels of different scales do not add up",
        Codec.QSGD: "each client counts levels by its own norms and compresses them; neither adds up",
        Codec.TOPK: "each client chooses its own coordinates, so the same place means different weights",
        Codec.PLANES: "compressed bytes do not add up, and have another length for each client",
        Codec.MASK: "with bfloat16 each client rounds for itself, and sums of that are no bfloat16",
    }
)
# The float32 of a linear codec adds up in an all-reduce as it is. A secure round masks integers only.
_INSTEAD: Mapping[tuple[Codec, Adding], str] = MappingProxyType(
    {(Codec.MASK, Adding.ALL_REDUCE): "the mask with float32"}
)


def require_summable(plan: CodecPlan, adding: Adding) -> None:
    """Raise `ValueError`, with the reason and an alternative, unless sums of this plan's payloads can be decoded.

    A linear codec passes: it sends a float32 vector, which can be put on a step as a weight change is.
    """
    codec = _vector_codec(plan)
    if codec is not None and codec.is_linear:
        return
    why = _WHY.get(plan.codec, "sums of what clients send with it cannot be decoded")
    instead = _INSTEAD.get((plan.codec, adding), _INTEGERS[adding])
    raise ValueError(f"{plan.codec.name.lower()} does not work with {adding}: {why}; use {instead}")


def require_codec(plan: CodecPlan) -> None:
    """Raise `ValueError` for parameters that the plan's codec does not take, and for combinations that cannot work."""
    codec, name = _vector_codec(plan), plan.codec.name.lower()
    if codec is None:
        return
    if plan.feedback and not codec.is_contraction:
        raise ValueError(
            f"error feedback does not work with {name} as it is set here: it is right on average and can overshoot, "
            "so the error would grow from round to round. Leave error_feedback out, or take "
            '"topk", "sign", "planes", or a structured "mask" or "lowrank"'
        )
    if plan.momentum is None:
        return
    if not plan.feedback or plan.codec is not Codec.TOPK:
        raise ValueError(
            "momentum corrects the residual of error feedback (deep gradient compression): it needs "
            'name = "topk" and error_feedback = true'
        )
    from umbel.aggregation.codec.feedback import MomentumCorrection  # imports torch, as below

    MomentumCorrection(plan.momentum)


def _vector_codec(plan: CodecPlan) -> VectorCodec | None:
    """The plan's codec of vectors; None for float32 and integer, which have no parameters to check."""
    if plan.codec in (Codec.FLOAT32, Codec.INTEGER):
        return None
    # This imports torch, which takes seconds: reading a run file must not need it for float32 and integer.
    from umbel.aggregation.codec.vectors.registry import vector_codec

    return vector_codec(plan.codec, plan.parameters)
