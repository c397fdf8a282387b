"""The codecs of vectors, by their ids. Each is a frozen dataclass of its parameters."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType

from umbel.aggregation.codec.entropy.payload import Precision
from umbel.aggregation.codec.vectors.codec import Sketching, VectorCodec
from umbel.aggregation.codec.vectors.eden import Eden
from umbel.aggregation.codec.vectors.lossless import Planes
from umbel.aggregation.codec.vectors.lowrank import LowRank
from umbel.aggregation.codec.vectors.mask import RandomMask
from umbel.aggregation.codec.vectors.qsgd import Qsgd
from umbel.aggregation.codec.vectors.sign import Sign
from umbel.aggregation.codec.vectors.ternary import Ternary
from umbel.aggregation.codec.vectors.topk import TopK
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
# By a parameter's annotation: the types that a JSON document may use, and the constructor of the value.
_TYPES: Mapping[str, tuple[tuple[type, ...], Callable[..., object]]] = MappingProxyType(
    {
        "int": ((int,), int),
        "float": ((int, float), float),
        "float | None": ((int, float), float),
        "Sketching": ((str,), Sketching),
        "Precision": ((str,), Precision),
    }
)


def parameters_of(codec: Codec) -> Mapping[str, str]:
    """A codec's parameters, each with its annotation."""
    return {one.name: str(one.type) for one in fields(CODECS[codec]) if one.init}  # type: ignore[arg-type]  # dataclasses


def defaults_of(codec: Codec) -> Mapping[str, object]:
    """A codec's parameters, each with its default."""
    return {one.name: one.default for one in fields(CODECS[codec]) if one.init}  # type: ignore[arg-type]  # dataclasses


def vector_codec(codec: Codec, parameters: Mapping[str, Parameter]) -> VectorCodec:
    """The codec with these parameters, the others at their defaults. Raises `ValueError` for any other parameter."""
    known, made = parameters_of(codec), dict[str, object]()
    for name, value in parameters.items():
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"the codec {codec.name.lower()} has no parameter {name!r:.40}; {takes}")
        types, make = _TYPES[known[name]]
        if type(value) not in types:  # a bool is no count
            raise ValueError(f"{name} of the codec {codec.name.lower()} must be {known[name]}, not {value!r:.40}")
        try:
            made[name] = make(value)
        except OverflowError as error:
            raise ValueError(f"{name} of the codec {codec.name.lower()} is beyond all floats") from error
    return CODECS[codec](**made)
