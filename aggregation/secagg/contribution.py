"""A client's side: from its weight change and what it measured to the integers that it masks.

    y = clip(x) w / weight_unit;    levels: y rotated and rounded on the step (`codec/rotated.py`)

First the L2 norm is cut to the clip norm, then the client weighs. Nobody else could, and so only the client can see to
it that no weight is above the run's `sample_count_max`, no value above `max_abs`. Whoever lies here is not found out:
secure aggregation hides that too.

What is refused is refused without numbers: the sentence may go to the coordinator, and it is not to know them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from umbel.aggregation.codec.plan import NORM_MAX, as_float32
from umbel.aggregation.codec.quantize import LEVEL_MAX
from umbel.aggregation.grid import check_values, to_integers
from umbel.aggregation.privacy.compatible import require_private_model
from umbel.aggregation.privacy.contribution import contribution as noisy_levels
from umbel.aggregation.secagg.composition import Composition
from umbel.aggregation.secagg.errors import SecAggError
from umbel.aggregation.secagg.words import RMS_UNIT, STEPS_LIMIT, Counts, Measured
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor


NOISE_KEY_BYTES = 32


class ContributionRefused(SecAggError):
    """Work that must not be sent; says why, and no number of it."""


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


_SILENT = LocalWork(1, 1, 1)
"""What every client says in a private round, so that nothing travels without noise."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a client masks. `words`: int64, `n_words`, to be masked as uint64. `values`: the weighted change, float32,
    in layout order, zero where it travels among the words.
    """

    composition: Composition
    rank: int
    words: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    noise_key: bytes = field(default=b"", repr=False)

    def levels(self) -> Iterator[Tensor]:
        """The levels in consecutive parts, int32, each a new tensor: the same ones whenever asked. Their lowest `bits`
        are what counts. Those of a private round have this client's noise.
        """
        if (noise := self.composition.secure.noise) is not None:
            rotated = self.composition.modular.rotated
            return noisy_levels(rotated, self.values, self.rank, noise, self.noise_key)
        return self.composition.modular.residues(self.values, self.rank)


def contribution(
    composition: Composition,
    change: Callable[[], Iterator[Tensor]],
    work: LocalWork,
    rank: int,
    noise_key: bytes = b"",
) -> Contribution:
    """`change` gives the weight change from its beginning as float32 in pieces, on the CPU. `rank`: in the cohort.

    Raises `ContributionRefused`, and `NonFiniteUpdate` or `UpdateOutOfRange` for values that cannot stand on the grid,
    whose words name a value. Memory: the change, as float32. `noise_key`: of a private round, 32 bytes that nobody can
    guess, for this contribution alone.
    """
    if composition.secure.noise is not None:
        _check_private(composition, noise_key)
        work = _SILENT
    weight = _weight(composition, work)
    values, exact, norm = _read(composition, change)
    scale = as_float32(composition.codec.scale(norm) * weight / composition.secure.weight_unit)
    if not norm * scale <= NORM_MAX:
        raise ContributionRefused("the weight change is far too long; train with a lower learning rate")
    values.mul_(scale)
    rms = norm * scale / math.sqrt(max(values.numel(), 1))
    words = composition.words
    measured = [_measured(composition, work.metrics.get(name), work.sample_count) for name in words.metrics]
    measured += [
        _measured(composition, work.evaluation.get(name), work.evaluation_sample_count) for name in words.evaluation
    ]
    counts = Counts(
        clients=1,
        weight=weight,
        sample_count=work.sample_count,
        n_partial=int(work.steps_done < work.steps_planned),
        steps_done=min(work.steps_done, STEPS_LIMIT),
        steps_planned=min(work.steps_planned, STEPS_LIMIT),
        rms=0 if noise_key else round(min(rms * composition.codec.inverse_step, LEVEL_MAX) * RMS_UNIT),
        n_cut=sum(is_cut for _, is_cut in measured),
    )
    joined = words.join(counts, [one for one, _ in measured], to_integers(exact, composition.grid).mul_(weight))
    return Contribution(composition, rank, joined, values, noise_key)


def _check_private(composition: Composition, noise_key: bytes) -> None:
    """Raise `ValueError` for a model or a key with which a private round would show more than its noise allows."""
    require_private_model(composition.layout)
    if len(noise_key) != NOISE_KEY_BYTES:
        raise ValueError(f"the noise of a private round takes a key of {NOISE_KEY_BYTES} random bytes")


def _weight(composition: Composition, work: LocalWork) -> int:
    """What the client counts in the mean."""
    if not 1 <= work.sample_count <= composition.sample_count_max:
        raise ContributionRefused(
            f"trained on no samples, or on more than the {composition.sample_count_max} that the run accepts: let "
            "train return fewer, or have sample_count_max raised in the run file"
        )
    if not 1 <= work.steps_done <= work.steps_planned:
        raise ContributionRefused("steps_done must lie between 1 and steps_planned; correct what train returns")
    if not composition.secure.is_proportional:
        return work.sample_count
    if not 1 <= work.draws <= composition.secure.clients_max:
        raise ContributionRefused("a round draws no client so often; the assignment is wrong")
    return work.draws


def _read(composition: Composition, change: Callable[[], Iterator[Tensor]]) -> tuple[Tensor, Tensor, float]:
    """The whole change, zero at exact values; these values; and the L2 norm of the others."""
    values = torch.empty(composition.layout.n_values, dtype=torch.float32)
    exact = torch.empty(composition.exact.n_values, dtype=torch.float32)
    energy, first = 0.0, 0
    for piece in change():
        check_values(piece, composition.grid, first)
        place = values[first : first + piece.numel()]
        if place.numel() != piece.numel():
            raise ValueError(f"there are more than the layout's {values.numel()} values")
        place.copy_(piece)
        for at, here in composition.exact.within(first, piece.numel()):
            exact[at : at + here.stop - here.start] = place[here]
            place[here] = 0.0
        energy += float(place.to(torch.float64).square().sum())
        first += piece.numel()
    if first != values.numel():
        raise ValueError(f"there are {first} values, the layout has {values.numel()}")
    return values, exact, math.sqrt(energy)


def _measured(composition: Composition, value: float | None, samples: int) -> tuple[Measured, bool]:
    return composition.words.measured(math.nan if value is None else value, samples)
