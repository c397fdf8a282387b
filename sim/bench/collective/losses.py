"""The loss after equal steps: what gradients of few bits cost in training. Rows of `umbel bench collective`.

The ranks train a perceptron on Fashion-MNIST, and a transformer on Shakespeare's plays, over the loopback. Of one seed,
all methods have the same first model, the same batches and the same number of steps. The loss is the mean over all
training samples.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from umbel.sim.bench.collective.job import (
    BF16,
    FLOAT32,
    METHODS,
    OURS_4BIT,
    OURS_8BIT,
    POWER_4,
    SETTLING_STEPS,
    HookJob,
    Method,
)
from umbel.sim.bench.collective.links import Loopback
from umbel.sim.bench.collective.ranks import run_ranks
from umbel.sim.bench.report import BenchRow, Hold
from umbel.sim.data.data_set import DataSet, SampleSet
from umbel.sim.data.load import DataSection, load

WORSE_MAX = 1.03  # times float32's loss
SEEDS, SEEDS_QUICK = (1, 2, 3), (1,)
CONTENDERS = (FLOAT32, BF16, POWER_4, OURS_8BIT, OURS_4BIT)
_BLOCKS_QUICK = 3
_LIMIT_S = 7200.0
Losses = Mapping[Method, Sequence[float]]
"""In nats, by seed."""


@dataclass(frozen=True, slots=True)
class LossWorkload:
    """What is trained, and on what. `words`: the model and its data."""

    title: str
    words: str
    data: DataSection
    samples_of: Callable[[DataSet], SampleSet]
    job: HookJob

    @property
    def n_steps(self) -> int:
        """Of each method's model."""
        return self.job.warm_up + self.job.blocks * (SETTLING_STEPS + self.job.steps)


def _as_held(data: DataSet) -> SampleSet:
    return data.samples.take(data.rows)


def _each_character_from_those_before(data: DataSet) -> SampleSet:
    """Texts without their last character, and the character that follows each place."""
    texts = _as_held(data).inputs
    return SampleSet(texts[:, :-1].long(), texts[:, 1:].long())


FASHION = LossWorkload(
    "Fashion-MNIST",
    "a perceptron 784-256-256-10 on 10,000 images of Fashion-MNIST (SGD, momentum 0.9)",
    DataSection("fashion-mnist", train_limit=10_000),
    _as_held,
    HookJob(
        n_ranks=2,
        methods=tuple(method.name for method in CONTENDERS),
        widths=(784, 256, 256, 10),
        batch_size=64,
        learning_rate=0.02,
        momentum=0.9,
        blocks=20,
        steps=18,  # and two more of each block
        warm_up=0,
        seed=0,
    ),
)
PLAYS = LossWorkload(
    "Shakespeare",
    "a transformer of two layers and 430,000 values on 1,000 texts of 80 characters of Shakespeare (AdamW)",
    DataSection("shakespeare", train_limit=1_000),
    _each_character_from_those_before,
    replace(FASHION.job, model="transformer", widths=(80, 128), batch_size=16, learning_rate=1e-3, blocks=10),
)


@dataclass(frozen=True, slots=True)
class LossReport:
    """`notes`: how they were measured, a sentence or two for each training."""

    rows: tuple[BenchRow, ...] = ()
    notes: tuple[str, ...] = ()


def measure_losses(data: Path | None, n_ranks: int, *, quick: bool) -> LossReport:
    """Train with each method. `data`: the folder of the data sets; missing files of Fashion-MNIST are fetched.

    `quick`: few steps of one seed on Fashion-MNIST. Raises `DataError`, `NotIdx`, `OSError`, `ChildDied` and
    `TimeoutError`.
    """
    rows, notes = list[BenchRow](), list[str]()
    for training in (FASHION,) if quick else (FASHION, PLAYS):
        job = replace(training.job, n_ranks=n_ranks, blocks=_BLOCKS_QUICK if quick else training.job.blocks)
        training = replace(training, job=job)
        losses = losses_of(training, data, SEEDS_QUICK if quick else SEEDS)
        rows += loss_rows(training, losses)
        notes.append(loss_note(training, losses))
    return LossReport(tuple(rows), tuple(notes))


def losses_of(training: LossWorkload, folder: Path | None, seeds: Sequence[int]) -> Losses:
    """The loss of each method's last model, for each seed."""
    data = load(training.data, folder, seed=0)
    assert isinstance(data, DataSet), "it is no population"
    samples, found = training.samples_of(data), {METHODS[name]: list[float]() for name in training.job.methods}
    for seed in seeds:
        answer, *_ = run_ranks(replace(training.job, seed=seed), samples, Loopback(), _LIMIT_S)
        for name, trained in answer.trained.items():
            found[METHODS[name]].append(trained.loss)
    return found


def loss_rows(training: LossWorkload, losses: Losses) -> list[BenchRow]:
    """Our mean losses against those of the other methods."""
    rows = list[BenchRow]()
    for ours in (method for method in losses if method.is_ours):
        for rival in (method for method in losses if not method.is_ours):
            what = f"{training.title}: loss after {training.n_steps} steps, {ours.title}"
            hold = Hold(WORSE_MAX) if rival is FLOAT32 else None
            rows.append(
                BenchRow(what, statistics.mean(losses[ours]), rival.title, statistics.mean(losses[rival]), "nats", hold)
            )
    return rows


def loss_note(training: LossWorkload, losses: Losses) -> str:
    """How it was measured, and each seed's ratio."""
    by_seed = "; ".join(
        f"{method.title} {', '.join(f'{one / base:.3f}' for one, base in zip(found, losses[FLOAT32], strict=True))}"
        for method, found in losses.items()
        if method is not FLOAT32
    )
    return (
        f"{training.title}: {training.job.n_ranks} ranks train {training.words} in batches of "
        f"{training.job.batch_size} at the rate {training.job.learning_rate:g}; the loss is the mean over all of them. "
        f"Ratios to float32 by seed: {by_seed}."
    )
