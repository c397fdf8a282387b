"""How the coordinator reads stored updates: with the codec of their attempt, in pieces, never whole in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from io import RawIOBase
from typing import TYPE_CHECKING

from umbel.aggregation.errors import LyingLength, UpdateRefused
from umbel.aggregation.model.layout import PIECE_VALUES, Layout
from umbel.aggregation.plans.codec import Part
from umbel.aggregation.plans.round import RoundPlan, ranks_of
from umbel.aggregation.round.states import Committed, Recruiting
from umbel.aggregation.types import ClientId
from umbel.server.blobs.blobs import BlobStore
from umbel.server.problems import Refused
from umbel.server.store.stored import Chunk, LiveRun

if TYPE_CHECKING:  # this module is imported before torch
    from torch import Tensor

    from umbel.aggregation.codec.update_codec import UpdateCodec, UpdateReader
    from umbel.aggregation.secagg.numbers.composition import Composition


class RoundCodec:
    """The codec and the cohort's ranks of a run's newest attempt. Each is made once for an attempt.

    Pass the run in its current state to each method.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._reader: tuple[int, UpdateReader] | None = None  # with the attempt's `round_id`
        self._ranks: tuple[int, dict[ClientId, int]] | None = None  # with the attempt's `round_id`

    def of(self, live: LiveRun) -> UpdateReader:
        """The codec of the attempt's updates, masked or plain."""
        if self._reader is None or self._reader[0] != live.round_id:
            self._reader = live.round_id, self._reader_of(live.plan)
        return self._reader[1]

    def _reader_of(self, plan: RoundPlan) -> UpdateReader:
        from umbel.aggregation.secagg.masked_input import MaskedReader  # imports torch

        return MaskedReader(self.composition(plan)) if plan.is_secure else self.plain(plan)

    def composition(self, plan: RoundPlan) -> Composition:
        """The numbers that clients mask in a secure round."""
        from umbel.aggregation.secagg.numbers.composition import Composition  # imports torch

        assert plan.secure, "only secure rounds have them"
        only = not plan.task.sends_updates
        return Composition(plan.codec, plan.secure, plan.grid, plan.sample_count_max, self._layout, only)

    def plain(self, plan: RoundPlan) -> UpdateCodec:
        """The codec of a round whose updates are not masked."""
        from umbel.aggregation.codec.update_codec import codec_for  # imports torch

        return codec_for(plan.codec, plan.grid, self._layout)

    def rank(self, live: LiveRun, client: ClientId) -> int:
        """The client's place in the cohort."""
        if self._ranks is None or self._ranks[0] != live.round_id:
            state = live.state.closing if isinstance(live.state, Committed) else live.state
            assert not isinstance(state, Recruiting), "recruiting has no cohort yet"
            self._ranks = live.round_id, ranks_of(state.cohort)
        return self._ranks[1][client]

    def parts(self, live: LiveRun, weights: Iterable[tuple[ClientId, int]]) -> list[Part]:
        """The parts of the round's sum that these clients, with their weights, contribute."""
        return [Part(weight, self.rank(live, client)) for client, weight in weights]


def check_update(blobs: BlobStore, chunks: Sequence[Chunk], sha256: str, codec: UpdateReader, rank: int) -> None:
    """Check every value of an update and its hash, in one reading. Raises `Refused` or an `UpdateRefused`."""
    if sum(chunk.length for chunk in chunks) not in codec.update_bytes:
        raise LyingLength(
            f"the uploaded update has a wrong length; an update for this assignment has {length_in_words(codec)}"
        )
    with Whole(blobs, chunks) as update:
        try:
            codec.largest_change(_header(update, codec), _pieces(update), rank)
        except UpdateRefused:
            update.require_sha256(sha256)  # an update damaged on its way may show any fault; the client is not to blame
            raise
        update.require_sha256(sha256)


def length_in_words(codec: UpdateReader) -> str:
    """The lengths that an update may have, as text."""
    lengths = codec.update_bytes
    return f"{lengths.start} bytes" if len(lengths) == 1 else f"{lengths.start} to {lengths.stop - 1} bytes"


def largest_change(blobs: BlobStore, chunks: Sequence[Chunk], codec: UpdateReader, rank: int) -> float:
    """The largest change of one value. Raises an `UpdateRefused` at the first fault."""
    with Whole(blobs, chunks) as update:
        return codec.largest_change(_header(update, codec), _pieces(update), rank)


def integers(blobs: BlobStore, chunks: Sequence[Chunk], codec: UpdateReader, rank: int) -> Iterator[Tensor]:
    """The integers that an update adds to the sum, in pieces. Raises an `UpdateRefused` at the first fault.

    This checks the update again, because a file that was damaged in store must not enter the sum.
    """
    with Whole(blobs, chunks) as update:
        yield from codec.integers(_header(update, codec), _pieces(update), rank)


class Whole(RawIOBase):
    """The chunks of an update, read as one file."""

    def __init__(self, blobs: BlobStore, chunks: Sequence[Chunk]) -> None:
        self._blobs = blobs
        self._left = list(reversed(chunks))
        self._open = ExitStack()
        self._file: RawIOBase | None = None
        self._sha = hashlib.sha256()  # of what was read

    def require_sha256(self, sha256: str) -> None:
        """Read the rest. Raises `Refused` unless the whole update has this hash."""
        buffer = memoryview(bytearray(4 * PIECE_VALUES))
        while self.readinto(buffer):
            pass
        if self._sha.hexdigest() != sha256:
            raise Refused(
                "wrong-digest", "the update's SHA-256 is not the one in Repr-Digest; upload the whole update again"
            )

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]  # any buffer is more than it takes
        while True:
            if self._file is not None and (n_bytes := self._file.readinto(buffer)):
                self._sha.update(buffer[:n_bytes])
                return n_bytes
            self._open.close()
            self._file = None
            if not self._left:
                return 0
            self._file = self._open.enter_context(self._blobs.open(self._left.pop().key))

    def close(self) -> None:
        self._open.close()
        super().close()


def fill(file: RawIOBase, buffer: memoryview) -> int:
    """Read until the buffer is full or the file ends; return the number of bytes. One `readinto` may be short."""
    filled = 0
    while filled < len(buffer) and (n_bytes := file.readinto(buffer[filled:])):
        filled += n_bytes
    return filled


def _header(update: Whole, codec: UpdateReader) -> bytes:
    header = memoryview(bytearray(codec.header_bytes))
    return bytes(header[: fill(update, header)])


def _pieces(update: Whole) -> Iterator[memoryview]:
    """The bytes after the header, in pieces. Each piece overwrites the one before."""
    buffer = memoryview(bytearray(4 * PIECE_VALUES))
    while n_bytes := fill(update, buffer):
        yield buffer[:n_bytes]
