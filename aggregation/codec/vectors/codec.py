"""What a codec is: a weight change becomes bytes at the client, and consecutive float32 chunks at the coordinator.

Each codec is a frozen dataclass of its own parameters, and both ends make it from what the plan says. So nothing that
the plan knows is ever sent: no length, no key, no parameter. `registry.py` has their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from umbel.aggregation.codec.entropy.payload import Buffer
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_VALUES = 1 << 18  # a part of the formats: what is laid out chunk by chunk is laid out in chunks of this many
VALUE_BYTES = 4


Projections: TypeAlias = "Mapping[str, Callable[[Tensor], Tensor]]"


class Sketching(StrEnum):
    """The two ways of Konecny et al. (2016) to send fewer numbers than the vector has.

    `STRUCTURED`: the client trains within what can be sent, and sends that as it is; anything else is left out.
    `SKETCHED`: the client trains freely, and what is sent is scaled up so that its expectation is the whole.
    """

    STRUCTURED = "structured"
    SKETCHED = "sketched"


@dataclass(frozen=True, slots=True)
class CodecContext:
    """What the plan says of one client's update. `key`: public, 63 bits, of the round."""

    layout: Layout
    key: int
    cohort_index: int = 0

    @property
    def n_values(self) -> int:
        return self.layout.n_values

    def own_key(self, purpose: str) -> int:
        """A key that no other client of the cohort has, and no other use."""
        return derive_seed(self.key, "codec", purpose, self.cohort_index)

    def shared_key(self, purpose: str, *labels: str) -> int:
        """A key that the whole cohort has, for one use."""
        return derive_seed(self.key, "codec", purpose, *labels)


class VectorCodec(Protocol):
    """`is_unbiased`: over the keys, the expectation of what is decoded is what was encoded.
    `is_linear`: over one cohort, the sum of what is decoded is what the sum of the payloads decodes to.
    `is_contraction`: what is decoded is never further from what was encoded than nothing would be: error feedback needs
    that, for what is left over must not grow.

    All are stateless: encoding leaves nothing behind that the next round needs. What error feedback remembers stands
    beside the codec, in `feedback.py`.
    """

    @property
    def is_unbiased(self) -> bool: ...
    @property
    def is_linear(self) -> bool: ...
    @property
    def is_contraction(self) -> bool: ...

    def payload_bytes(self, layout: Layout) -> range:
        """The lengths that a payload of such a model may have."""
        ...

    def encode(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        """The payload, in pieces. `values`: float32, `context.n_values` of them, finite, on any device.

        Raises `ValueError` for other values, and for those too large to be scaled.
        """
        ...

    def decode(self, pieces: Iterable[Buffer], context: CodecContext) -> Iterator[Tensor]:
        """Consecutive finite float32 chunks on the CPU, `context.n_values` values in all; `pieces` of any length.

        Raises an `UpdateRefused` for any other payload, at the latest after the last chunk: until the iterator has
        ended nothing is certain. Memory is bounded by what the plan says, whatever the bytes say.
        """
        ...


def one_length(n_bytes: int) -> range:
    """Where there is but one."""
    return range(n_bytes, n_bytes + 1)


def chunks(n_values: int) -> Iterator[slice]:
    """The places of the chunks."""
    return (slice(first, min(first + CHUNK_VALUES, n_values)) for first in range(0, n_values, CHUNK_VALUES))


def chunk_lengths(n_values: int) -> list[int]:
    return [place.stop - place.start for place in chunks(n_values)]


def require_encodable(values: Tensor, context: CodecContext) -> None:
    """Raise `ValueError` for what is no weight change of this layout."""
    if values.dtype != torch.float32 or values.shape != (context.n_values,):
        raise ValueError(f"a weight change is {context.n_values} float32, not {list(values.shape)} of {values.dtype}")
    if not bool(values.isfinite().all()):
        raise ValueError("the weight change has a NaN or an infinity; train with a lower learning rate")
