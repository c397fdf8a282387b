"""What a reader of an update knows beforehand, and the payload that it reads, as the documents have them.

From `docs/reference/codecs.md` and `docs/reference/wire.md`: nothing of umbel's is used.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from tests.vectors.documented_draws import Floats, derived_seed

Integers: TypeAlias = NDArray[np.int64]
# docs/reference/run-file.md, the keys of `codec`: what parameters are if they are left out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "eden": {"bits": 4},
    "qsgd": {"levels": 64},
    "topk": {"share": 0.01, "precision": "bfloat16"},
    "mask": {"every": 10, "mode": "sketched", "precision": "float32"},
    "lowrank": {"rank": 4},
    "planes": {"precision": "float32"},
}


class Tensor(NamedTuple):
    """A row of the layout: wire.md, "Layout"."""

    name: str
    shape: list[int]
    dtype: str
    offset: int
    tied_to: str | None

    @property
    def n_values(self) -> int:
        return 0 if self.tied_to is not None else math.prod(self.shape)

    @property
    def is_exact(self) -> bool:
        """wire.md, codec 1."""
        return "float" not in self.dtype or self.name.split(".")[-1] in ("running_mean", "running_var")


@dataclass(frozen=True)
class Told:
    """What a reader of an update knows from the assignment. `step`: of its grid."""

    layout_json: str
    codec: str
    parameters: Mapping[str, Any]
    key: int
    rank: int
    step: float

    @property
    def tensors(self) -> list[Tensor]:
        return [Tensor(*row) for row in json.loads(self.layout_json)]

    @property
    def n_values(self) -> int:
        return sum(tensor.n_values for tensor in self.tensors)

    def parameter(self, name: str) -> Any:
        return self.parameters.get(name, _DEFAULTS[self.codec][name])

    def own_key(self, purpose: str) -> int:
        """codecs.md, "Keys"."""
        return derived_seed(self.key, "codec", purpose, self.rank)

    def shared_key(self, purpose: str, *labels: str) -> int:
        """codecs.md, "Keys"."""
        return derived_seed(self.key, "codec", purpose, *labels)


class Payload:
    """Bytes that are read from the first to the last."""

    def __init__(self, data: bytes) -> None:
        self._left = data

    def take(self, n_bytes: int) -> bytes:
        assert n_bytes <= len(self._left), "the payload breaks off"
        taken, self._left = self._left[:n_bytes], self._left[n_bytes:]
        return taken

    def rest(self) -> bytes:
        return self.take(len(self._left))

    def end(self) -> None:
        assert not self._left, "bytes follow the payload"

    def integers(self, n: int) -> Integers:
        """Of a byte each."""
        return np.frombuffer(self.take(n), np.uint8).astype(np.int64)

    def floats(self, n: int, precision: str = "float32") -> Floats:
        """bfloat16 is the upper half of an f32."""
        if precision == "float32":
            return np.frombuffer(self.take(4 * n), "<f4")
        return (np.frombuffer(self.take(2 * n), "<u2").astype("<u4") << 16).view("<f4")

    def scales(self, n: int) -> Floats:
        scales = self.floats(n)
        assert (scales >= 0).all()
        return scales

    def packed(self, n: int, bits: int) -> Integers:
        """codecs.md, "Packed": what a lane packs is one string of bits, lowest first."""
        n_groups = -(-n // 512)
        words = np.frombuffer(self.take(64 * bits * n_groups), "<u4").reshape(n_groups, bits, 16)
        lanes = np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint8)
        rows = np.unpackbits(lanes, axis=2, bitorder="little").reshape(n_groups, 16, 32, bits)
        values = (rows @ (1 << np.arange(bits))).transpose(0, 2, 1).reshape(-1)
        assert not values[n:].any(), "the last group is filled up with zeros"
        return values[:n]


def frame_content(data: bytes) -> bytes:
    """codecs.md, "Frames"."""
    said = zstandard.get_frame_parameters(data)
    raw = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    assert (said.content_size, said.dict_id) == (len(raw), 0)
    assert said.window_size <= 1 << 20
    return raw
