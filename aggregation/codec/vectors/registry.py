"""The codecs of vectors, by their ids. Each is a frozen dataclass of its parameters."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType

from umbel.aggregation.codec.entropy.payload import Precision
from umbel.aggregation.codec.vectors.buckets import Qsgd, Sign, Ternary
from umbel.aggregation.codec.vectors.codec import Sketching, VectorCodec
from umbel.aggregation.codec.vectors.eden import Eden
from umbel.aggregation.codec.vectors.lossless import Planes
from umbel.aggregation.codec.vectors.lowrank import LowRank
from umbel.aggregation.codec.vectors.sparse import RandomMask, TopK
from umbel.aggregation.plans.codec import Codec, Parameter

CODECS: Mapping[Codec, Callable[..., VectorCodec]] = MappingProxyType(
    {
        Codec.EDEN: Eden,
        Codec.SIGN: Sign,
        Codec.TERNARY: Ternary,
        Codec.QSGD: Qsgd,
        Codec.TOPK: TopK,
        Codec.MASK: RandomMask,
        Codec.LOWRANK: LowRank,
        Codec.PLANES: Planes,
    }
)
# By a parameter's type: its name, the types that a JSON document may use, and the constructor of the value.
_TYPES: Mapping[object, tuple[str, tuple[type, ...], Callable[..., object]]] = MappingProxyType(
    {
        int: ("an integer", (int,), int),
        float: ("a number", (int, float), float),
        float | None: ("a number", (int, float), float),
        Sketching: ('"structured" or "sketched"', (str,), Sketching),
        Precision: ('"float32" or "bfloat16"', (str,), Precision),
    }
)


def defaults_of(codec: Codec) -> Mapping[str, object]:
    """A codec's parameters, each with its default."""
    return {one.name: one.default for one in fields(CODECS[codec]) if one.init}  # type: ignore[arg-type]  # dataclasses


def vector_codec(codec: Codec, parameters: Mapping[str, Parameter]) -> VectorCodec:
    """The codec with these parameters, the others at their defaults. Raises `ValueError` for any other parameter."""
    known = {one.name: one.type for one in fields(CODECS[codec]) if one.init}  # type: ignore[arg-type]  # dataclasses
    name, made = codec.name.lower(), dict[str, object]()
    for key, value in parameters.items():
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"the codec {name} has no parameter {key!r:.40}; {takes}")
        kind, types, make = _TYPES[known[key]]
        if type(value) not in types:  # a bool is no count
            raise ValueError(f"`{key}` of the codec {name} must be {kind}, not {value!r:.40}")
        try:
            made[key] = make(value)
        except OverflowError as error:
            raise ValueError(f"`{key}` of the codec {name} is too large for a float") from error
    return CODECS[codec](**made)
