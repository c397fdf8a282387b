"""A masked update: how a client makes it, and how a coordinator reads and unmasks the sum.

After the update's header come the levels, packed in the bits of the plan, and then the words, eight bytes each,
little-endian. Only the length of an update can be wrong, because masked bytes look random.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from umbel.aggregation.codec.entropy.payload import Buffer, Payload
from umbel.aggregation.kernels.kernels import add_packed
from umbel.aggregation.kernels.packing import packed_bytes
from umbel.aggregation.plans.codec import Codec
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.crypto.derive import Vector
from umbel.aggregation.secagg.numbers.composition import WORD_BYTES, Composition
from umbel.aggregation.secagg.numbers.contribution import Contribution
from umbel.aggregation.secagg.unmasking import Opened
from umbel.aggregation.update.grid import IntegerSum
from umbel.aggregation.update.wire import HEADER_BYTES, header_for, read_header

_PART_LEVELS = 1 << 18  # a multiple of 512, so that each part is packed by itself; a megabyte


def lane_dtype(bits: int) -> torch.dtype:
    """The narrowest lanes that hold integers of 1 to 64 bits: int8, int16, int32 or int64. Others: `ValueError`."""
    if not 1 <= bits <= 64:
        raise ValueError(f"a lane holds integers of 1 to 64 bits, not {bits}")
    return next(dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64) if bits <= 8 * dtype.itemsize)


def masked_input(contribution: Contribution, client: SecureClient) -> Iterator[Buffer]:
    """A client's update, in pieces."""
    composition = contribution.composition
    reader = MaskedReader(composition)
    yield header_for(composition.layout, Codec.MASKED, reader.update_bytes.start - HEADER_BYTES).encode()
    masks, first, bits = client.masks(Vector.LEVELS), 0, composition.secure.bits
    lanes = lane_dtype(bits)
    for part in contribution.levels():
        lane_part = part.to(lanes).cpu()  # in this order, so that only lanes are copied from a GPU
        masks.apply(lane_part, first)
        first += part.numel()
        yield from (packed.numpy().data for packed in composition.modular.packed((lane_part,)))
    words = contribution.words.clone()
    client.masks(Vector.WORDS).apply(words)
    yield words.numpy().astype("<i8", copy=False).data.cast("B")


class MaskedReader:
    """A coordinator's side of a round whose updates are masked: an `UpdateReader` (`update_codec.py`)."""

    def __init__(self, composition: Composition) -> None:
        self._composition = composition
        self._levels_bytes = composition.modular.n_bytes
        n_bytes = HEADER_BYTES + self._levels_bytes + WORD_BYTES * composition.n_words
        self._update_bytes = range(n_bytes, n_bytes + 1)

    @property
    def header_bytes(self) -> int:
        return HEADER_BYTES

    @property
    def update_bytes(self) -> range:
        return self._update_bytes

    def integers(self, header: bytes, pieces: Iterable[Buffer], rank: int) -> Iterator[Tensor]:
        """The masked levels, then the masked words: their sums are right modulo 2^bits, and modulo 2^64."""
        n_bytes = self._update_bytes.start - HEADER_BYTES
        read_header(header, self._composition.layout, Codec.MASKED, range(n_bytes, n_bytes + 1))
        composition, source = self._composition, Payload(pieces)
        bits = composition.secure.bits
        buffer = torch.empty(min(_PART_LEVELS, composition.n_levels), dtype=torch.int32)
        for first in range(0, composition.n_levels, _PART_LEVELS):
            levels = buffer[: composition.n_levels - first].zero_()
            add_packed(levels, source.take(packed_bytes(levels.numel(), bits)), bits)
            yield levels
        for first in range(0, composition.n_words, _PART_LEVELS):
            n_words = min(_PART_LEVELS, composition.n_words - first)
            yield source.take(WORD_BYTES * n_words).view(torch.int64)
        source.end()

    def largest_change(self, header: bytes, pieces: Iterable[Buffer], rank: int) -> float:
        """0, because a masked change is unknown; checks the length."""
        for _ in self.integers(header, pieces, rank):
            pass
        return 0.0

    def fold(self, total: IntegerSum, update: Buffer) -> None:
        """Add a whole update to `total`. Raises `MalformedUpdate` or `LyingLength`; then `total` is undefined."""
        view = memoryview(update)
        total.add(self.integers(bytes(view[:HEADER_BYTES]), [view[HEADER_BYTES:]], 0), 1)

    def new_sum(self) -> IntegerSum:
        composition = self._composition
        return IntegerSum(composition.n_levels + composition.n_words, composition.secure.clients_max)


def unmasked(total: IntegerSum, composition: Composition, opened: Opened) -> tuple[Tensor, Tensor]:
    """The unmasked sums: of the levels, int32, right modulo 2^bits; of the words, int64.

    `total`: of the masked vectors of exactly the clients in `opened`.
    """
    lanes = lane_dtype(composition.secure.bits)
    levels = total.sums[: composition.n_levels].to(lanes)
    opened.masks(Vector.LEVELS).apply(levels)
    words = total.sums[composition.n_levels :].clone()
    opened.masks(Vector.WORDS).apply(words)
    return levels.to(torch.int32), words
