"""Codec 1: an update as integers on the round's step, entropy coded. Unbiased, linear, stateless.

    k = floor(x / D + u + phi)        u: shared by the cohort, phi: the client's own; `quantize.py`

The sum of the integers is exact, and what the dither has added to it is known. There is no rotation, because it would
destroy the structure that entropy coding uses. Cost: about log2(rms / D) + 2.05 bits for Gaussian values, and 1 to 1.3
bits less for real updates (`entropy.py`).

Values of exact tensors (`TensorSpec.is_coded`: counters, masks, running statistics) travel as float32, on the round's
grid (`grid.py`), as in codec 0. The integers have zeros in their places.

The payload is a head (`coded_levels.LevelsHead`), the exact values as float32 in layout order, a block with a byte for
each row and column if energies are used (`classes.py`), and the segments of the integers. On a sample, a client finds
out whether energies, the dither, both or neither make the update shortest.

The next round's step is made from the norm (`step.py`). The norm is one more coordinate of the sum, so it adds up like
the others, at any replica and in a replay. A client could lie about it, as about its update. The integers bound the
lie, because each is off by less than one: | ||k|| - ||x|| / D | <= sqrt(n).

Values beyond 32,765 steps are cut to that before they are encoded.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from umbel.aggregation.codec.entropy import entropy
from umbel.aggregation.codec.entropy.classes import EnergyMeter
from umbel.aggregation.codec.entropy.coded_levels import LEVELS_HEAD_BYTES, LevelsCoder, LevelsHead
from umbel.aggregation.codec.entropy.entropy import Segment
from umbel.aggregation.codec.entropy.payload import Buffer, Payload, exactly
from umbel.aggregation.codec.vectors.codec import Projections
from umbel.aggregation.errors import MalformedUpdate, UpdateOutOfRange, WrongCodec
from umbel.aggregation.kernels.arguments import Levels, Quantizer, phase
from umbel.aggregation.kernels.kernels import dither_into, quantize_into
from umbel.aggregation.kernels.philox import DITHER_GROUP
from umbel.aggregation.kernels.quantize import Dithers
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import CountPlaces, ExactPlaces, with_device
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid, Part, as_float32
from umbel.aggregation.stated_order import sum_of_squares
from umbel.aggregation.types import LEVEL_MAX
from umbel.aggregation.update.grid import IntegerSum, check_values, to_integers
from umbel.aggregation.update.wire import HEADER_BYTES, header_for, read_header

_SUM_BITS, _LEVEL_BITS, _RMS_BITS_MAX = 62, 15, 24
_LEVELS = Levels()
_WITHIN = 1 + 2.0**-20  # how far float32 may raise a norm
_SAMPLED_SEGMENTS = 2


@dataclass(frozen=True, slots=True)
class _Survey:
    """What the first pass over a change finds, before clipping."""

    norm: float  # L2
    meter: EnergyMeter  # of its rows and columns
    sample: list[tuple[int, Tensor]]  # some segments from all over it, each with its first coordinate
    exact: bytes  # the values of exact tensors


class IntegerCodec:
    """The integer codec of one round and model; see `UpdateCodec`."""

    def __init__(self, plan: CodecPlan, grid: Grid, layout: Layout) -> None:
        self._plan = plan
        self._grid = grid
        self._layout = layout
        self._n_values = layout.n_values
        self._exact, self._counted = ExactPlaces(layout), CountPlaces(layout)
        self._coder = LevelsCoder(layout)
        least = LEVELS_HEAD_BYTES + 4 * self._exact.n_values
        self._payload_bytes = range(least, least + self._coder.bytes_max + 1)
        weight_bits = (grid.total_weight_max - 1).bit_length()
        self._rms_unit = 1 << min(_RMS_BITS_MAX, _SUM_BITS - _LEVEL_BITS - weight_bits)  # in the sum, of a step

    @property
    def header_bytes(self) -> int:
        return HEADER_BYTES + LEVELS_HEAD_BYTES

    @property
    def update_bytes(self) -> range:
        return range(HEADER_BYTES + self._payload_bytes.start, HEADER_BYTES + self._payload_bytes.stop)

    # --- a client's side ----------------------------------------------------------------------------------------------

    def encode(self, change: Callable[[], Iterator[Tensor]], rank: int) -> Iterator[bytes]:
        """The update. It is encoded as a whole before its first piece, because the header states the length."""
        survey = self._survey(change)
        scale = self._plan.scale(survey.norm)
        norm = as_float32(survey.norm * scale)
        quantizer = Quantizer(self._plan.inverse_step, self._plan.key, phase(rank), _LEVELS)
        energies, dither = survey.meter.energies(scale), self._dither(rank)
        sample = [(first, _levels(first, values.mul_(scale), quantizer)) for first, values in survey.sample]
        coding = self._coder.cheapest(sample, energies, dither)
        segments = (_levels(first, values.mul_(scale), quantizer) for first, values in self._segments(change))
        written = list(self._coder.write(segments, coding, energies, dither))
        n_bytes = 4 * self._exact.n_values + sum(map(len, written))
        yield header_for(self._layout, Codec.INTEGER, LEVELS_HEAD_BYTES + n_bytes).encode()
        yield LevelsHead(self._plan.inverse_step, norm, rank, coding).encode()
        yield survey.exact
        yield from written

    def _survey(self, change: Callable[[], Iterator[Tensor]]) -> _Survey:
        squares, exact, meter = list[float](), bytearray(), self._coder.new_meter(self._plan.inverse_step)
        sample: list[tuple[int, Tensor]] = []
        every = max(1, -(-self._n_values // entropy.SEGMENT) // _SAMPLED_SEGMENTS)
        for number, (first, values) in enumerate(self._segments(change, exact)):
            squares.append(sum_of_squares(values))
            meter.add(first, values)
            if number % every == 0:
                sample.append((first, values.clone()))
        return _Survey(math.sqrt(math.fsum(squares)), meter, sample, bytes(exact))

    def _dither(self, rank: int) -> tuple[int, int]:
        """The cohort's key, and the client's phi."""
        return self._plan.key, phase(rank)

    def _segments(
        self, change: Callable[[], Iterator[Tensor]], exact: bytearray | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """The change in segments, each with the index of its first value: checked, and cut to the greatest level.

        Exact values become zero, and are appended to `exact` if it is there.
        """
        most = (LEVEL_MAX - 1) / self._plan.inverse_step
        for first, values in in_segments(change(), entropy.SEGMENT):
            check_values(values, self._grid, first)
            if exact is None:
                self._exact.clear(values, first)
            else:
                exact += self._exact.taken_out(values, first)
            yield first, values.clamp_(-most, most)

    def within(self) -> Projections:
        return {}

    # --- the coordinator's side ---------------------------------------------------------------------------------------

    def integers(self, header: bytes, pieces: Iterable[Buffer], rank: int) -> Iterator[Tensor]:
        head, payload = self._opened(header, pieces, rank)
        exact, first = to_integers(self._exact_values(payload), self._grid), 0
        for segment in self._checked(head, payload):
            levels = segment.levels()
            yield self._exact.put_back(levels, first, exact)
            first += levels.numel()
        rms = head.norm * self._plan.inverse_step / math.sqrt(max(self._n_values, 1))
        yield torch.tensor([round(min(rms, LEVEL_MAX) * self._rms_unit)], dtype=torch.int64)

    def largest_change(self, header: bytes, pieces: Iterable[Buffer], rank: int) -> float:
        """The largest change, rounded down, because a level is off by less than one."""
        head, payload = self._opened(header, pieces, rank)
        exact = float(self._exact_values(payload).abs().amax()) if self._exact.n_values else 0.0
        largest = max((segment.folded.greatest for segment in self._checked(head, payload)), default=0)
        return max(exact, (largest - 1) / self._plan.inverse_step, 0.0)

    def _exact_values(self, payload: Payload) -> Tensor:
        values = payload.take(4 * self._exact.n_values).view(torch.float32)
        check_values(values, self._grid)
        return values

    def _checked(self, head: LevelsHead, payload: Payload) -> Iterator[Segment]:
        """The segments. Only after the last one is it certain that all of them may be summed."""
        largest_allowed, energy = min(LEVEL_MAX, self._grid.max_abs * self._plan.inverse_step + 1), 0
        for segment in self._coder.read(payload, head.coding, self._dither(head.rank)):
            if (largest := segment.folded.greatest) > largest_allowed:
                raise UpdateOutOfRange(f"the update contains the level {largest}, which is beyond the run's max_abs")
            energy += segment.folded.sum_of_squares
            yield segment
        self._check_norm(head.norm, energy)

    def new_sum(self) -> IntegerSum:
        return IntegerSum(self._n_values + 1, self._grid.total_weight_max, self._counted)

    def mean(self, total: IntegerSum, parts: Iterable[Part]) -> "MeanOfLevels":
        dithers = Dithers(((part.weight, phase(part.rank)) for part in parts), _LEVELS)
        if dithers.total_weight != total.total_weight:
            raise ValueError(
                f"these clients have the weight {dithers.total_weight} in all, but the sum has the weight "
                f"{total.total_weight}"
            )
        return MeanOfLevels(total, dithers, self._plan, self._grid, (self._exact, self._counted))

    def update_rms(self, total: IntegerSum) -> float | None:
        return float(total.sums[-1]) / self._rms_unit / total.total_weight / self._plan.inverse_step

    def _opened(self, header: bytes, pieces: Iterable[Buffer], rank: int) -> tuple[LevelsHead, Payload]:
        """The head of an update, checked against the plan, and the rest of the payload."""
        if len(header) < self.header_bytes:
            raise MalformedUpdate(
                f"an update of this codec starts with a header of {self.header_bytes} bytes; only {len(header)} arrived"
            )
        said = read_header(header, self._layout, Codec.INTEGER, self._payload_bytes)
        head = LevelsHead.decode(header[HEADER_BYTES : self.header_bytes])
        if head.inverse_step != self._plan.inverse_step:
            raise WrongCodec(
                f"the plan asks for inverse_step {self._plan.inverse_step!r}; the update states {head.inverse_step!r}"
            )
        if head.rank != rank:
            raise WrongCodec(f"this client's rank is {rank}, but the update states {head.rank}")
        if not 0 <= head.norm < math.inf:
            raise UpdateOutOfRange(f"the update states the norm {head.norm}; a norm must be finite and not negative")
        if self._plan.clip_norm is not None and head.norm > self._plan.clip_norm * _WITHIN:
            raise UpdateOutOfRange(
                f"the update states the norm {head.norm:g}, which is above the run's clip_norm {self._plan.clip_norm:g}"
            )
        return head, Payload(exactly(pieces, said.payload_bytes - LEVELS_HEAD_BYTES))

    def _check_norm(self, norm: float, energy: int) -> None:
        """Raise `UpdateOutOfRange` unless an update of this norm could have these integers."""
        off = abs(math.sqrt(energy) - norm * self._plan.inverse_step)
        if off > math.sqrt(self._n_values) + 1e-3 * math.sqrt(energy):
            raise UpdateOutOfRange(f"the update states the norm {norm:g}, which does not fit its integers")


class MeanOfLevels:
    """The weighted mean of the updates in a sum of levels, with the dither subtracted."""

    def __init__(
        self, total: IntegerSum, dithers: Dithers, plan: CodecPlan, grid: Grid, places: tuple[ExactPlaces, CountPlaces]
    ) -> None:
        self._total = total
        self._dithers = dithers
        self._plan = plan
        self._grid = grid
        self._exact, self._counted = places

    def mean_slice(self, start: int, stop: int) -> Tensor:
        """The mean of coordinates `start` to `stop`, float64; of tensors of the kind count, the sum.

        Raises `ValueError` if nothing was folded.
        """
        if self._total.total_weight == 0:
            raise ValueError("no update was added, so there is no mean")
        first = start - start % DITHER_GROUP
        shared = torch.empty(stop - first, dtype=torch.int32)
        dither_into(shared, self._plan.key, first)
        sums = self._total.sums[start:stop]
        mean = self._dithers.subtract(sums, shared[start - first :])
        mean.div_(self._total.total_weight).div_(self._plan.inverse_step)
        for _, here in self._exact.within(start, stop - start):
            mean[here] = sums[here].to(torch.float64).mul_(self._grid.step).div_(self._total.total_weight)
        for _, here in self._counted.within(start, stop - start):
            mean[here] = sums[here].to(torch.float64).mul_(self._grid.step)
        return mean


def _levels(first: int, values: Tensor, quantizer: Quantizer) -> Tensor:
    """The integers of a segment that begins with coordinate `first`: int32, on the CPU, where the coder is.

    They are made where `values` are. From a GPU they come as int16, which holds all levels.
    """
    dtype = torch.int32 if values.device.type == "cpu" else torch.int16
    levels = torch.empty(values.numel(), dtype=dtype, device=values.device)
    quantize_into(levels, values, quantizer, first)
    return levels.cpu().to(torch.int32)


def in_segments(pieces: Iterator[Tensor], size: int) -> Iterator[tuple[int, Tensor]]:
    """Float32 pieces of any lengths as segments of `size`, the last shorter, each with the index of its first value.

    They are on the device of the first piece. Each segment overwrites the one before.
    """
    device, pieces = with_device(pieces)
    segment, n_held, first = torch.empty(size, device=device), 0, 0
    for piece in pieces:
        offset = 0
        while offset < piece.numel():
            n_taken = min(size - n_held, piece.numel() - offset)
            segment[n_held : n_held + n_taken] = piece[offset : offset + n_taken]
            n_held, offset = n_held + n_taken, offset + n_taken
            if n_held == size:
                yield first, segment
                first, n_held = first + size, 0
    if n_held:
        yield first, segment[:n_held]
