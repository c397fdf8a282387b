"""A trace: the times of a run's clients, taken from its records, from which a simulation makes similar clients.

It has no names: clients are numbered in the order in which the records first mention them. It does not say what is
trained, how well, or where. `canonical.canonical` writes it; docs/reference/traces.md describes it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from umbel.aggregation.canonical import EXACT_MAX
from umbel.aggregation.phrases import counted
from umbel.aggregation.run.records import ClientRecord, Fate, RoundRecord
from umbel.aggregation.types import (
    LINE_RATE_MAX,
    LINE_RATE_MIN,
    OVER_SELECTION_MAX,
    SECONDS_MAX,
    TARGET_MAX,
    require_within,
)

FORMAT = 1
CLIENTS_MAX = 10_000_000
ATTEMPTS_MAX = 1_000_000
TIME_MAX = 1e11  # Unix seconds: the year 5138


@dataclass(frozen=True, slots=True)
class TracedClient:
    """One client in one attempt; the other fields are as in `ClientRecord`."""

    client: int  # its number
    fate: Fate
    report_s: float | None
    silent_s: float
    sample_count: int
    steps_done: int
    steps_planned: int
    bytes_up: int
    bytes_down: int
    train_s: float | None
    upload_bytes_per_s: float | None
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a file with more in it is none that we know

    def __post_init__(self) -> None:
        require_within(self.client, "client", 0, CLIENTS_MAX - 1)
        require_within(self.silent_s, "silent_s", 0.0, SECONDS_MAX)
        require_within(self.sample_count, "sample_count", 0, EXACT_MAX)
        require_within(self.steps_planned, "steps_planned", 0, EXACT_MAX)
        require_within(self.steps_done, "steps_done", 0, self.steps_planned)
        require_within(self.bytes_up, "bytes_up", 0, EXACT_MAX)
        require_within(self.bytes_down, "bytes_down", 0, EXACT_MAX)
        for name in ("report_s", "train_s"):
            if (seconds := getattr(self, name)) is not None:
                require_within(seconds, name, 0.0, SECONDS_MAX)
        if self.upload_bytes_per_s is not None:
            require_within(self.upload_bytes_per_s, "upload_bytes_per_s", LINE_RATE_MIN, LINE_RATE_MAX)


@dataclass(frozen=True, slots=True)
class TracedAttempt:
    """One attempt at a round of training; the other fields are as in `RoundRecord`."""

    round: int
    attempt: int
    committed: bool
    opened_at: float
    open_s: float
    window_s: float
    over_selection: float
    model_bytes: int
    bytes_up: int
    bytes_down: int
    waiting: int  # clients that waited when it opened, including its cohort
    absent: int | None  # the run's clients that did not wait then; None if unknown
    absent_clients: tuple[int, ...]  # some of them
    secure: bool  # whether only sums of the clients' work are known
    clients: tuple[TracedClient, ...]
    reports_wanted: int | None = None  # the target; None in records from before it was kept
    reports_needed: int | None = None  # the minimum, likewise
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        for name in ("round", "attempt"):
            require_within(getattr(self, name), name, 1, EXACT_MAX)
        require_within(self.opened_at, "opened_at", 0.0, TIME_MAX)
        require_within(self.open_s, "open_s", 0.0, SECONDS_MAX)
        require_within(self.window_s, "window_s", 0.0, SECONDS_MAX)
        least = 0.0 if self.reports_wanted is None else 1.0  # 0 in records from before it was kept
        require_within(self.over_selection, "over_selection", least, OVER_SELECTION_MAX)
        for name in ("model_bytes", "bytes_up", "bytes_down"):
            require_within(getattr(self, name), name, 0, EXACT_MAX)
        require_within(len(self.clients), "the number of clients", 1, TARGET_MAX * int(OVER_SELECTION_MAX))
        numbers = {one.client for one in self.clients}
        if len(numbers) < len(self.clients):
            raise ValueError(
                f"the attempt lists a client twice: it has {len(self.clients)} entries for "
                f"{counted(len(numbers), 'client')}; keep one entry for each client"
            )
        require_within(self.waiting, "waiting", len(self.clients), EXACT_MAX)
        if self.absent is not None:
            require_within(self.absent, "absent", len(self.absent_clients), EXACT_MAX)
        elif self.absent_clients:
            raise ValueError("an attempt with `absent_clients` must also have `absent`, the number of absent clients")
        for client in self.absent_clients:
            require_within(client, "an absent client", 0, CLIENTS_MAX - 1)
        if (self.reports_wanted is None) is not (self.reports_needed is None):
            raise ValueError("an attempt must have both reports_wanted and reports_needed, or neither")
        if self.reports_wanted is not None and self.reports_needed is not None:
            require_within(self.reports_wanted, "reports_wanted", 1, TARGET_MAX)
            require_within(self.reports_needed, "reports_needed", 1, self.reports_wanted)

    @property
    def mentioned(self) -> set[int]:
        """The numbers of its clients, and of `absent_clients`."""
        return {*(one.client for one in self.clients), *self.absent_clients}

    @property
    def in_time(self) -> tuple[TracedClient, ...]:
        """The clients that reported before it closed."""
        return tuple(one for one in self.clients if one.report_s is not None and one.report_s <= self.open_s)


@dataclass(frozen=True, slots=True)
class Trace:
    format: int
    clients: int  # their number; they are numbered from 0
    attempts: tuple[TracedAttempt, ...]  # in the order in which they ended
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(
                f"the trace has format {self.format}, but this version of umbel reads format {FORMAT}; use the "
                "version that made the trace"
            )
        require_within(self.clients, "clients", 1, CLIENTS_MAX)
        require_within(len(self.attempts), "the number of attempts", 1, ATTEMPTS_MAX)
        for attempt in self.attempts:
            if (greatest := max(attempt.mentioned)) >= self.clients:
                raise ValueError(
                    f"round {attempt.round} names client {greatest}, but the trace has {self.clients} clients, "
                    f"numbered from 0 to {self.clients - 1}"
                )


def trace_of(records: Iterable[RoundRecord]) -> Trace:
    """The trace of a run, or of several with the same clients. `records`: in the order in which their attempts ended.

    As in `report_times.observed`, only attempts at training count, without those during which no coordinator could take
    reports or for which no client was drawn. Raises `ValueError` if none is left, or there are too many.
    """
    numbers: dict[str, int] = {}
    attempts = tuple(
        _attempt(record, numbers)
        for record in records
        if record.task.makes_model and not record.away_s and record.clients
    )
    if not attempts:
        raise ValueError("no training attempt with invited clients has ended yet, so there is nothing to trace")
    return Trace(FORMAT, len(numbers), attempts)


def _attempt(record: RoundRecord, numbers: dict[str, int]) -> TracedAttempt:
    clients = tuple(_client(client, _number(client.client, numbers)) for client in record.clients)
    named = record.absent.named if record.absent is not None else ()
    return TracedAttempt(
        round=record.round,
        attempt=record.attempt,
        committed=record.committed,
        opened_at=record.opened_at,
        open_s=record.open_s,
        window_s=record.window_s,
        over_selection=record.over_selection,
        model_bytes=record.model_bytes,
        bytes_up=record.bytes_up,
        bytes_down=record.bytes_down,
        waiting=record.selected + record.passed_over,
        absent=None if record.absent is None else record.absent.clients,
        absent_clients=tuple(_number(one.client, numbers) for one in named),
        secure=record.secure,
        clients=clients,
        reports_wanted=record.target or None,
        reports_needed=record.minimum or None,
    )


def _client(record: ClientRecord, number: int) -> TracedClient:
    return TracedClient(
        client=number,
        fate=record.fate,
        report_s=record.report_s,
        silent_s=record.silent_s,
        sample_count=record.sample_count,
        steps_done=min(record.steps_done, EXACT_MAX),  # clients say these, and may say anything
        steps_planned=min(record.steps_planned, EXACT_MAX),
        bytes_up=record.bytes_up,
        bytes_down=record.bytes_down,
        train_s=None if record.train_s is None else min(record.train_s, SECONDS_MAX),
        upload_bytes_per_s=record.upload_bytes_per_s,
    )


def _number(client: str, numbers: dict[str, int]) -> int:
    return numbers.setdefault(client, len(numbers))
