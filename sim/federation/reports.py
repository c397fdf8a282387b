"""What the clients of a cohort say of their training, written before they train.

The round's machine needs the reports to decide whose counts, and only those train. So what training tells, the loss and
what the model scores, is filled in afterwards, into mappings that nobody looks into before.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from umbel.aggregation.reports import Probe, WorkDone
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData
from umbel.sim.fleet.fates import Fates

_NO_HASH = "0" * 64  # of updates: nobody keeps them


@dataclass(frozen=True, slots=True)
class Reports:
    """`works`: by rank. `held`: what each holds back to measure the model on; None: it is not measured."""

    held: CohortData | None = None
    works: list[WorkDone] = field(default_factory=list[WorkDone])
    _metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    _evaluations: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    @staticmethod
    def before(sizes: Indices, steps: Indices, fates: Fates, held: CohortData | None = None) -> "Reports":
        """`sizes`: samples that each trains on; `steps`: what each is asked for."""
        reports = Reports(held)
        facts = zip(
            sizes.tolist(),
            fates.steps_done.clip(1).tolist(),
            steps.tolist(),
            (fates.steps_done * fates.step_s).tolist(),
            (0 * sizes if held is None else held.sizes).tolist(),
            fates.lines.up.tolist(),
            strict=True,
        )
        for size, done, asked, train_s, n_held, rate in facts:
            metrics, evaluation = dict[str, float](), dict[str, float]()
            reports.works.append(
                WorkDone(size, done, asked, _NO_HASH, train_s, metrics, evaluation, n_held, upload_bytes_per_s=rate)
            )
            reports._metrics.append(metrics)
            reports._evaluations.append(evaluation)
        return reports

    def note(self, ranks: Sequence[int], losses: Iterable[float]) -> None:
        """These have trained, with such losses."""
        for rank, loss in zip(ranks, losses, strict=True):
            if math.isfinite(loss):
                self._metrics[rank]["loss"] = loss

    def note_probes(self, ranks: Sequence[int], probes: Iterable[Probe]) -> None:
        """These have measured themselves, in a canary."""
        for rank, probe in zip(ranks, probes, strict=True):
            self.works[rank] = replace(self.works[rank], probe=probe)

    def note_evaluations(self, ranks: Sequence[int], found: Iterable[Mapping[str, float]]) -> None:
        """These have measured the model as it came."""
        for rank, evaluation in zip(ranks, found, strict=True):
            self._evaluations[rank].update(evaluation)
