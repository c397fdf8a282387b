"""`umbel bench collective --grid`: how busy processors are with training, if models are averaged after every N steps.

*Compute utilisation* is the share of its time in which a rank trains; in the rest it averages, or waits for others. It
is measured for each N and each rate of the links: with `outer_sync` (DiLoCo) and each codec, whose fragments could
overlap with training, but do not here; and with torchft's DiLoCo, if torchft is installed.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from umbel.sim.bench.collective.bench import WIDTHS, links_of
from umbel.sim.bench.collective.job import Averager, RareAnswer, RareJob
from umbel.sim.bench.collective.links import Link, Loopback
from umbel.sim.bench.collective.losses import FASHION, PLAYS, LossWorkload
from umbel.sim.bench.collective.ranks import run_ranks
from umbel.sim.bench.collective.torchft_peer import MISSING, is_installed
from umbel.sim.bench.report import BenchRow, Report
from umbel.sim.data.data_set import DataSet
from umbel.sim.data.load import DataSection, load

EVERYS: tuple[int, ...] = (1, 8, 32, 128)
_LIMIT_S = 3600.0  # of one link


@dataclass(frozen=True, slots=True)
class Cell:
    """One N on one link with one averager. `utilisation`: 0 to 1; `bytes_share`: sent by a rank in a step, over 4n."""

    link: str
    every: int
    averager: Averager
    utilisation: float
    step_s: float
    bytes_share: float | None

    @classmethod
    def all_of(cls, link: Link, answers: Sequence[RareAnswer]) -> list["Cell"]:
        """From the answers of all ranks."""
        cells, n_values = list[Cell](), answers[0].n_values
        for ranks in zip(*(one.times for one in answers), strict=True):
            mean_s, step_s = statistics.mean(one.mean_s for one in ranks), statistics.mean(one.step_s for one in ranks)
            sent = [one.sent_bytes for one in ranks if one.sent_bytes is not None]
            share = statistics.mean(sent) / (4 * n_values) if sent else None
            cells.append(cls(link.title, ranks[0].every, ranks[0].averager, 1 - mean_s / step_s, step_s, share))
        return cells

    def to_json(self) -> dict[str, Any]:
        return {
            "link": self.link,
            "every": self.every,
            "averager": self.averager,
            "utilisation": self.utilisation,
            "step_s": self.step_s,
            "bytes_of_float32": self.bytes_share,
        }


@dataclass(frozen=True, slots=True)
class GridReport(Report):
    """`cells`: in a table of their own."""

    cells: tuple[Cell, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**Report.to_json(self), "grid": [one.to_json() for one in self.cells]}

    def to_table(self) -> Table:
        both = Table.grid(padding=(1, 0))
        both.add_row(grid_table(self.cells))
        both.add_row(Report.to_table(self))
        return both


def grid_table(cells: Sequence[Cell]) -> Table:
    """Utilisations in per cent: a row for each N, a column for each link and averager."""
    columns = list(dict.fromkeys((one.link, one.averager) for one in cells))
    found = {(one.every, one.link, one.averager): f"{one.utilisation:.0%}" for one in cells}
    table = Table("steps between two means", title="Compute utilisation", title_justify="left")
    for link, averager in columns:
        table.add_column(escape(f"{link}, {averager}"), justify="right")
    for every in dict.fromkeys(one.every for one in cells):
        table.add_row(str(every), *(found[every, link, averager] for link, averager in columns))
    return table


def measure_grid(
    *, quick: bool, n_ranks: int, rates: Sequence[float], losses: bool = False, data: Path | None = None
) -> Report:
    """Measure all cells. `losses`: whether losses at equal samples are measured too, on data sets in the folder `data`.

    Raises `BenchFailed`, `ChildDied`, `TimeoutError`, `DataError`, `NotIdx` and `OSError`.
    """
    of_losses, notes = list[BenchRow](), list[str]()
    for training, equal in loss_jobs(n_ranks, quick=quick) if losses else ():
        found, note = loss_rows(training, equal, data)
        of_losses += found
        notes.append(note)
    digits = load(DataSection("digits"), None, seed=0)
    assert isinstance(digits, DataSet), "it is no population"
    job, cells = grid_job(n_ranks, quick=quick), list[Cell]()
    links, words = links_of(n_ranks, rates)
    for one in links:
        with one as link:
            cells += Cell.all_of(link, run_ranks(job, digits.samples, link, _LIMIT_S))
    rows = (*rows_of(cells), *of_losses)
    if "torchft" not in job.averagers:
        notes.append(MISSING)
    return GridReport("collective", rows, (words, _words_of(job), *notes), tuple(cells))


def grid_job(n_ranks: int, *, quick: bool) -> RareJob:
    """Steps of the digits' perceptron."""
    return RareJob(
        n_ranks=n_ranks,
        everys=EVERYS,
        averagers=("float32", "4bit", *(("torchft",) if is_installed() else ())),
        widths=WIDTHS,
        batch_size=64,
        learning_rate=0.05,
        untimed_means=1,
        means=1 if quick else 4,
        steps_min=4 if quick else 12,
        seed=0,
    )


def loss_jobs(n_ranks: int, *, quick: bool) -> list[tuple[LossWorkload, RareJob]]:
    """The same number of steps with each N and each codec. `quick`: of the perceptron alone."""
    perceptron = RareJob(
        n_ranks=n_ranks,
        everys=EVERYS,
        averagers=("float32", "4bit", "2bit"),
        widths=FASHION.job.widths,
        batch_size=FASHION.job.batch_size,
        learning_rate=0.1,
        untimed_means=0,
        means=1,
        steps_min=128 if quick else 512,
        seed=1,
    )
    transformer = replace(
        perceptron,
        everys=(32,),
        widths=(PLAYS.job.widths[0], 288),  # two million values
        batch_size=8,
        learning_rate=PLAYS.job.learning_rate,
        momentum=PLAYS.job.momentum,
        steps_min=256,
        model="transformer",
    )
    return [(FASHION, perceptron), *([] if quick else [(PLAYS, transformer)])]


def rows_of(cells: Iterable[Cell]) -> list[BenchRow]:
    """Few bits, and torchft, against float32, for each N and each link; and their bytes."""
    of = {(one.link, one.every, one.averager): one for one in cells}
    rows = list[BenchRow]()
    for (link, every, averager), ours in of.items():
        theirs = of[link, every, "float32"]
        if ours is theirs:
            continue
        what = f"{link}, every {every} steps"
        use = ours.utilisation * 100, theirs.utilisation * 100
        rows.append(BenchRow(f"{what}: compute utilisation, {averager}", use[0], "float32", use[1], "%"))
        if ours.bytes_share is not None and theirs.bytes_share is not None:
            shares = ours.bytes_share * 100, theirs.bytes_share * 100
            rows.append(BenchRow(f"{what}: sent in a step, {averager}", shares[0], "float32", shares[1], "% of 4n"))
    return rows


def loss_rows(training: LossWorkload, job: RareJob, folder: Path | None) -> tuple[list[BenchRow], str]:
    """Losses after equal steps against those of float32 with the least N; and how they were measured."""
    whole = load(training.data, folder, seed=0)
    assert isinstance(whole, DataSet), "it is no population"
    samples = training.samples_of(whole)
    answer, *_ = run_ranks(job, samples, Loopback(), _LIMIT_S)
    base = next(one.loss for one in answer.times if (one.every, one.averager) == (job.everys[0], "float32"))
    n_steps = job.timed_steps(max(job.everys))
    rows = [
        BenchRow(
            f"{training.title}: loss after {n_steps} steps, {one.averager}, every {one.every}",
            one.loss,
            f"float32, every {job.everys[0]}",
            base,
            "nats",
        )
        for one in answer.times
    ]
    inner = "SGD" if job.model == "perceptron" else "AdamW"
    words = (
        f"{training.title}: {job.n_ranks} ranks train a {job.model} of {answer.n_values:,} values on "
        f"{len(samples.inputs):,} samples in batches of {job.batch_size} with {inner} (rate {job.learning_rate:g}), "
        "one seed; the loss is the mean over these samples."
    )
    return rows, words


def _words_of(job: RareJob) -> str:
    return (
        f"{job.n_ranks} ranks train a perceptron {'-'.join(map(str, job.widths))} on digits in batches of "
        f"{job.batch_size}, over Gloo, on one thread each. Compute utilisation: the share of its time in which a rank "
        f"trains, over {job.means} mean{'s' * (job.means > 1)} or more. In the rest it averages, or waits for others."
    )
