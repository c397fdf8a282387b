"""What attempts asked, and how they went: the same few figures of a trace and of a simulated run, side by side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.trace import Trace, TracedAttempt
from umbel.sim.federation.rows import Row

ALIKE = 0.02  # relative difference that counts as equal


@dataclass(frozen=True, slots=True)
class Went:
    """One attempt at training with a cohort. `steps`, `update_bytes` and `fetched_bytes` are means over the clients
    that reported; 0 if unknown. `open_s`: how long it was open.
    """

    committed: bool
    window_s: float
    target: int
    over_selection: float
    asked: int
    reports: int
    open_s: float
    bytes_up: int
    bytes_down: int
    steps: float
    update_bytes: float
    fetched_bytes: float

    @classmethod
    def of_row(cls, row: Row) -> "Went":
        return cls(
            committed=row.committed,
            window_s=row.window_s,
            target=row.target,
            over_selection=row.over_selection,
            asked=row.selected,
            reports=row.reported,
            open_s=row.virtual_s,
            bytes_up=row.bytes_up,
            bytes_down=row.bytes_down,
            steps=row.steps_asked,
            update_bytes=row.update_bytes,
            fetched_bytes=row.fetched_bytes,
        )

    @classmethod
    def of_traced(cls, attempt: TracedAttempt) -> "Went":
        reports = attempt.in_time
        n = max(1, len(reports))
        return cls(
            committed=attempt.committed,
            window_s=attempt.window_s,
            target=attempt.reports_wanted or 0,
            over_selection=attempt.over_selection,
            asked=len(attempt.clients),
            reports=len(reports),
            open_s=attempt.open_s,
            bytes_up=attempt.bytes_up,
            bytes_down=attempt.bytes_down,
            steps=sum(one.steps_planned for one in reports) / n,
            update_bytes=sum(one.bytes_up for one in reports) / n,
            fetched_bytes=sum(one.bytes_down for one in reports) / n,
        )


def went_in(rows: Sequence[Row]) -> list[Went]:
    """The attempts of a simulated run that a trace would contain."""
    return [Went.of_row(row) for row in rows if row.task == Task.TRAINING.value and row.selected]


@dataclass(frozen=True, slots=True)
class Course:
    """What attempts asked, and how they went.

    `clients`: of the fleet. `window_s` to `fetched_bytes`: medians over attempts, 0 if unknown. `committed`: share of
    attempts. `asked`, `reports`, `open_s`: means over attempts. `open_h` (hours of open windows) and bytes both ways:
    for each committed round, abandoned attempts included; None if no round was committed.
    """

    label: str
    attempts: int
    clients: int
    window_s: float
    target: float
    over_selection: float
    steps: float
    update_bytes: float
    fetched_bytes: float
    committed: float
    asked: float
    reports: float
    open_s: float
    open_h: float | None
    bytes_up: float | None
    bytes_down: float | None

    @classmethod
    def of(cls, label: str, clients: int, attempts: Sequence[Went]) -> "Course | None":
        """None without attempts."""
        if not attempts:
            return None
        n_committed = sum(one.committed for one in attempts)

        def a_round(values: Iterator[float]) -> float | None:
            return sum(values) / n_committed if n_committed else None

        return cls(
            label=label,
            attempts=len(attempts),
            clients=clients,
            window_s=_median(one.window_s for one in attempts),
            target=_median(one.target for one in attempts),
            over_selection=_median(one.over_selection for one in attempts),
            steps=_median(one.steps for one in attempts if one.steps),
            update_bytes=_median(one.update_bytes for one in attempts if one.update_bytes),
            fetched_bytes=_median(one.fetched_bytes for one in attempts if one.fetched_bytes),
            committed=n_committed / len(attempts),
            asked=sum(one.asked for one in attempts) / len(attempts),
            reports=sum(one.reports for one in attempts) / len(attempts),
            open_s=sum(one.open_s for one in attempts) / len(attempts),
            open_h=a_round(one.open_s / 3600 for one in attempts),
            bytes_up=a_round(float(one.bytes_up) for one in attempts),
            bytes_down=a_round(float(one.bytes_down) for one in attempts),
        )

    @classmethod
    def of_traces(cls, label: str, traces: Sequence[Trace], clients: int | None = None) -> "Course":
        """Of traces of the same fleet. `clients`: of the fleet, if traces do not mention all."""
        attempts = [Went.of_traced(one) for trace in traces for one in trace.attempts]
        found = cls.of(label, clients or traces[0].clients, attempts)
        assert found is not None, "a trace has attempts"
        return found

    def unlike(self, recorded: "Course") -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Differences from the record in words: of the rounds, and of the fleet and its work. Only known values that
        differ by more than 2 % count.
        """
        return self._unlike(recorded, _ROUNDS), self._unlike(recorded, _WORK)

    def _unlike(self, recorded: "Course", question: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
        pairs = [(name, getattr(self, key), getattr(recorded, key), form) for name, key, form in question]
        return tuple(
            f"{name} {form.format(here)}, not {form.format(there)}"
            for name, here, there, form in pairs
            if here and there and abs(here - there) > ALIKE * there
        )


_ROUNDS = (
    ("window_s", "window_s", "{:g}"),
    ("target", "target", "{:g}"),
    ("over_selection", "over_selection", "{:.3g}"),
)
_WORK = (
    ("clients", "clients", "{:,.0f}"),
    ("steps a client", "steps", "{:,.4g}"),
    ("bytes of an update", "update_bytes", "{:,.0f}"),
    ("bytes fetched for it", "fetched_bytes", "{:,.0f}"),
)


def _median(values: Iterator[float]) -> float:
    """0 without values."""
    found = list(values)
    return float(np.median(found)) if found else 0.0
