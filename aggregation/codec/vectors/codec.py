"""What a codec of vectors is: the client encodes a weight change as bytes; the coordinator decodes float32 chunks.

Each codec is a frozen dataclass of its parameters, and both ends make it from the plan. So nothing that the plan states
is sent: no length, no key, no parameter. `registry.py` has the codecs' names.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from umbel.aggregation.codec.entropy.payload import Buffer
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.seeds import derive_seed

CHUNK_VALUES = 1 << 18  # the length of a chunk; part of the formats
VALUE_BYTES = 4


Projections: TypeAlias = Mapping[str, Callable[[Tensor], Tensor]]


class Sketching(StrEnum):
    """The two ways of Konecny et al. (2016) to send fewer numbers than the vector has.

    `STRUCTURED`: the client trains only the part that can be sent, and sends it unscaled.
    `SKETCHED`: the client trains everything. The sent part is scaled up, so that its expectation is the whole change.
    """

    STRUCTURED = "structured"
    SKETCHED = "sketched"


@dataclass(frozen=True, slots=True)
class CodecContext:
    """What the plan says of one client's update."""

    layout: Layout
    key: int  # of the round: public, 63 bits
    cohort_index: int = 0  # the client's rank

    @property
    def n_values(self) -> int:
        return self.layout.n_values

    def own_key(self, purpose: str) -> int:
        """A key of this client alone, for one purpose."""
        return derive_seed(self.key, "codec", purpose, self.cohort_index)

    def shared_key(self, purpose: str, *labels: str) -> int:
        """A key that the whole cohort shares, for one purpose."""
        return derive_seed(self.key, "codec", purpose, *labels)


class VectorCodec(Protocol):
    """A codec of vectors. It has no state; error feedback keeps its own (`feedback.py`)."""

    @property
    def is_linear(self) -> bool:
        """Whether, within a cohort, the sum of payloads decodes to the sum of the decoded vectors."""
        ...

    @property
    def is_contraction(self) -> bool:
        """Whether the error is never larger than the encoded vector. Otherwise error feedback's residual could grow."""
        ...

    def payload_bytes(self, layout: Layout) -> range:
        """The lengths that a payload of a model with this layout may have."""
        ...

    def encode(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        """The payload, in pieces. `values`: float32, `context.n_values` of them, finite, on any device.

        Raises `ValueError` for other values, and for those too large to be scaled.
        """
        ...

    def decode(self, pieces: Iterable[Buffer], context: CodecContext) -> Iterator[Tensor]:
        """Consecutive finite float32 chunks on the CPU, `context.n_values` values in all; `pieces` of any length.

        Raises an `UpdateRefused` for a malformed payload, at the latest after the last chunk. So no chunk counts before
        the iterator has ended. The plan bounds the memory, whatever the bytes claim.
        """
        ...


def one_length(n_bytes: int) -> range:
    """The range of a single length."""
    return range(n_bytes, n_bytes + 1)


def chunks(n_values: int) -> Iterator[slice]:
    """The places of the chunks of a vector."""
    return (slice(first, min(first + CHUNK_VALUES, n_values)) for first in range(0, n_values, CHUNK_VALUES))


def chunk_lengths(n_values: int) -> list[int]:
    return [place.stop - place.start for place in chunks(n_values)]


def require_encodable(values: Tensor, context: CodecContext) -> None:
    """Raise `ValueError` unless `values` are a finite weight change of this layout."""
    if values.dtype != torch.float32 or values.shape != (context.n_values,):
        raise ValueError(
            f"the weight change must have shape [{context.n_values}] and type {torch.float32}, but has shape "
            f"{list(values.shape)} and type {values.dtype}"
        )
    if values.numel() and not bool(torch.stack(values.aminmax()).isfinite().all()):  # without a vector beside it
        raise ValueError("the weight change has a NaN or an infinity; train with a lower learning rate")
