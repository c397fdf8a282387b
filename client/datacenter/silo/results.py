"""One result of all ranks. Ranks that take different parts of the batches have measured different samples."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from umbel.client.datacenter.ranks.group import GroupError
from umbel.client.datacenter.ranks.names import RANKS, RankNames
from umbel.client.local.batches import BatchPart
from umbel.client.local.results import Evaluation, TrainResult, WeightedMean

log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class _Measured:
    """What some ranks have measured of the same samples."""

    n_samples: int
    metrics: Mapping[str, float]
    counts: Mapping[str, tuple[int, ...]]
    weights: Mapping[str, int]


def one_training(parts: Sequence[BatchPart], results: Sequence[TrainResult], names: RankNames = RANKS) -> TrainResult:
    """The silo's result. Raises `GroupError` for ranks that disagree about samples or steps. `names`: of the ranks."""
    first = results[0]
    for rank, one in enumerate(results):
        for name in ("sample_count", "steps_done", "steps_planned"):
            if getattr(one, name) != getattr(first, name):
                raise GroupError(
                    f"train returned {name} = {getattr(one, name)} on {names.of(rank)}, and {getattr(first, name)} on "
                    f"{names.of(0)}: all ranks must take the same steps, and return the number of samples of the whole "
                    f"{names.whole}"
                )
    measured = [_Measured(max(one.samples_seen, 1), one.metrics, one.counts, one.weights) for one in results]
    found = _together(parts, measured, names)
    return TrainResult(
        first.sample_count,
        first.steps_done,
        first.steps_planned,
        found.metrics,
        found.counts,
        steps_full=first.steps_full,
        first_loss=_mean(one.first_loss for one in results),
        last_loss=_mean(one.last_loss for one in results),
        weights=found.weights,
        samples_seen=found.n_samples,
    )


def one_evaluation(
    parts: Sequence[BatchPart], results: Sequence[Evaluation | None], names: RankNames = RANKS
) -> Evaluation | None:
    """The silo's evaluation; None if no rank has measured anything. `names`: of the ranks."""
    measured = [
        _Measured(0, {}, {}, {}) if one is None else _Measured(one.sample_count, one.metrics, one.counts, one.weights)
        for one in results
    ]
    if all(one is None for one in results):
        return None
    found = _together(parts, measured, names)
    return Evaluation(found.n_samples, found.metrics, found.counts, found.weights)


def _together(parts: Sequence[BatchPart], measured: Sequence[_Measured], names: RankNames) -> _Measured:
    for rank, one in enumerate(measured):
        if strange := [f"{name} = {value}" for name, value in one.metrics.items() if not math.isfinite(value)]:
            # Another line says what becomes of it, which is not the same in every round (`client/rounds`).
            log.warning("%s has measured %s", names.of(rank), ", ".join(strange))
    ranks = sorted(range(len(parts)), key=lambda rank: parts[rank].index)
    same_samples = [
        _merged([measured[rank] for rank in group]) for _, group in groupby(ranks, key=lambda rank: parts[rank].index)
    ]
    return _added(same_samples)


def _merged(measured: Sequence[_Measured]) -> _Measured:
    """Of the same samples: each metric from the first rank that has it."""
    metrics, counts, weights = dict[str, float](), dict[str, tuple[int, ...]](), dict[str, int]()
    for one in reversed(measured):
        metrics |= one.metrics
        counts |= one.counts
        weights |= one.weights
    return _Measured(max(one.n_samples for one in measured), metrics, counts, weights)


def _added(measured: Sequence[_Measured]) -> _Measured:
    """Of different samples: means by their weights, and sums of counts."""
    if len(measured) == 1:
        return measured[0]
    sums, totals, own = dict[str, float](), dict[str, int](), set[str]()
    counts = dict[str, tuple[int, ...]]()
    for one in measured:
        for name, value in one.metrics.items():
            weight = one.weights.get(name, one.n_samples)
            sums[name] = sums.get(name, 0.0) + weight * value
            totals[name] = totals.get(name, 0) + weight
        own |= one.weights.keys()
        for name, values in one.counts.items():
            before = counts.get(name, (0,) * len(values))
            if len(before) != len(values):
                raise GroupError(
                    f"the counts {name!r} have {len(values)} numbers on one rank and {len(before)} on another"
                )
            counts[name] = tuple(a + b for a, b in zip(before, values, strict=True))
    metrics: dict[str, float] = {
        name: WeightedMean(total / max(totals[name], 1), totals[name]) if name in own else total / max(totals[name], 1)
        for name, total in sums.items()
    }
    return _Measured(sum(one.n_samples for one in measured), metrics, counts, dict.fromkeys(own - sums.keys(), 0))


def _mean(values: Iterable[float | None]) -> float | None:
    found = [one for one in values if one is not None]
    return sum(found) / len(found) if found else None


def training_as_json(result: TrainResult) -> dict[str, Any]:
    return {name: _plain(getattr(result, name)) for name in _TRAINING}


def training_of(found: Mapping[str, Any]) -> TrainResult:
    return TrainResult(**found)


def evaluation_as_json(result: Evaluation | None) -> dict[str, Any] | None:
    return None if result is None else {name: _plain(getattr(result, name)) for name in _EVALUATION}


def evaluation_of(found: Mapping[str, Any] | None) -> Evaluation | None:
    return None if found is None else Evaluation(**found)


_EVALUATION = "sample_count", "metrics", "counts", "weights"
_TRAINING = (*_EVALUATION, "steps_done", "steps_planned", "steps_full", "first_loss", "last_loss", "samples_seen")


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
