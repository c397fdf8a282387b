"""A client's side: from its weight change and what it measured to the integers that it masks.

    y = clip(x) w / weight_unit;    levels: y rotated and rounded on the step (`codec/rotated.py`)

A change with a value beyond `max_abs` is shortened until it has none, then to the clip norm, and then the client weighs
it, by `sample_count_max` samples at most. Only the client can enforce these bounds. A client that violates them is not
detected, because secure aggregation hides that too.

The coordinator chooses the bounds and the step, so nothing here tells it on which side of them a client's numbers are
(docs/decisions/0013-no-bound-is-answered.md and 0016-a-dither-of-its-own.md have the attacks):

- No bound leads to a refusal. `Contribution.remarks` says what was shortened, for the client's own log.
- No value is cut by itself: a change is shortened as a whole, also until nearly no level exceeds the bound of levels.
- Masked numbers (levels, exact values, the size of the change) are rounded up or down at random, by draws that only the
  client knows, and their mean is the number itself.
- A change that is not finite becomes zeros and noise if the client relies on the round's noise. Otherwise it is refused
  (`NonFiniteUpdate`), because the zeros of one client would not hide the other clients. A client relies on noise only
  if its own budget bounds the cost, because the coordinator chooses the noise.
- A refusal has no numbers.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from umbel.aggregation.algorithms.fednova import weighted_steps
from umbel.aggregation.codec.rotated import Dither
from umbel.aggregation.counts import CountsByName
from umbel.aggregation.errors import NonFiniteUpdate
from umbel.aggregation.kernels.arguments import UNIT
from umbel.aggregation.kernels.rotation import greatest_block_square
from umbel.aggregation.model.state import with_device
from umbel.aggregation.plans.codec import as_float32
from umbel.aggregation.privacy.section import require_private_model
from umbel.aggregation.privacy.skellam import contribution as noisy_levels
from umbel.aggregation.reports import EvaluationDone, WorkDone
from umbel.aggregation.secagg.crypto.derive import dither_key, word_dither_key
from umbel.aggregation.secagg.crypto.masks import Masks
from umbel.aggregation.secagg.errors import SecAggError
from umbel.aggregation.secagg.numbers.composition import (
    RMS_UNIT,
    STEPS_LIMIT,
    Composition,
    Counts,
    MeasuredSums,
    Words,
)
from umbel.aggregation.secagg.numbers.metric_sums import MetricSum, MetricSums
from umbel.aggregation.secagg.numbers.plan import steps_needed
from umbel.aggregation.stated_order import divisor, sum_of_squares
from umbel.aggregation.types import LEVEL_MAX, NORM_MAX
from umbel.aggregation.update.grid import fitting, greatest

CONTRIBUTION_SECRET_BYTES = 32
_NORM_MOST = NORM_MAX * (1 - 2.0**-10)  # so that float32 rounding takes no norm beyond what can be rotated
_RMS_WHOLE = LEVEL_MAX / 5  # levels: of normal values, as rotated ones are, one in two million is cut
_DRAW_BITS = 52  # of a word's dither: those of a fraction in float64


class ContributionRefused(SecAggError):
    """Work that must not be sent; says why, without its numbers."""


class TooLittleWork(ContributionRefused):
    """Less work than the round or the site requires."""


@dataclass(frozen=True, slots=True)
class LocalWork:
    """A client's work, which travels masked; see `WorkDone`."""

    sample_count: int = field(repr=False)
    steps_done: int = field(repr=False)
    steps_planned: int = field(repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict[str, float], repr=False)
    evaluation: Mapping[str, float] = field(default_factory=dict[str, float], repr=False)
    evaluation_sample_count: int = field(default=0, repr=False)
    counts: CountsByName = field(default_factory=dict[str, tuple[int, ...]], repr=False)
    evaluation_counts: CountsByName = field(default_factory=dict[str, tuple[int, ...]], repr=False)
    weights: Mapping[str, int] = field(default_factory=dict[str, int], repr=False)
    evaluation_weights: Mapping[str, int] = field(default_factory=dict[str, int], repr=False)

    @classmethod
    def of(cls, done: WorkDone) -> "LocalWork":
        """The work that a report of plain rounds states."""
        return cls(
            sample_count=done.sample_count,
            steps_done=done.steps_done,
            steps_planned=done.steps_planned,
            metrics=done.metrics,
            evaluation=done.evaluation,
            evaluation_sample_count=done.evaluation_sample_count,
            counts=done.counts,
            evaluation_counts=done.evaluation_counts,
            weights=done.weights,
            evaluation_weights=done.evaluation_weights,
        )

    @classmethod
    def measured_in(cls, done: EvaluationDone | None) -> "LocalWork":
        """The work of a report of plain evaluations; None: the client has no held-out data."""
        if done is None:
            return measured()
        return measured(done.evaluation, done.evaluation_counts, done.sample_count, done.evaluation_weights)

    @property
    def metric_names(self) -> frozenset[str]:
        """The metrics of training, also those with the weight 0, which may have no value."""
        return _names(self.metrics, self.weights)

    @property
    def evaluation_names(self) -> frozenset[str]:
        """The metrics of held-out data, likewise."""
        return _names(self.evaluation, self.evaluation_weights)


def _names(metrics: Mapping[str, float], own: Mapping[str, int]) -> frozenset[str]:
    return frozenset(metrics) | {name for name, weight in own.items() if weight == 0}


def measured(
    metrics: Mapping[str, float] | None = None,
    counts: CountsByName | None = None,
    sample_count: int = 0,
    weights: Mapping[str, int] | None = None,
) -> LocalWork:
    """The work of a client that only measured a model, on this many held-out samples; 0 if it has none."""
    return LocalWork(
        sample_count=sample_count,
        steps_done=1,
        steps_planned=1,
        evaluation=metrics or {},
        evaluation_sample_count=sample_count,
        evaluation_counts=counts or {},
        evaluation_weights=weights or {},
    )


def seeded_secret(client_seed: int, attempt: int) -> bytes:
    """A client's secret where nobody has to be kept from guessing it: in a simulation, and inside one silo. It is new
    in each attempt, and the same in each run. `client_seed`: of its training (`RoundPlan.seed_of`).
    """
    return hashlib.shake_256(f"contribution/{client_seed}/{attempt}/0".encode()).digest(CONTRIBUTION_SECRET_BYTES)


SILENT = LocalWork(1, 1, 1)
"""The work that every client states in a private round, so that nothing travels without noise."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a client masks."""

    composition: Composition
    words: Tensor = field(repr=False)  # int64, `n_words`, to be masked as uint64
    # The weighted change: float32, in layout order, zero at exact values, on any device.
    values: Tensor = field(repr=False)
    secret: bytes = field(repr=False)  # from which its dither and its noise are drawn
    remarks: tuple[str, ...] = field(
        default=(), repr=False
    )  # cuts and remedies, with numbers: for the client's own log
    weight: int = field(default=1, repr=False)  # in the mean

    def on(self, device: torch.device) -> "Contribution":
        """The same contribution with its values on `device`, which is to make the levels."""
        return replace(self, values=self.values.to(device))

    @property
    def decoded(self) -> Tensor:
        """The change as the coordinator would decode it if this client were alone in the sum: float32, in layout order,
        with zeros for exact values, on the device of `values`.
        """
        alone = self.composition.modular.rotated.plain_mean(self.levels(), 1)
        return alone.mul_(self.composition.secure.weight_unit / self.weight)

    def levels(self) -> Iterator[Tensor]:
        """The levels in consecutive parts, int32, each a new tensor on the device of `values`; every call returns the
        same.

        Only their lowest `bits` count. In a private round they have this client's noise.
        """
        modular, dither = self.composition.modular, own_dither(self.secret)
        if noise := self.composition.secure.noise:
            return noisy_levels(modular.rotated, self.values, dither, noise, self.secret)
        return modular.residues(self.values, dither)


@dataclass(frozen=True, slots=True)
class _Change:
    """A whole change."""

    values: Tensor  # zero at exact values; on the device of the first piece
    exact: Tensor  # on the CPU
    norm: float  # L2, of `values`
    greatest: float  # the greatest absolute value of both; 0 if it is not needed


def own_dither(secret: bytes) -> Dither:
    """A client's own dither: 2 bytes of a keystream (`masks.py`) for each level; every call returns the same."""
    keystream = Masks([dither_key(secret)], [1])

    def part(first: int, length: int) -> Tensor:
        drawn = torch.zeros(length, dtype=torch.int16)
        keystream.apply(drawn, first)
        return drawn.to(torch.int32).bitwise_and_(UNIT - 1)

    return part


def contribution(
    composition: Composition,
    change: Callable[[], Iterator[Tensor]],
    work: LocalWork,
    secret: bytes,
    *,
    is_covered: bool = False,
) -> Contribution:
    """The contribution of a client. Memory: the change, as float32, on the device of its first piece.

    `change`: returns the weight change from its beginning, as float32 pieces on any device. `secret`: 32 unguessable
    bytes for this contribution alone, from which dither and noise are drawn. `is_covered`: whether the client relies on
    the round's noise, which there must be then.

    Raises `ContributionRefused`, and `NonFiniteUpdate` for a change that is not finite and that no noise covers.
    """
    if len(secret) != CONTRIBUTION_SECRET_BYTES:
        raise ValueError(
            f"a contribution needs a secret of {CONTRIBUTION_SECRET_BYTES} random bytes, not {len(secret)}"
        )
    steps, is_private = (work.steps_done, work.steps_planned), composition.secure.is_private
    if is_private:
        require_private_model(composition.layout)
        work, (read, remarks) = SILENT, _read_unseen(composition, change, is_covered=is_covered)
    else:
        read, remarks = _read(composition, change, greatest), tuple[str, ...]()
    weight = _weight(composition, work)
    require_enough(*steps, composition.secure.minimum_work)
    shrink, most = fitting(read.greatest, composition.grid)
    if shrink != 1.0:
        remarks += (
            f"a value of the update is beyond the run's max_abs {composition.grid.max_abs:g}, so the whole update is "
            "shortened: train with a lower learning rate, or ask the operator to raise max_abs in the run file",
        )
    fitted = most / shrink
    block_norm = math.sqrt(greatest_block_square(read.values, composition.modular.rotated.blocks))
    scale, shortened = _scale(composition, read.norm * fitted, block_norm * fitted, weight)
    read.values.div_(divisor(shrink, read.values)).mul_(as_float32(most * scale))
    draws = _word_draws(secret, 1 + composition.exact.n_values)
    counts, measured = _counts(composition, work, weight, read.norm * fitted * scale, draws[:1], is_private=is_private)
    exact, exact_most = _exact(composition, read.exact, (shrink, most * weight), weight)
    counted = composition.words.counted(work.counts, work.evaluation_counts)
    rounded = _at_random(exact, draws[1:]).clamp_(-exact_most, exact_most)
    joined = composition.words.join(counts, measured, rounded, counted)
    return Contribution(composition, joined, read.values, secret, remarks + shortened, weight)


def _exact(composition: Composition, values: Tensor, scale: tuple[float, float], weight: int) -> tuple[Tensor, Tensor]:
    """Exact values in steps of the grid, float64, and the greatest that each may be, int64.

    `scale`: a divisor and a factor. Tensors of the kind count are neither shortened nor weighted.
    """
    counted, whole = composition.is_counted, values.to(torch.float64)
    scaled = torch.where(counted, whole, (whole / scale[0]).mul_(scale[1])).div_(composition.grid.step)
    most = math.ceil(composition.grid.max_abs / composition.grid.step)  # a last bit may be beyond it
    return scaled, torch.where(counted, most, most * weight)


def nothing(composition: Composition) -> Callable[[], Iterator[Tensor]]:
    """A change of zeros, for a client that relies on noise and whose training has failed: it sends only noise."""
    return lambda: iter([torch.zeros(composition.layout.n_values, dtype=torch.float32)])


def _scale(composition: Composition, norm: float, block_norm: float, weight: int) -> tuple[float, tuple[str, ...]]:
    """The factor that clips, weighs and shortens a change, and the remarks.

    `norm`, `block_norm`: L2, of the change and of its longest block.
    """
    scale, remarks = composition.codec.scale(norm) * weight / composition.secure.weight_unit, tuple[str, ...]()
    if norm * scale > _NORM_MOST:
        scale = _NORM_MOST / norm
        remarks += (
            "the norm of the update is far too large, so the update is shortened: train with a lower learning rate",
        )
    rms = block_norm * scale / composition.modular.rotated.blocks.side * composition.codec.inverse_step
    if rms > _RMS_WHOLE:
        scale *= _RMS_WHOLE / rms
        remarks += (
            f"the round's step is so fine that this update is shortened to fit into {LEVEL_MAX} steps. In the first "
            "round the usual cause is a running statistic or a counter, sent as ordinary floats, that changes far "
            "more than the weights. Ask the operator to list such tensors as private in [tensors], or to raise "
            "codec.first_norm in the run file. If neither explains the step, ask the operator why it is so fine: a "
            "second sum with another step would show how large this update is",
        )
    return scale, remarks


def _word_draws(secret: bytes, n: int) -> Tensor:
    """A client's own draws for `n` of its words: int64, from 0 on, of `_DRAW_BITS` bits."""
    drawn = torch.zeros(n, dtype=torch.int64)
    Masks([word_dither_key(secret)], [1]).apply(drawn)
    return drawn.bitwise_and_((1 << _DRAW_BITS) - 1)


def _at_random(values: Tensor, draws: Tensor) -> Tensor:
    """float64 -> int64: rounded up with the probability of the fraction, otherwise down."""
    whole = values.floor()
    is_up = (values - whole).mul_(2.0**_DRAW_BITS) > draws.to(torch.float64)
    return whole.to(torch.int64).add_(is_up)


def _counts(
    composition: Composition, work: LocalWork, weight: int, norm: float, draw: Tensor, *, is_private: bool
) -> tuple[Counts, MeasuredSums]:
    """The words except the exact values. `norm`: of the weighted change. `draw`: for the one rounded word."""
    samples, words = _samples(composition, work), composition.words
    trained = work.metrics, work.weights, samples
    held_out = work.evaluation, work.evaluation_weights, work.evaluation_sample_count
    training = {name: _measured(words, name, *trained) for name in words.of_training.sent_of(work.metric_names)}
    evaluation = {
        name: _measured(words, name, *held_out) for name in words.of_evaluation.sent_of(work.evaluation_names)
    }
    rms = norm / math.sqrt(max(composition.layout.n_values, 1))
    size = torch.tensor([min(rms * composition.codec.inverse_step, LEVEL_MAX) * RMS_UNIT], dtype=torch.float64)
    counts = Counts(
        clients=1,
        weight=weight,
        sample_count=samples,
        n_partial=int(work.steps_done < work.steps_planned),
        steps_done=min(work.steps_done, STEPS_LIMIT),
        steps_planned=min(work.steps_planned, STEPS_LIMIT),
        rms=0 if is_private else int(_at_random(size, draw)),
        n_cut=sum(is_cut for _, is_cut in (*training.values(), *evaluation.values())),
        weighted_steps=weighted_steps([(weight, work.steps_done)]) if words.is_normalised else None,
    )
    return counts, MeasuredSums(_sums(training), _sums(evaluation))


def _sums(measured: Mapping[str, tuple[MetricSum, bool]]) -> MetricSums:
    return MetricSums({name: one for name, (one, _) in measured.items()})


def _measured(
    words: Words, name: str, metrics: Mapping[str, float], own: Mapping[str, int], samples: int
) -> tuple[MetricSum, bool]:
    """A metric with its own weight, or else by samples, and whether it was cut.

    With the weight 0 a client still counts as one that has the metric, so the number of clients does not show who had
    nothing to measure.
    """
    if own.get(name) == 0:
        return MetricSum(clients=1), False
    return words.measured(metrics.get(name), own.get(name, samples))


def require_enough(steps_done: int, steps_planned: int, floor: float) -> None:
    """Raise `TooLittleWork` if fewer steps were done than this share of those planned (`plan.py`)."""
    if steps_done < steps_needed(floor, steps_planned):
        raise TooLittleWork(
            "this client did less work than minimum_work requires, so its update would stand out from the others"
        )


def _samples(composition: Composition, work: LocalWork) -> int:
    return min(work.sample_count, composition.sample_count_max)


def _weight(composition: Composition, work: LocalWork) -> int:
    """The client's weight in the mean."""
    if work.sample_count < 1 and not composition.is_measured_only:
        raise ContributionRefused(
            "the client trained on no samples: `train` must return the number of samples that it used"
        )
    if not 1 <= work.steps_done <= work.steps_planned:
        raise ContributionRefused("steps_done must lie between 1 and steps_planned; correct what `train` returns")
    return _samples(composition, work)


def _read_unseen(
    composition: Composition, change: Callable[[], Iterator[Tensor]], *, is_covered: bool
) -> tuple[_Change, tuple[str, ...]]:
    """The change of a private round: the clip bounds its values, and noise covers zeros if the client relies on it."""
    read = _read(composition, change, lambda _piece, _first: 0.0)
    if math.isfinite(read.norm):
        return read, ()
    if not is_covered:
        raise NonFiniteUpdate("the weight change is not finite")
    read.values.zero_()
    return replace(read, norm=0.0), (
        "the update is not finite, so zeros and noise are sent in its place: training diverged, or the data hold a NaN "
        "or infinity; check the data, then try a smaller learning rate",
    )


def _read(
    composition: Composition,
    change: Callable[[], Iterator[Tensor]],
    greatest_of: Callable[[Tensor, int], float],
) -> _Change:
    """`greatest_of`: the greatest absolute value of a piece that begins at this index."""
    device, pieces = with_device(change())
    values = torch.empty(composition.layout.n_values, dtype=torch.float32, device=device)
    exact = torch.empty(composition.exact.n_values, dtype=torch.float32)
    squares, first, most = list[float](), 0, 0.0
    for piece in pieces:
        place = values[first : first + piece.numel()]
        if place.numel() != piece.numel():
            raise ValueError(f"the weight change has more values than the layout, which has {values.numel()}")
        place.copy_(piece)
        most = max(most, greatest_of(place, first))
        for at, here in composition.exact.within(first, piece.numel()):
            exact[at : at + here.stop - here.start] = place[here]
        composition.exact.clear(place, first)
        squares.append(sum_of_squares(place))
        first += piece.numel()
    if first != values.numel():
        raise ValueError(f"the weight change has {first} values, but the layout has {values.numel()}")
    return _Change(values, exact, math.sqrt(math.fsum(squares)), most)
