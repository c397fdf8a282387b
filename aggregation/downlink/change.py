"""The bytes of a change: with them a client makes the next published model version of the one that it has.

A change begins with the header of `wire.py`, whose codec is 16. Then follow

```
offset size field
     0    4 step            D, float32, 2^-100 to 2^100
     4   12 coding          of the integers, as in codec 1, without a dither (`coded_levels.py`)
    16    8 exact_bytes     length of the first frame; 0 and no frame if no tensor is exact
    24      one Zstandard frame: for each exact tensor, its bytes before XOR its bytes after
     .      the integers k, as in codec 1; zeros for the values of exact tensors
```

`publishing.py` defines the integers and how they move a model. A change is written while the model moves, and applied
while it is read; both take the model a piece at a time. A change names neither the version before nor the version
after. The client knows the SHA-256 of both, and must check that the result has the right one.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from umbel.aggregation.codec.entropy import entropy, frame
from umbel.aggregation.codec.entropy.coded_levels import CODING_BYTES, Coding, LevelsCoder
from umbel.aggregation.codec.entropy.payload import Buffer, Payload, exactly
from umbel.aggregation.downlink.publishing import STEP_MAX, STEP_MIN, Publication, moved
from umbel.aggregation.errors import LyingLength, MalformedUpdate
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import Values, pieces, segments, torch_dtype
from umbel.aggregation.plans.codec import as_float32
from umbel.aggregation.update.wire import HEADER_BYTES, change_header

_HEAD = struct.Struct(f"<f{CODING_BYTES}sQ")
HEAD_BYTES = HEADER_BYTES + _HEAD.size
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ChangeHead:
    step: float
    coding: Coding
    exact_bytes: int

    def encode(self) -> bytes:
        return _HEAD.pack(self.step, self.coding.encode(), self.exact_bytes)


class ChangeWriter:
    """Writes a change. First comes all of `body`, which moves the published model; then `head`, the change's start."""

    def __init__(self, layout: Layout, step: float, master: Values, public: Values) -> None:
        """`step`: D. `master`: the next master copy. `public`: the published model; its values are overwritten."""
        self._layout = layout
        self._step = step
        self._publication = Publication(layout, step, master, public)
        self._coder = LevelsCoder(layout)
        self._coding: Coding | None = None
        self._exact_bytes = self._n_bytes = 0

    def body(self) -> Iterator[bytes]:
        """The bytes after the first `HEAD_BYTES`, in pieces."""
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
    """Turn a published model into the next version, in place. `change`: `change_bytes` bytes in all, in pieces.

    Raises an `UpdateRefused` at the first fault. Values before the fault have changed by then.
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
                after = moved(piece.spec, piece.of(public, torch_dtype(piece.spec)), mine, head.step)
                piece.put(public, after)
            first += piece.n_values


def _read_head(layout: Layout, payload: Payload, change_bytes: int) -> ChangeHead:
    if change_bytes < HEAD_BYTES:
        raise LyingLength(f"a change of the model must have at least {HEAD_BYTES} bytes; this one has {change_bytes}")
    if payload.take(HEADER_BYTES).numpy().tobytes() != change_header(layout, change_bytes - HEADER_BYTES):
        raise MalformedUpdate(
            "the header of the change of the model does not fit its length or the model's layout; see "
            "docs/reference/wire.md"
        )
    step, coding, exact_bytes = _HEAD.unpack(payload.take(_HEAD.size).numpy().tobytes())
    if not STEP_MIN <= step <= STEP_MAX:  # also refuses a NaN
        raise MalformedUpdate(
            f"the change of the model states the step {step:g}; a step must lie between 2^-100 and 2^100 "
            "(docs/reference/wire.md)"
        )
    n_raw = _exact_raw_bytes(layout)
    if exact_bytes > (most := frame.framed_bytes_max(n_raw) if n_raw else 0):
        raise LyingLength(
            f"the change of the model states {exact_bytes} bytes for the tensors that no codec rounds; at most {most} "
            "are allowed"
        )
    return ChangeHead(as_float32(step), Coding.decode(coding), exact_bytes)


def _apply_exact(layout: Layout, changed: Iterable[bytes], public: Values) -> None:
    """Flip bits of exact tensors. Raises `MalformedUpdate` for a bool that is neither 0 nor 1, and for a NaN."""
    bits = Payload(changed)
    for piece in pieces(layout):
        if piece.spec.is_coded:
            continue
        dtype = torch_dtype(piece.spec)
        before = piece.of(public, dtype).view(torch.uint8)
        after = before ^ bits.take(before.numel())
        if piece.spec.dtype == "bool" and bool((after > 1).any()):
            raise MalformedUpdate("the change of the model sets a value of a bool tensor that is neither 0 nor 1")
        if dtype.is_floating_point and not bool(after.view(dtype).isfinite().all()):
            raise MalformedUpdate("the change of the model makes a value that is a NaN or an infinity")
        piece.put(public, after.view(dtype))
    bits.end()


def _taken(payload: Payload, n_bytes: int) -> Iterator[memoryview]:
    """The next `n_bytes`, in pieces."""
    for first in range(0, n_bytes, _PIECE_BYTES):
        yield payload.take(min(_PIECE_BYTES, n_bytes - first)).numpy().data


def _exact_raw_bytes(layout: Layout) -> int:
    """The number of bytes of all exact tensors."""
    return sum(spec.n_bytes for spec in layout.owners() if not spec.is_coded)
