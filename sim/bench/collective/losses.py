"""The loss after equal steps: what gradients of few bits cost in training. Rows of `umbel bench collective`.

The ranks train a perceptron on Fashion-MNIST over the loopback. Of one seed, all methods have the same first model, the
same batches and the same number of steps. The loss is the mean over all training samples.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from umbel.sim.bench.collective.job import BF16, FLOAT32, METHODS, OURS_4BIT, OURS_8BIT, POWER_4, Job, Method
from umbel.sim.bench.collective.links import Loopback
from umbel.sim.bench.collective.ranks import run_ranks
from umbel.sim.bench.report import BenchRow, Hold
from umbel.sim.data.data_set import DataSet
from umbel.sim.data.load import DataSection, load

WORSE_MAX = 1.03  # times float32's loss
SEEDS, SEEDS_QUICK = (1, 2, 3), (1,)
CONTENDERS = (FLOAT32, BF16, POWER_4, OURS_8BIT, OURS_4BIT)
DATA = DataSection("fashion-mnist", train_limit=10_000)
_LIMIT_S = 3600.0
Losses = Mapping[Method, Sequence[float]]
"""In nats, by seed."""

TRAINING = Job(
    n_ranks=2,
    methods=tuple(method.name for method in CONTENDERS),
    widths=(784, 256, 256, 10),
    batch_size=64,
    learning_rate=0.02,
    momentum=0.9,
    blocks=20,
    steps=19,  # and one more of each block, which is not timed
    warm_up=0,
    seed=0,
)
TRAINING_QUICK = replace(TRAINING, blocks=3)


def measure_losses(data: Path | None, n_ranks: int, *, quick: bool) -> tuple[list[BenchRow], str]:
    """Rows, and a note on them. `data`: the folder with Fashion-MNIST; missing files are fetched.

    Raises `DataError`, `NotIdx`, `OSError`, `ChildDied` and `TimeoutError`.
    """
    job = replace(TRAINING_QUICK if quick else TRAINING, n_ranks=n_ranks)
    whole = load(DATA, data, seed=0)
    assert isinstance(whole, DataSet), "it is no population"
    losses = losses_of(job, whole, SEEDS_QUICK if quick else SEEDS)
    return loss_rows(losses, n_steps(job)), loss_note(losses, job, len(whole.rows))


def losses_of(job: Job, data: DataSet, seeds: Sequence[int]) -> Losses:
    """The loss of each method's last model, for each seed."""
    found = {METHODS[name]: list[float]() for name in job.methods}
    for seed in seeds:
        answer, *_ = run_ranks(replace(job, seed=seed), data.samples.take(data.rows), Loopback(), _LIMIT_S)
        for name, trained in answer.trained.items():
            found[METHODS[name]].append(trained.loss)
    return found


def n_steps(job: Job) -> int:
    """Of each method's model."""
    return job.warm_up + job.blocks * (1 + job.steps)


def loss_rows(losses: Losses, n_steps: int) -> list[BenchRow]:
    """Our mean losses against those of the other methods."""
    rows = list[BenchRow]()
    for ours in (method for method in losses if method.is_ours):
        for rival in (method for method in losses if not method.is_ours):
            what = f"Fashion-MNIST: loss after {n_steps} steps, {ours.title}"
            hold = Hold(WORSE_MAX) if rival is FLOAT32 else None
            rows.append(
                BenchRow(what, statistics.mean(losses[ours]), rival.title, statistics.mean(losses[rival]), "nats", hold)
            )
    return rows


def loss_note(losses: Losses, job: Job, n_samples: int) -> str:
    """How it was measured, and each seed's ratio."""
    by_seed = "; ".join(
        f"{method.title} {', '.join(f'{one / base:.3f}' for one, base in zip(found, losses[FLOAT32], strict=True))}"
        for method, found in losses.items()
        if method is not FLOAT32
    )
    return (
        f"Losses: {job.n_ranks} ranks train a perceptron {'-'.join(map(str, job.widths))} on {n_samples:,} images of "
        f"Fashion-MNIST, in batches of {job.batch_size} with SGD (rate {job.learning_rate:g}, momentum "
        f"{job.momentum:g}). The loss is the mean over these images. Ratios to float32 by seed: {by_seed}."
    )
