"""The bytes of a change: what a client that has one published model version needs to have the next.

The header of `wire.py` with 16 for its codec, then

```
offset size field
     0    4 step            D, float32, 2^-100 to 2^100
     4   12 coding          of the integers, as in codec 1, without a dither (`coded_levels.py`)
    16    8 exact_bytes     length of the first frame; 0, and no such frame, if no tensor is exact
    24      one Zstandard frame: of each exact tensor the bytes that it has, XOR those that it will have
     .      the integers k, as codec 1 has them; zeros for values of exact tensors
```

`publishing.py` says what the integers are and what they make of a model. A change is written while the model moves,
and applied while it is read; both go through the model a piece at a time. It says neither which version it is of nor
which it makes: whoever has it knows the SHA-256 of both, and must see that the result has its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from umbel.aggregation.codec.entropy import entropy, frame
from umbel.aggregation.codec.entropy.coded_levels import CODING_BYTES, Coding, LevelsCoder
from umbel.aggregation.codec.entropy.payload import Buffer, Payload, exactly
from umbel.aggregation.downlink.publishing import STEP_MAX, STEP_MIN, Publication, moved
from umbel.aggregation.errors import LyingLength, MalformedUpdate
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.pieces import Values, pieces, segments
from umbel.aggregation.plans.codec import as_float32
from umbel.aggregation.torch_later import torch
from umbel.aggregation.update.wire import HEADER_BYTES, change_header

_HEAD = struct.Struct(f"<f{CODING_BYTES}sQ")
HEAD_BYTES = HEADER_BYTES + _HEAD.size
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ChangeHead:
    """The fixed beginning of the payload."""

    step: float
    coding: Coding
    exact_bytes: int

    def encode(self) -> bytes:
        return _HEAD.pack(self.step, self.coding.encode(), self.exact_bytes)


class ChangeWriter:
    """A change in the making. First all of `body`, which moves the published model; then `head`, to stand before it."""

    def __init__(self, layout: Layout, step: float, master: Values, public: Values) -> None:
        """`step`: D. `master`: the next version's; `public`: the published model, whose values are written over."""
        self._layout = layout
        self._step = step
        self._publication = Publication(layout, step, master, public)
        self._coder = LevelsCoder(layout)
        self._coding: Coding | None = None
        self._exact_bytes = self._n_bytes = 0

    def body(self) -> Iterator[bytes]:
        """What follows the first `HEAD_BYTES`, in pieces."""
        meter = self._coder.new_meter(1 / self._step)
        self._publication.measure(meter)
        energies = meter.energies()
        self._coding = self._coder.cheapest(self._publication.sample(), energies, None)
        if n_raw := _exact_raw_bytes(self._layout):
            for piece in frame.compress((bits.numpy().data for bits in self._publication.exact()), n_raw):
                self._exact_bytes += len(piece)
                yield piece
        for piece in self._coder.write(self._publication.segments(), self._coding, energies, None):
            self._n_bytes += len(piece)
            yield piece

    def head(self) -> bytes:
        """The first `HEAD_BYTES`."""
        assert self._coding is not None, "the body comes first"
        header = change_header(self._layout, _HEAD.size + self._exact_bytes + self._n_bytes)
        return header + ChangeHead(self._step, self._coding, self._exact_bytes).encode()


def apply_change(layout: Layout, change: Iterable[Buffer], change_bytes: int, public: Values) -> None:
    """Make a published model the next version, in place. `change`: all its bytes, in pieces, `change_bytes` in all.

    Raises an `UpdateRefused` at the first thing that is wrong with it; values before that are changed then.
    """
    payload = Payload(exactly(change, change_bytes))
    head = _read_head(layout, payload, change_bytes)
    if n_raw := _exact_raw_bytes(layout):
        _apply_exact(layout, frame.decompress(_taken(payload, head.exact_bytes), n_raw), public)
    read = LevelsCoder(layout).read(payload, head.coding, None)
    for segment, coded in zip(segments(layout, entropy.SEGMENT), read, strict=True):
        made, first = coded.levels(), 0
        for piece in segment:
            if piece.spec.is_coded:
                mine = made[first : first + piece.n_values]
                after = moved(piece.spec, piece.of(public, piece.spec.torch_dtype), mine, head.step)
                public.write(piece.spec.name, piece.first, after)
            first += piece.n_values


def _read_head(layout: Layout, payload: Payload, change_bytes: int) -> ChangeHead:
    """What the first bytes of a change say, as far as it could be true."""
    if change_bytes < HEAD_BYTES:
        raise LyingLength(f"a change has at least {HEAD_BYTES} bytes, this has {change_bytes}")
    if payload.take(HEADER_BYTES).numpy().tobytes() != change_header(layout, change_bytes - HEADER_BYTES):
        raise MalformedUpdate("not a change of a model of this layout and its own length; see docs/reference/wire.md")
    step, coding, exact_bytes = _HEAD.unpack(payload.take(_HEAD.size).numpy().tobytes())
    if not STEP_MIN <= step <= STEP_MAX:  # also refuses a NaN
        raise MalformedUpdate("the head of the change is malformed; see docs/reference/wire.md")
    n_raw = _exact_raw_bytes(layout)
    if exact_bytes > (frame.framed_bytes_max(n_raw) if n_raw else 0):
        raise LyingLength(f"the change says that exact values take {exact_bytes} bytes, which they cannot")
    return ChangeHead(as_float32(step), Coding.decode(coding), exact_bytes)


def _apply_exact(layout: Layout, changed: Iterable[bytes], public: Values) -> None:
    """Change these bits of exact tensors. Raises `MalformedUpdate` for a bool that would be neither, and for a NaN."""
    bits = Payload(changed)
    for piece in pieces(layout):
        if piece.spec.is_coded:
            continue
        dtype = piece.spec.torch_dtype
        before = piece.of(public, dtype).view(torch.uint8)
        after = before ^ bits.take(before.numel())
        if piece.spec.dtype == "bool" and bool((after > 1).any()):
            raise MalformedUpdate("the change makes a bool of neither true nor false")
        if dtype.is_floating_point and not bool(after.view(dtype).isfinite().all()):
            raise MalformedUpdate("the change makes a value that is not finite")
        public.write(piece.spec.name, piece.first, after.view(dtype))
    bits.end()


def _taken(payload: Payload, n_bytes: int) -> Iterator[memoryview]:
    """The next `n_bytes`, in pieces."""
    for first in range(0, n_bytes, _PIECE_BYTES):
        yield payload.take(min(_PIECE_BYTES, n_bytes - first)).numpy().data


def _exact_raw_bytes(layout: Layout) -> int:
    """How many bytes the values of exact tensors have."""
    return sum(spec.n_values * spec.torch_dtype.itemsize for spec in layout.owners() if not spec.is_coded)
