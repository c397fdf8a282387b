"""The masked vectors of one client as an update: what travels, how it is made, and how a coordinator reads it.

After the update's header come the levels, packed in the bits of the plan, and then the words, eight bytes each,
little-endian. Nothing in it can be wrong but its length: whatever the bytes are, they are as good as random.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from umbel.aggregation.codec.entropy.payload import Buffer
from umbel.aggregation.codec.kernels.kernels import add_packed
from umbel.aggregation.codec.kernels.packing import packed_bytes
from umbel.aggregation.errors import LyingLength
from umbel.aggregation.plans.codec import Codec
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.crypto.derive import Vector
from umbel.aggregation.secagg.crypto.masks import lane_dtype
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import Contribution
from umbel.aggregation.secagg.numbers.words import WORD_BYTES
from umbel.aggregation.secagg.unmasking import Opened
from umbel.aggregation.torch_later import torch
from umbel.aggregation.update.integer_sum import IntegerSum
from umbel.aggregation.update.wire import HEADER_BYTES, header_for, read_header

if TYPE_CHECKING:
    from torch import Tensor

_PART_LEVELS = 1 << 18  # a multiple of 512, so that every part is packed apart; of a megabyte, so that few are


def masked_input(contribution: Contribution, client: SecureClient) -> Iterator[Buffer]:
    """A client's update, in pieces. The contribution's numbers are gone from it without the masks."""
    composition = contribution.composition
    reader = MaskedReader(composition)
    yield header_for(composition.layout, Codec.MASKED, reader.update_bytes.start - HEADER_BYTES).encode()
    masks, first, bits = client.masks(Vector.LEVELS), 0, composition.secure.bits
    lanes = lane_dtype(bits)
    for part in contribution.levels():
        lane_part = part.to(lanes)
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
        """The levels and then the words, as they were masked: the sum is right modulo 2^bits, and modulo 2^64."""
        n_bytes = self._update_bytes.start - HEADER_BYTES
        read_header(header, self._composition.layout, Codec.MASKED, range(n_bytes, n_bytes + 1))
        composition, source = self._composition, _Source(pieces)
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
        """Nothing is known of a single change; the length is checked."""
        for _ in self.integers(header, pieces, rank):
            pass
        return 0.0

    def fold(self, total: IntegerSum, update: Buffer) -> None:
        """Add a whole update to `total`, which is undefined after a refusal: `MalformedUpdate`, `LyingLength`."""
        view = memoryview(update)
        total.add(self.integers(bytes(view[:HEADER_BYTES]), [view[HEADER_BYTES:]], 0), 1)

    def new_sum(self) -> IntegerSum:
        composition = self._composition
        return IntegerSum(composition.n_levels + composition.n_words, composition.secure.clients_max)


def unmasked(total: IntegerSum, composition: Composition, opened: Opened) -> tuple[Tensor, Tensor]:
    """The sums of what was masked: of the levels, int32, right modulo 2^bits; of the words, int64.

    `total`: of the masked vectors of everyone whom `opened` has as in the sum.
    """
    lanes = lane_dtype(composition.secure.bits)
    levels = total.sums[: composition.n_levels].to(lanes)
    opened.masks(Vector.LEVELS).apply(levels)
    words = total.sums[composition.n_levels :].clone()
    opened.masks(Vector.WORDS).apply(words)
    return levels.to(torch.int32), words


class _Source:
    """Bytes that come in pieces of any length, taken in others."""

    def __init__(self, pieces: Iterable[Buffer]) -> None:
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")

    def take(self, n_bytes: int) -> Tensor:
        """The next bytes: uint8. Raises `LyingLength` if there are not so many."""
        out = bytearray(n_bytes)
        filled = 0
        while filled < n_bytes:
            if not self._piece:
                piece = next(self._pieces, None)
                if piece is None:
                    raise LyingLength("the update ends before its last value")
                self._piece = memoryview(piece)
            here = self._piece[: n_bytes - filled]
            out[filled : filled + len(here)] = here
            filled, self._piece = filled + len(here), self._piece[len(here) :]
        return torch.frombuffer(out, dtype=torch.uint8)

    def end(self) -> None:
        """Raise `LyingLength` if there is more."""
        if self._piece or any(len(piece) for piece in self._pieces):
            raise LyingLength("there is more after the update's last value")
