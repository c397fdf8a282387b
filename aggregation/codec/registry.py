"""The codecs by their names. Each is a frozen dataclass whose fields are its parameters, checked when it is made."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from umbel.aggregation.codec.codec import VectorCodec
from umbel.aggregation.codec.eden import Eden
from umbel.aggregation.codec.lossless import Planes
from umbel.aggregation.codec.lowrank import LowRank
from umbel.aggregation.codec.mask import RandomMask
from umbel.aggregation.codec.qsgd import Qsgd
from umbel.aggregation.codec.sign import Sign
from umbel.aggregation.codec.ternary import Ternary
from umbel.aggregation.codec.topk import TopK

CODECS: Mapping[str, Callable[..., VectorCodec]] = MappingProxyType(
    {
        "eden": Eden,
        "lowrank": LowRank,
        "mask": RandomMask,
        "planes": Planes,
        "qsgd": Qsgd,
        "sign": Sign,
        "ternary": Ternary,
        "topk": TopK,
    }
)
