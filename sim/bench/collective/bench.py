"""`umbel bench collective`: a DDP step whose gradients are averaged by umbel's hook, and by torch's own ways.

The ranks are processes of this machine, and talk over Gloo. On Linux, for root, each has a network namespace and a link
of a given rate. All methods run in the same processes and take turns. Step times are medians over all ranks and steps.

The limit of a link is the time of float32's bytes on it: 2 (P - 1) / P x 4n bytes for P ranks and n values, which is
what a rank must send in an all-reduce whose sum is made in parts (Patarasuk and Yuan, 2009).
"""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from umbel.aggregation.types import require_within
from umbel.sim.bench.collective.hosts import why_not
from umbel.sim.bench.collective.job import (
    BF16,
    FLOAT32,
    METHODS,
    OURS_4BIT,
    OURS_8BIT,
    OURS_FLOAT32,
    POWER_4,
    HookAnswer,
    HookJob,
    Method,
)
from umbel.sim.bench.collective.links import Link, Loopback, with_rate, with_rate_and_delay
from umbel.sim.bench.collective.losses import LossReport, measure_losses
from umbel.sim.bench.collective.ranks import run_ranks
from umbel.sim.bench.collective.relay import why_no_relay
from umbel.sim.bench.report import BenchRow, Hold, Report
from umbel.sim.data.data_set import DataSet
from umbel.sim.data.load import DataSection, load

BYTES_MAX: Mapping[Method, float] = {OURS_8BIT: 0.27, OURS_4BIT: 0.135}  # of 4n, for two ranks
FASTER: Mapping[Method, float] = {FLOAT32: 2.8, BF16: 1.4}  # 4 bits at `PROMISED_MBIT_S`
FASTER_WITH_DELAY: Mapping[Method, float] = {POWER_4: 1.3}  # 4 bits at `PROMISED_MBIT_S` and `PROMISED_MS`
PROMISED_MBIT_S, PROMISED_MS, PROMISED_RANKS = 100.0, 40.0, 2
WIDTHS = (64, 1024, 1024, 10)
_RIVALS = tuple(one for one in METHODS.values() if not one.is_ours)
_OURS = tuple(one for one in METHODS.values() if one.is_ours)
_LIMIT_S = 1800.0  # of one link
_MBIT_S_WITHIN = 1.0, 100_000.0


@dataclass(frozen=True, slots=True)
class Timed:
    """The steps on one link. `title`, `mbit_s`, `round_trip_ms`: of the link.

    `steps_s`: median seconds of a step; `least_s`: seconds of the fastest step; `cpu_s`: processor time of a rank in a
    step; `bytes_share`: sent by a rank in a step, divided by the 4n bytes of a gradient.
    """

    title: str
    n_ranks: int
    mbit_s: float | None
    round_trip_ms: float
    n_values: int
    steps_s: Mapping[Method, float]
    least_s: Mapping[Method, float]
    cpu_s: Mapping[Method, float]
    bytes_share: Mapping[Method, float]

    @classmethod
    def of(cls, link: Link, answers: Sequence[HookAnswer]) -> "Timed":
        names, n_values = answers[0].trained, answers[0].n_values
        by_method = {METHODS[name]: [one.trained[name] for one in answers] for name in names}
        return cls(
            link.title,
            len(answers),
            link.mbit_s,
            link.round_trip_ms,
            n_values,
            {method: statistics.median(s for one in ranks for s in one.steps_s) for method, ranks in by_method.items()},
            {method: min(s for one in ranks for s in one.steps_s) for method, ranks in by_method.items()},
            {method: statistics.mean(one.cpu_s for one in ranks) for method, ranks in by_method.items()},
            {
                method: statistics.mean(one.sent_bytes for one in ranks) / (4 * n_values)
                for method, ranks in by_method.items()
            },
        )

    @property
    def limit_s(self) -> float | None:
        """What float32's bytes alone take on this link."""
        if self.mbit_s is None:
            return None
        return 2 * (self.n_ranks - 1) / self.n_ranks * 4 * self.n_values * 8 / (self.mbit_s * 1e6)

    @property
    def winner(self) -> Method:
        return min(self.steps_s, key=self.steps_s.__getitem__)

    def to_json(self) -> dict[str, Any]:
        return {
            "link": self.title,
            "ranks": self.n_ranks,
            "mbit_s": self.mbit_s,
            "round_trip_ms": self.round_trip_ms,
            "limit_s": self.limit_s,
            "step_s": {method.name: seconds for method, seconds in self.steps_s.items()},
            "least_step_s": {method.name: seconds for method, seconds in self.least_s.items()},
            "cpu_s": {method.name: seconds for method, seconds in self.cpu_s.items()},
            "bytes_of_float32": {method.name: share for method, share in self.bytes_share.items()},
            "fastest": self.winner.name,
        }


@dataclass(frozen=True, slots=True)
class CollectiveReport(Report):
    """`links`: the step times of all methods, in a table of their own."""

    links: tuple[Timed, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**Report.to_json(self), "links": [one.to_json() for one in self.links]}

    def to_table(self) -> Table:
        both = Table.grid(padding=(1, 0))
        both.add_row(links_table(self.links))
        both.add_row(Report.to_table(self))
        return both


def links_table(links: Sequence[Timed]) -> Table:
    """Step times as ratios to torch's float32, and those of the fastest steps: a column for each link."""
    table = Table(title="Time of a step: the median (and the fastest)", title_justify="left")
    table.add_column("")
    for one in links:
        table.add_column(escape(one.title), justify="right")
    base = [(one.steps_s[FLOAT32], one.least_s[FLOAT32]) for one in links]
    table.add_row(FLOAT32.title, *(f"{median * 1e3:.0f} ms ({least * 1e3:.0f})" for median, least in base))
    for method in METHODS.values():
        if method is not FLOAT32:
            ours = [(one.steps_s[method], one.least_s[method]) for one in links]
            ratios = [(a / c, b / d) for (a, b), (c, d) in zip(ours, base, strict=True)]
            table.add_row(method.title, *(f"{median:.2f} x ({least:.2f})" for median, least in ratios))
    table.add_row("fastest", *(one.winner.title for one in links))
    return table


def measure(
    *,
    quick: bool,
    n_ranks: int,
    rates: Sequence[float],
    round_trip_ms: float | None = None,
    losses: bool = False,
    data: Path | None = None,
) -> Report:
    """Run the benchmark. `rates`: of the links, in Mbit/s; none: the loopback.

    `round_trip_ms`: the slowest link is measured once more with this delay. `losses`: whether the loss after equal
    steps is measured too, on data sets in the folder `data`. Raises `BenchFailed`, `ChildDied`, `TimeoutError`,
    `DataError`, `NotIdx` and `OSError`.
    """
    of_losses = measure_losses(data, n_ranks, quick=quick) if losses else LossReport()
    job = timing_job(n_ranks, quick=quick)
    digits = load(DataSection("digits"), None, seed=0)
    assert isinstance(digits, DataSet), "it is no population"
    links, words = links_of(n_ranks, rates, round_trip_ms)
    timed = list[Timed]()
    for one in links:
        with one as link:
            timed.append(Timed.of(link, run_ranks(job, digits.samples, link, _LIMIT_S)))
    rows = (*(row for one in timed for row in rows_of(one)), *of_losses.rows)
    return CollectiveReport("collective", rows, (words, _words_of(job), *of_losses.notes), tuple(timed))


def links_of(
    n_ranks: int, rates: Sequence[float], round_trip_ms: float | None = None
) -> tuple[Sequence[AbstractContextManager[Link]], str]:
    """The links to measure, and what a reader must know of them."""
    if missing := why_not() if rates else "no rates were named with --rates":
        return [nullcontext(Loopback())], (
            f"The ranks talked over the loopback, which has no limit, because {missing}. Bytes are those that each "
            "method has counted itself, without headers."
        )
    links = [with_rate(n_ranks, rate) for rate in rates]
    words = (
        "Each rank had a network namespace, behind a link of the given rate each way (tc tbf; with a delay, a relay of "
        "packets). Bytes are those that its interface has sent, headers included."
    )
    if round_trip_ms is None:
        return links, words
    if missing := why_no_relay():
        return links, f"{words} The link with a delay was left out, because {missing}."
    return [*links, with_rate_and_delay(n_ranks, min(rates), round_trip_ms)], words


def rates_of(words: str) -> tuple[float, ...]:
    """The rates in Mbit/s of a list such as "100,1000". Raises `ValueError`."""
    rates = list[float]()
    for word in words.split(",") if words else []:
        try:
            rates.append(float(word))
            require_within(rates[-1], "a rate", *_MBIT_S_WITHIN)
        except ValueError as error:
            raise ValueError(
                f"{word.strip()!r} is no rate; rates are numbers of Mbit/s with commas between them, such as 100,1000, "
                f"from {_MBIT_S_WITHIN[0]:g} to {_MBIT_S_WITHIN[1]:g}"
            ) from error
    return tuple(rates)


def _words_of(job: HookJob) -> str:
    widths = "-".join(map(str, job.widths))
    return (
        f"{job.n_ranks} ranks train a perceptron {widths} on digits in batches of {job.batch_size}, over Gloo, on one "
        f"thread each. Times are medians of {job.blocks * job.steps} steps; methods take turns every {job.steps}. "
        f"All gradients are in one bucket, because torch's PowerSGD hangs on Gloo with two."
    )


def timing_job(n_ranks: int, *, quick: bool) -> HookJob:
    """Steps of the digits' perceptron with every method."""
    return HookJob(
        n_ranks=n_ranks,
        methods=tuple(METHODS),
        widths=WIDTHS,
        batch_size=64,
        learning_rate=0.05,
        momentum=0.0,
        blocks=3 if quick else 8,
        steps=3 if quick else 5,
        warm_up=3,
        seed=0,
    )


def rows_of(timed: Timed) -> list[BenchRow]:
    """Our step times against every other method's and the limit, and the bytes of each method."""
    rows = list[BenchRow]()
    limit = timed.limit_s
    for ours in _OURS:
        what, step = f"{timed.title}: step, {ours.title}", timed.steps_s[ours] * 1e3
        for rival in (FLOAT32,) if ours is OURS_FLOAT32 else _RIVALS:
            hold = _promised_step(timed, ours, rival)
            rows.append(BenchRow(what, step, rival.title, timed.steps_s[rival] * 1e3, "ms", hold))
        if limit is not None:
            rows.append(BenchRow(what, step, "float32's bytes alone at this rate", limit * 1e3, "ms"))
    for ours in _OURS:
        cpu_ms, theirs = timed.cpu_s[ours] * 1e3, timed.cpu_s[FLOAT32] * 1e3
        rows.append(
            BenchRow(f"{timed.title}: processor time of a step, {ours.title}", cpu_ms, FLOAT32.title, theirs, "ms")
        )
    whole = 4 * timed.n_values / 1e6
    for method, share in timed.bytes_share.items():
        hold = Hold(BYTES_MAX[method]) if timed.n_ranks == PROMISED_RANKS and method in BYTES_MAX else None
        rows.append(BenchRow(f"{timed.title}: sent in a step, {method.title}", share * whole, "4n", whole, "MB", hold))
    return rows


def _promised_step(timed: Timed, ours: Method, rival: Method) -> Hold | None:
    if ours is not OURS_4BIT or timed.n_ranks != PROMISED_RANKS or timed.mbit_s != PROMISED_MBIT_S:
        return None
    faster = {0.0: FASTER, PROMISED_MS: FASTER_WITH_DELAY}.get(timed.round_trip_ms, {})
    return Hold(round(1 / faster[rival], 3)) if rival in faster else None
