"""A client's side: from its weight change and what it measured to the integers that it masks.

    y = clip(x) w / weight_unit;    levels: y rotated and rounded on the step (`codec/rotated.py`)

First each value is cut to `max_abs`, then the L2 norm to the clip norm, then the client weighs, by `sample_count_max`
samples at most. Nobody else could, and so only the client can see to these bounds. Whoever lies here is not found out:
secure aggregation hides that too.

**No bound is answered by a refusal.** The coordinator chooses the bounds. If a client declined where its own numbers
are beyond one, each attempt would tell the coordinator on which side of it they lie. So values are cut, samples beyond
`sample_count_max` do not count, and a change that is too long is shortened. `Contribution.remarks` says so, for the
client's own log.

**A change that is not finite** is zeros and noise in a private round whose noise the client relies on: the noise covers
that, too. Elsewhere it is refused (`NonFiniteUpdate`). Zeros there would thin the sum out: where all clients but one
send zeros, the sum is the update of that one, and a coordinator can bring that about by a learning rate at which
training diverges for all but the client with the fewest steps. A client that declines is a drop-out instead, and t
others must be left. How much noise there is, is the coordinator's choice, so a client relies on it only if a budget of
its own bounds what it costs.

What is refused is refused without numbers: the sentence may go to the coordinator, and it is not to know them.

**The dither is the client's own.** The coordinator knows a round's step. Where the step is so coarse that most levels
are zero, those that are not are the dither's doing. By a public dither the coordinator could tell whose each is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from umbel.aggregation.codec.plan import NORM_MAX, as_float32
from umbel.aggregation.codec.quantize import LEVEL_MAX, UNIT
from umbel.aggregation.codec.rotated import Dither
from umbel.aggregation.errors import NonFiniteUpdate
from umbel.aggregation.grid import cut_values, to_integers
from umbel.aggregation.privacy.compatible import require_private_model
from umbel.aggregation.privacy.contribution import contribution as noisy_levels
from umbel.aggregation.secagg.composition import Composition
from umbel.aggregation.secagg.derive import dither_key
from umbel.aggregation.secagg.errors import SecAggError
from umbel.aggregation.secagg.masks import Masks
from umbel.aggregation.secagg.words import RMS_UNIT, STEPS_LIMIT, Counts, Measured
from umbel.aggregation.secagg.work_floor import steps_needed
from umbel.aggregation.stated_order import sum_of_squares
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor


CONTRIBUTION_SECRET_BYTES = 32
_NORM_MOST = NORM_MAX * (1 - 2.0**-10)  # so that what float32 rounds off takes no norm beyond what can be rotated

_RMS_WHOLE = LEVEL_MAX / 5  # levels: of normal values, as rotated ones are, one in two million is cut


class ContributionRefused(SecAggError):
    """Work that must not be sent; says why, and no number of it."""


class TooLittleWork(ContributionRefused):
    """Less work than the round, or the site, asks of an update."""


@dataclass(frozen=True, slots=True)
class LocalWork:
    """What a client did, as it would say it if nobody else could read it; see `WorkDone`. All of it travels masked.

    `draws`: how often the client was drawn, its weight under proportional weighting; public.
    """

    sample_count: int = field(repr=False)
    steps_done: int = field(repr=False)
    steps_planned: int = field(repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict[str, float], repr=False)
    evaluation: Mapping[str, float] = field(default_factory=dict[str, float], repr=False)
    evaluation_sample_count: int = field(default=0, repr=False)
    draws: int = 1


SILENT = LocalWork(1, 1, 1)
"""What every client says in a private round, so that nothing travels without noise."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a client masks. `words`: int64, `n_words`, to be masked as uint64. `values`: the weighted change, float32,
    in layout order, zero where it travels among the words. `secret`: what its dither and its noise are drawn from.
    `remarks`: what was cut or left out, and what helps; they have numbers of this client, so they are for its own log
    alone.
    """

    composition: Composition
    words: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    secret: bytes = field(repr=False)
    remarks: tuple[str, ...] = field(default=(), repr=False)

    def levels(self) -> Iterator[Tensor]:
        """The levels in consecutive parts, int32, each a new tensor: the same ones whenever asked. Their lowest `bits`
        are what counts. Those of a private round have this client's noise.
        """
        modular, dither = self.composition.modular, own_dither(self.secret)
        if (noise := self.composition.secure.noise) is not None:
            return noisy_levels(modular.rotated, self.values, dither, noise, self.secret)
        return modular.residues(self.values, dither)


@dataclass(frozen=True, slots=True)
class _Change:
    """A whole change. `values`: zero at exact values; `exact`: these values; `norm`: L2, of `values`; `n_cut`: how many
    values, of both, were beyond `max_abs`.
    """

    values: Tensor
    exact: Tensor
    norm: float
    n_cut: int = 0


def own_dither(secret: bytes) -> Dither:
    """A client's own dither: 2 bytes of a keystream (`masks.py`) for each level, the same ones whenever asked."""
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
    """`change` gives the weight change from its beginning as float32 in pieces, on the CPU. `secret`: 32 bytes that
    nobody can guess, for this contribution alone: its dither and its noise are drawn from them. `is_covered`: whether
    the client relies on the round's noise, which there must be then.

    Raises `ContributionRefused`, and `NonFiniteUpdate` for a change that is not finite; where noise covers it and the
    work is enough, neither. Memory: the change, as float32.
    """
    if len(secret) != CONTRIBUTION_SECRET_BYTES:
        raise ValueError(f"a contribution takes a secret of {CONTRIBUTION_SECRET_BYTES} random bytes")
    steps, is_private = (work.steps_done, work.steps_planned), composition.secure.noise is not None
    if is_private:
        require_private_model(composition.layout)
        work, (read, remarks) = SILENT, _read_unseen(composition, change, is_covered=is_covered)
    else:
        read, remarks = _read_bounded(composition, change)
    weight = _weight(composition, work)
    require_enough(*steps, composition.secure.minimum_work)
    scale = composition.codec.scale(read.norm) * weight / composition.secure.weight_unit
    if read.norm * scale > _NORM_MOST:
        scale = _NORM_MOST / read.norm
        remarks += ("the weight change is far too long, and is shortened: train with a lower learning rate",)
    scale = as_float32(scale)
    if read.norm * scale / math.sqrt(composition.n_levels) * composition.codec.inverse_step > _RMS_WHOLE:
        remarks += (
            f"the round's step is so fine that values of this update are cut at {LEVEL_MAX} steps, and a sum with "
            "another step would show what was cut: ask the coordinator's operator why",
        )
    read.values.mul_(scale)
    counts, measured = _counts(composition, work, weight, read.norm * scale, is_private=is_private)
    joined = composition.words.join(counts, measured, to_integers(read.exact, composition.grid).mul_(weight))
    return Contribution(composition, joined, read.values, secret, remarks)


def nothing(composition: Composition) -> Callable[[], Iterator[Tensor]]:
    """The change of a client whose training has failed and whom noise covers: what it sends is noise alone."""
    return lambda: iter([torch.zeros(composition.layout.n_values, dtype=torch.float32)])


def _counts(
    composition: Composition, work: LocalWork, weight: int, norm: float, *, is_private: bool
) -> tuple[Counts, list[Measured]]:
    """The words but for the exact values. `norm`: of the weighted change."""
    samples, words = _samples(composition, work), composition.words
    measured = [words.measured(work.metrics.get(name), samples) for name in words.metrics]
    measured += [words.measured(work.evaluation.get(name), work.evaluation_sample_count) for name in words.evaluation]
    rms = norm / math.sqrt(max(composition.layout.n_values, 1))
    counts = Counts(
        clients=1,
        weight=weight,
        sample_count=samples,
        n_partial=int(work.steps_done < work.steps_planned),
        steps_done=min(work.steps_done, STEPS_LIMIT),
        steps_planned=min(work.steps_planned, STEPS_LIMIT),
        rms=0 if is_private else round(min(rms * composition.codec.inverse_step, LEVEL_MAX) * RMS_UNIT),
        n_cut=sum(is_cut for _, is_cut in measured),
    )
    return counts, [one for one, _ in measured]


def require_enough(steps_done: int, steps_planned: int, floor: float) -> None:
    """Raise `TooLittleWork` if so many steps are less than this share of those planned (`work_floor.py`)."""
    if steps_done < steps_needed(floor, steps_planned):
        raise TooLittleWork("less of the work was done than must be for an update to hide among the others")


def _samples(composition: Composition, work: LocalWork) -> int:
    """How many of its samples count."""
    return min(work.sample_count, composition.sample_count_max)


def _weight(composition: Composition, work: LocalWork) -> int:
    """What the client counts in the mean."""
    if work.sample_count < 1:
        raise ContributionRefused("trained on no samples: let train return how many there are")
    if not 1 <= work.steps_done <= work.steps_planned:
        raise ContributionRefused("steps_done must lie between 1 and steps_planned; correct what train returns")
    if not composition.secure.is_proportional:
        return _samples(composition, work)
    if not 1 <= work.draws <= composition.secure.clients_max:
        raise ContributionRefused("a round draws no client so often; the assignment is wrong")
    return work.draws


def _read_bounded(composition: Composition, change: Callable[[], Iterator[Tensor]]) -> tuple[_Change, tuple[str, ...]]:
    """The change, each value within `max_abs`; and the remarks."""
    read = _read(composition, change, lambda piece, first: cut_values(piece, composition.grid, first))
    if not read.n_cut:
        return read, ()
    return read, (
        f"values of the update beyond the run's max_abs {composition.grid.max_abs:g}: {read.n_cut}, each cut to that; "
        "train with a lower learning rate, or have max_abs raised in the run file",
    )


def _read_unseen(
    composition: Composition, change: Callable[[], Iterator[Tensor]], *, is_covered: bool
) -> tuple[_Change, tuple[str, ...]]:
    """The change of a private round: the clip bounds its values, and noise that is relied on covers zeros."""
    read = _read(composition, change, lambda _piece, _first: 0)
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
    cut: Callable[[Tensor, int], int],
) -> _Change:
    """`cut` changes a piece of the copy in place, the first value of which has this index; how many values."""
    values = torch.empty(composition.layout.n_values, dtype=torch.float32)
    exact = torch.empty(composition.exact.n_values, dtype=torch.float32)
    squares, first, n_cut = list[float](), 0, 0
    for piece in change():
        place = values[first : first + piece.numel()]
        if place.numel() != piece.numel():
            raise ValueError(f"there are more than the layout's {values.numel()} values")
        place.copy_(piece)
        n_cut += cut(place, first)
        for at, here in composition.exact.within(first, piece.numel()):
            exact[at : at + here.stop - here.start] = place[here]
            place[here] = 0.0
        squares.append(sum_of_squares(place))
        first += piece.numel()
    if first != values.numel():
        raise ValueError(f"there are {first} values, the layout has {values.numel()}")
    return _Change(values, exact, math.sqrt(math.fsum(squares)), n_cut)
