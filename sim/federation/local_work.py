"""The work and the reports of a simulated cohort.

The round's machine needs reports to decide which clients are accepted, and only accepted clients train. So reports are
written before training; losses and scores are filled in afterwards, before anyone reads them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from umbel.aggregation.algorithms.qfedavg import CHANGE_NORM, START_LOSS
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.reports import Probe, WorkDone
from umbel.aggregation.types import ClientId
from umbel.client.local.devices import whole_float32
from umbel.client.local.plan import SHARE_STEPS_MIN
from umbel.client.local.progress import Means
from umbel.client.rounds.work import NO_HASH
from umbel.client.training.losses import LOSSES, accuracy_of_classes
from umbel.client.training.trainer import EVALUATION_BATCH_SIZE
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData
from umbel.sim.engines.device import CPU, one_thread
from umbel.sim.engines.model import Loss, MeanLoss, cross_entropy
from umbel.sim.engines.stacked.lockstep import batches_in_pass
from umbel.sim.fleet.fates import Fates
from umbel.sim.fleet.faults import Fault, Kinds, flipped_labels

_AT_ONCE = 4096  # samples, so that a large set needs little memory


def steps_asked(plan: TrainingPlan, sizes: Indices, share: float) -> Indices:
    """Steps that each client is asked for: `LocalPlan.steps_for` of the SDK, for all of them at once."""
    in_pass = batches_in_pass(sizes, plan.batch_size)
    full = np.full_like(sizes, plan.local_steps) if plan.local_steps else (plan.local_epochs or 1) * in_pass
    if share >= 1:
        return full
    return np.minimum(full, np.maximum(SHARE_STEPS_MIN, np.ceil(np.round(share * full, 9)).astype(np.int64)))


def client_seeds(plan: RoundPlan, names: Sequence[ClientId]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """The seeds that the coordinator gives. (In a secure round a real site draws its own.)"""
    return np.array([plan.seed_of(name) for name in names], dtype=np.uint64)


def as_taught(data: CohortData, kinds: Kinds) -> CohortData:
    """The data, with changed labels for clients that flip them."""
    liars = np.flatnonzero(kinds == Fault.LABEL_FLIP)
    if not len(liars):
        return data
    targets = data.samples.targets.clone()
    n_classes = int(targets.max()) + 1
    for i in liars:
        rows = torch.from_numpy(data.rows[data.starts[i] : data.starts[i + 1]])
        targets[rows] = flipped_labels(targets[rows], n_classes)
    return replace(data, samples=replace(data.samples, targets=targets))


BatchFigures = Callable[[Any, Any], Mapping[str, Tensor]]


def batch_figures(name: str | None, loss: MeanLoss) -> BatchFigures:
    """What is measured of a batch: the loss, and what belongs to a loss of this name; else accuracy if it applies."""
    measure = LOSSES[name].measure if name is not None and name in LOSSES else accuracy_of_classes
    return lambda output, target: {**measure(output, target), "loss": loss(output, target)}


@dataclass(frozen=True, slots=True)
class Meter:
    """Measures models."""

    model: nn.Module
    loss: Loss = cross_entropy  # of each sample
    accuracy: bool = False  # whether targets are classes
    device: torch.device = CPU  # of `model`
    batch: BatchFigures | None = None  # means over a batch, instead of the two, of a loss that is not of each sample
    mean_loss: MeanLoss = functional.cross_entropy  # over a batch, as clients train with it

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state)

    def of(self, samples: SampleSet) -> dict[str, float]:
        """The means over these samples."""
        if self.batch is not None:
            return self._of_batches(self.batch, samples)
        found = self._each(samples)
        return {name: values.mean().item() for name, values in found.items()}

    def of_each(self, data: CohortData) -> list[dict[str, float]]:
        """The means over each client's samples; empty without samples."""
        if self.batch is not None:
            return [self.of(data.of(position)) for position in range(len(data))]
        found = self._each(data.samples.take(data.rows))
        return [
            {name: values[first:last].mean().item() for name, values in found.items()} if last > first else {}
            for first, last in zip(data.starts[:-1].tolist(), data.starts[1:].tolist(), strict=True)
        ]

    def training_losses(self, data: CohortData) -> list[float]:
        """The mean loss over each client's samples, with the bits of the SDK's `TorchClient.training_loss`."""
        self.model.eval()
        with torch.no_grad(), one_thread(), whole_float32(self.device):
            return [self._training_loss(data.of(position)) for position in range(len(data))]

    def _training_loss(self, samples: SampleSet) -> float:
        means, size = Means(), EVALUATION_BATCH_SIZE
        for inputs, targets in zip(samples.inputs.split(size), samples.targets.split(size), strict=True):
            loss = self.mean_loss(self.model(inputs.to(self.device)), targets.to(self.device))
            means.add({"loss": loss}, len(targets))
        return means.result()["loss"]

    @torch.no_grad()
    def _of_batches(self, figures: BatchFigures, samples: SampleSet) -> dict[str, float]:
        """Means over batches, weighted by their samples."""
        self.model.eval()
        sums = dict[str, float]()
        for first in range(0, len(samples), _AT_ONCE):
            where = slice(first, first + _AT_ONCE)
            targets = samples.targets[where].to(self.device)
            found = figures(self.model(samples.inputs[where].to(self.device)), targets)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(targets)
        return {name: total / len(samples) for name, total in sums.items()}

    def _each(self, samples: SampleSet) -> dict[str, Tensor]:
        self.model.eval()
        found = [self._some(samples, slice(first, first + _AT_ONCE)) for first in range(0, len(samples), _AT_ONCE)]
        return {name: torch.cat([part[name] for part in found]) for name in found[0]} if found else {}

    @torch.no_grad()
    def _some(self, samples: SampleSet, where: slice) -> dict[str, Tensor]:
        targets = samples.targets[where].to(self.device)
        outputs = self.model(samples.inputs[where].to(self.device))
        found = {"loss": self.loss(outputs, targets).reshape(len(targets), -1).mean(1).double().cpu()}
        if self.accuracy:
            found["accuracy"] = (outputs.argmax(1) == targets).double().cpu()
        return found


@dataclass(frozen=True, slots=True)
class Reports:
    """`works`: by rank. `held`: held-back data to measure the model on; None: it is not measured."""

    held: CohortData | None = None
    works: list[WorkDone] = field(default_factory=list[WorkDone])
    _metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    _evaluations: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    @staticmethod
    def before(sizes: Indices, steps: Indices, fates: Fates, held: CohortData | None = None) -> "Reports":
        """`sizes`: training samples of each; `steps`: that each is asked for."""
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
            metrics: dict[str, float] = {}
            evaluation: dict[str, float] = {}
            reports.works.append(
                WorkDone(size, done, asked, NO_HASH, train_s, metrics, evaluation, n_held, upload_bytes_per_s=rate)
            )
            reports._metrics.append(metrics)
            reports._evaluations.append(evaluation)
        return reports

    def note(self, ranks: Sequence[int], losses: Iterable[float]) -> None:
        for rank, loss in zip(ranks, losses, strict=True):
            if math.isfinite(loss):
                self._metrics[rank]["loss"] = loss

    def note_fair(self, ranks: Sequence[int], losses: Iterable[float], norms: Iterable[float]) -> None:
        """Note what clients report under q-FedAvg."""
        for rank, loss, norm in zip(ranks, losses, norms, strict=True):
            self._metrics[rank] |= {START_LOSS: loss, CHANGE_NORM: norm}

    def note_probes(self, ranks: Sequence[int], probes: Iterable[Probe]) -> None:
        for rank, probe in zip(ranks, probes, strict=True):
            self.works[rank] = replace(self.works[rank], probe=probe)

    def note_evaluations(self, ranks: Sequence[int], found: Iterable[Mapping[str, float]]) -> None:
        """Note metrics of the model before training."""
        for rank, evaluation in zip(ranks, found, strict=True):
            self._evaluations[rank].update(evaluation)
