"""Rounds as text: a table, notes on what did not go as planned, and event lines for a log."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from rich.text import Text

from umbel.aggregation.phrases import counted, part_of, some
from umbel.aggregation.round.coverage import Gap
from umbel.aggregation.run.lean import Lean
from umbel.aggregation.run.records import (
    EVALUATION,
    Absent,
    ClientRecord,
    Fate,
    Judged,
    LiveRound,
    RoundRecord,
    RunProgress,
    TurnedAway,
)
from umbel.client.cli.output import Column, figure, figures, time_of_day
from umbel.client.errors import printable

EXCEPTIONS_SHOWN = 6
LEGEND = (
    "training: means over the clients' local training in the round. held-out: means on held-out data. In a training"
    " round, clients measure the model that they receive, before they train it. In an evaluation, clients that did not"
    " train the newest model measure it. In a secure evaluation, all clients do."
)
_NAME_CHARS = 40
_REASON_CHARS = 120  # a reason for declining is never cut
_COUNTS = frozenset({"confusion", "scores"})  # from which figures follow
_DETAILS = frozenset({"accuracy", "balanced_accuracy", "f1", "precision", "auc_error_max"})
_NAMES_SHOWN = 12  # clients that declined for one reason
_STOP_WORTH = 88  # the metric of early stopping gets room before all but the round and its reports
_LATER_WORTH = 2  # a metric that the run's first measurement does not have
_WORST_FIRST = (Fate.UNFIT, Fate.DECLINED, Fate.LOST, Fate.RELEASED, Fate.PARTIAL)
_VERDICTS = {Fate.ACCEPTED: "passes", Fate.PARTIAL: "passes"}


def name_of(attempt: LiveRound | RoundRecord) -> str:
    """The round's name: its number, its kind unless it trains, and its attempt unless it is the first."""
    return f"round {_number(attempt)}"


def round_columns(records: Sequence[RoundRecord], of_run: Sequence[RoundRecord]) -> list[Column]:
    """A table with a row for each of `records`. A narrow table leaves out progress and known metrics last.

    `of_run`: all rounds so far.
    """
    epsilons = ["" if one.epsilon is None else f"{one.epsilon:.3g}" for one in records]
    return [
        Column("round", 100, [_number(one) + _state(one) for one in records], least=12),
        Column("reported", 90, [f"{one.reported} of {one.selected}" for one in records]),
        *if_known(Column("data in", 80, ["" if one.secure else f"{one.samples_share:.0%}" for one in records])),
        Column("partial", 30, [str(one.partial) for one in records]),
        *if_known(Column("steps done", 25, [_steps_done(one) for one in records])),
        Column("no report", 40, [str(one.dropped) for one in records]),
        Column("MB up", 20, [f"{one.bytes_up / 1e6:.3g}" for one in records]),
        Column("MB down", 10, [f"{one.bytes_down / 1e6:.3g}" for one in records]),
        Column("updates as", 5, [printable(one.codec) for one in records]),
        Column("seconds", 70, [f"{one.wall_s:.1f}" for one in records]),
        *_of_known(records),
        *if_known(Column("epsilon so far", 85, epsilons)),
        *if_known(Column("mu", 45, ["" if one.proximal_mu is None else f"{one.proximal_mu:g}" for one in records])),
        *_training(50, [one.metrics for one in records], of_run),
        *_held_out(60, [one.evaluation for one in records], of_run),
    ]


def client_columns(record: RoundRecord, of_run: Sequence[RoundRecord]) -> list[Column]:
    """A table of each client's own metrics in a round; empty if the record keeps none. `of_run`: all rounds so far."""
    clients = [one for one in record.clients if one.metrics or one.evaluation]
    if not clients:
        return []
    return [
        Column("client", 100, [printable(one.client) for one in clients], least=16),
        Column("samples", 10, [str(one.sample_count) for one in clients]),
        *_training(50, [one.metrics for one in clients], of_run),
        *_held_out(60, [one.evaluation for one in clients], of_run),
    ]


def quantile_columns(record: RoundRecord) -> list[Column]:
    """A table with a row for each metric: how it differs between the clients of a round. Empty if nobody knows, as in
    secure rounds, or if only one client has measured anything.
    """
    rows = [
        (f"{where} {printable(name)[:_NAME_CHARS]}", found)
        for where, by_name in (("training", record.metric_quantiles), ("held-out", record.evaluation_quantiles))
        for name, found in by_name.items()
        if found.clients > 1 and not _is_detail(name)
    ]
    if not rows:
        return []
    found = [one for _, one in rows]
    return [
        Column("metric", 100, [name for name, _ in rows], least=24),
        Column("clients", 30, [str(one.clients) for one in found]),
        Column("least", 90, [figure(one.least) for one in found]),
        Column("of client", 50, [printable(one.least_client) for one in found], least=16),
        Column("10 %", 80, [figure(one.p10) for one in found]),
        Column("median", 70, [figure(one.median) for one in found]),
        Column("90 %", 80, [figure(one.p90) for one in found]),
        Column("greatest", 90, [figure(one.greatest) for one in found]),
        Column("of client", 50, [printable(one.greatest_client) for one in found], least=16),
    ]


def if_known(column: Column) -> list[Column]:
    """The column; none if all its cells are empty, as sample counts are in secure rounds."""
    return [column] if any(column.cells) else []


def measured(
    where: str,
    worth: int,
    means: Sequence[Mapping[str, float]],
    earlier: Sequence[Mapping[str, float]] = (),
    stop: str = "",
) -> list[Column]:
    """A column for each metric. `means`: of each row; also figures that follow from counts, of which a narrow table
    leaves out all but sensitivity, specificity and AUC first.

    A client may make up any names. So the metric of early stopping comes first, then what was measured first, and a
    narrow table leaves out what came later.

    Args:
        where: the group's name.
        worth: of a known metric's column.
        means: of each row.
        earlier: of the run's rounds, oldest first; by default the rows.
        stop: the metric of early stopping, if it is one of this group.
    """
    since = _since(earlier or means)
    n_rows = Counter(name for one in means for name in one)
    known = min(since.values(), default=0)

    def worth_of(name: str) -> int:
        if name == stop:
            return _STOP_WORTH
        return 1 if _is_detail(name) else worth if since.get(name) == known else _LATER_WORTH

    def place_of(name: str) -> tuple[bool, bool, int, int, str]:
        return name != stop, _is_detail(name), since.get(name, len(earlier)), -n_rows[name], name

    return [
        Column(
            printable(name)[:_NAME_CHARS],
            worth_of(name),
            [figure(one[name]) if name in one else "" for one in means],
            group=where,
        )
        for name in sorted(n_rows, key=place_of)
    ]


def _since(rounds: Sequence[Mapping[str, float]]) -> Mapping[str, int]:
    """The first of the rounds that has each metric."""
    found = dict[str, int]()
    for number, means in enumerate(rounds):
        for name in means:
            found.setdefault(name, number)
    return found


def _training(worth: int, means: Sequence[Mapping[str, float]], of_run: Sequence[RoundRecord]) -> list[Column]:
    return measured("training", worth, means, [one.metrics for one in of_run], _stop_metric(of_run, "training."))


def _held_out(worth: int, means: Sequence[Mapping[str, float]], of_run: Sequence[RoundRecord]) -> list[Column]:
    return measured("held-out", worth, means, [one.evaluation for one in of_run], _stop_metric(of_run, EVALUATION))


def _stop_metric(of_run: Sequence[RoundRecord], source: str) -> str:
    """The metric of early stopping if it is of this source, and was measured; else empty."""
    metric = next((one.judged.metric for one in reversed(of_run) if one.judged is not None), "")
    return metric.removeprefix(source) if metric.startswith(source) else ""


def _is_detail(metric: str) -> bool:
    *_, counts, figure_name = ("", *metric.split("."))
    return counts in _COUNTS and figure_name in _DETAILS


def lean_words(records: Sequence[RoundRecord]) -> Text | None:
    """Which way the committed rounds of training lean, in a sentence.

    None if nobody was left out or did partial work, or if masks hide how much data clients have.
    """
    rounds = [one for one in records if one.committed and one.task.makes_model]
    lean = Lean.of(rounds)
    is_known = lean.words and lean.samples_share is not None
    return Text(f"{counted(len(rounds), 'committed round')}: {lean.words}") if is_known else None


class Notes:
    """Writes notes on rounds. Each reason for declining is written once, in full; later rounds refer to that round."""

    def __init__(self) -> None:
        self._rounds: dict[str, str] = {}  # reason for declining: the round whose notes have it
        self._not_shown = set[str]()  # metrics that a note has named

    def on(self, record: RoundRecord) -> Text | None:
        """Say why it was abandoned, what is not covered, and whose work is missing or partial; None without a note."""
        if record.task.tries_clients:
            return _canary(record)
        parts = [] if record.committed else [f"abandoned: {printable(record.reason)}"]
        parts += [_counts(record.judged)] if record.judged else []
        known = "" if record.committed else record.reason  # written above, so it is not repeated for each client
        parts += [_uncovered(gap, record.absent, known) for gap in record.uncovered[:EXCEPTIONS_SHOWN]]
        parts += self._exceptions(record, known)
        parts += self._left_out(record)
        if record.absent is not None and record.absent.clients:
            parts.append(absent_words(record.absent))
            if record.samples_selected:  # unknown in a secure round
                parts.append(f"the round has {record.share_of_known:.0%} of all known data")
        return Text(f"{name_of(record)}: " + "; ".join(parts)) if parts else None

    def _left_out(self, record: RoundRecord) -> Iterator[str]:
        """Metrics that are not shown, each named in one note only, by reason."""
        names_of = dict[str, list[str]]()
        for name, why in record.not_shown.items():
            if name not in self._not_shown:
                names_of.setdefault(why, []).append(printable(name))
        self._not_shown.update(record.not_shown)
        for why, names in names_of.items():
            yield f"not shown: {some(names)} ({printable(why)})"

    def on_declined(self, live: LiveRound, table: Sequence[Text]) -> Text | None:
        """The reasons for declining that the `table` of the round under way cuts off; None if it cuts none."""
        rows = [line.plain for line in table]
        cut = [
            one
            for one in live.clients
            if one.fate is Fate.DECLINED and not any(printable(one.reason) in row for row in rows)
        ]
        parts = [self._exception(group, live, "") for group in _groups(cut)[:EXCEPTIONS_SHOWN]]
        return Text("; ".join(parts)) if parts else None

    def _exceptions(self, record: RoundRecord, known: str) -> list[str]:
        groups = _groups(record.clients)
        rest = Counter(client.fate.value for group in groups[EXCEPTIONS_SHOWN:] for client in group)
        more = ["and " + ", ".join(f"{count} {fate}" for fate, count in sorted(rest.items()))] if rest else []
        return [self._exception(group, record, known) for group in groups[:EXCEPTIONS_SHOWN]] + more

    def _exception(self, group: Sequence[ClientRecord], attempt: LiveRound | RoundRecord, known: str) -> str:
        fate, reason = group[0].fate, group[0].reason
        who = f"{some([printable(client.client) for client in group], _NAMES_SHOWN)} {fate.value}"
        if fate is not Fate.DECLINED:
            return f"{who}: {_short(reason, known)}"
        before = self._rounds.setdefault(reason, name_of(attempt))
        return f"{who}: {_whole(reason, known)}" if before == name_of(attempt) else f"{who}, as in {before}"


class Events:
    """A run's news as lines for a log, a file or a pipe: each line is given once, with date and time."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}
        self._notes = Notes()

    def new_in(self, progress: RunProgress) -> Iterator[str]:
        """The lines that are new in this page of progress, dated now."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        for line in self._lines(progress):
            yield f"{now} {line}"

    def _lines(self, progress: RunProgress) -> Iterator[str]:
        for record in progress.ended:
            yield _outcome_of(record)
            if notes := self._notes.on(record):
                yield from notes.plain.splitlines()
        for away in progress.turned_away:
            if self._is_new(f"away {away.client}", line := away_words(away)):
                yield line
        run, live = progress.run, progress.live
        state = f"{run.name}: {run.status.value}" + (f", {run.reason}" if run.reason else "")
        how_far = f", {part_of(run.rounds_done, run.rounds_planned, 'round', 'is', 'are')} done"
        if self._is_new("run", state):
            yield printable(state) + how_far
        if live is not None and self._is_new("live", f"{name_of(live)}: {live.phase}"):
            left = left_words(live)
            asked = f", {counted(len(live.clients), 'client is', 'clients are')} asked" if live.clients else ""
            absent = f"; {absent_words(live.absent)}" if live.absent and live.absent.clients else ""
            yield printable(f"{name_of(live)}: {live.phase}{asked}{left}; {live.why}{absent}")

    def _is_new(self, topic: str, line: str) -> bool:
        is_new = self._last.get(topic) != line
        self._last[topic] = line
        return is_new


def left_words(live: LiveRound) -> str:
    """How long the round is open, or how long it waits for its sum after it has closed; empty if nobody waits."""
    if not live.closes_in_s:
        return ""
    when = "at most" if live.phase == "closing" else "closes in"
    return f", {when} {live.closes_in_s:.0f} s"


def away_words(away: TurnedAway) -> str:
    return printable(f"{away.client} {away.kind.value}: {away.reason}")


def absent_words(absent: Absent) -> str:
    named = [
        f"{printable(one.client)} ({_known(one.sample_count)}last seen {time_of_day(one.heard_at)})"
        for one in absent.named
    ]
    more = absent.clients - len(named)
    is_known = absent.samples and all(one.sample_count for one in absent.named)
    in_all = f", {counted(absent.samples, 'sample')} in all" if is_known else ""
    return "absent: " + ", ".join(named) + (f" and {more} more{in_all}" if more else "")


def _known(sample_count: int) -> str:
    """Empty for a client whose sample count is unknown, as in secure rounds."""
    return f"{counted(sample_count, 'sample')}, " if sample_count else ""


def _number(attempt: LiveRound | RoundRecord) -> str:
    what = "" if attempt.task.makes_model else f" {attempt.task.value}"
    return f"{attempt.round}{what}" + ("" if attempt.attempt == 1 else f" (attempt {attempt.attempt})")


def _state(record: RoundRecord) -> str:
    return "" if record.committed else " failed" if record.task.tries_clients else " abandoned"


def _steps_done(record: RoundRecord) -> str:
    """The share of the steps that were done; empty if it is all of them, or unknown."""
    share = record.work_share
    return "" if share in (None, 1.0) else f"{share:.0%}"


def _of_known(records: Sequence[RoundRecord]) -> list[Column]:
    """The share of all known data that was in the round, if any round had absent clients."""
    if not any(one.absent is not None and one.absent.clients and one.samples_selected for one in records):
        return []
    shares = ["" if one.absent is None else f"{one.share_of_known:.0%}" for one in records]
    return [Column("of all known data", 75, shares)]


def _groups(clients: Sequence[ClientRecord]) -> list[list[ClientRecord]]:
    """Group the clients whose work is missing or partial, the worst first: one group for each reason for declining."""
    found = sorted(
        (client for client in clients if client.fate in _WORST_FIRST),
        key=lambda client: (_WORST_FIRST.index(client.fate), client.client),
    )
    groups = dict[str, list[ClientRecord]]()
    for client in found:
        alike = f"declined: {client.reason}" if client.fate is Fate.DECLINED else f"client: {client.client}"
        groups.setdefault(alike, []).append(client)
    return [*groups.values()]


def _counts(judged: Judged) -> str:
    """The value that early stopping uses, which is not the mean over all samples."""
    value = "" if judged.value is None else f"early stopping uses {figure(judged.value)}, "
    return printable(f"{judged.metric}: {value}{judged.why}")


def _canary(record: RoundRecord) -> Text:
    """All that the canary found, client by client."""
    lines = [f"{name_of(record)}: {printable(record.reason)}"]
    lines += [
        f"  {printable(one.client)} {_VERDICTS.get(one.fate, one.fate.value)}: {printable(one.reason)}"
        for one in record.clients
    ]
    return Text("\n".join(lines))


def _uncovered(gap: Gap, absent: Absent | None, known: str) -> str:
    """Name what is not covered, and how much data is missing if that is known."""
    samples = gap.sample_count or (absent.samples_of(gap.name) if absent and gap.kind == "site" else 0)
    how_much = f", {counted(samples, 'sample')}" if samples else ""
    return f"{printable(gap.what)} not covered{how_much}: {_short(gap.reason, known)}"


def _short(reason: str, known: str) -> str:
    """The reason without `known`, cut to `_REASON_CHARS`."""
    words = _whole(reason, known)
    return words if len(words) <= _REASON_CHARS else words[: _REASON_CHARS - 1] + "…"


def _whole(reason: str, known: str) -> str:
    """The reason, which a peer may have written, without the words that are `known` already."""
    return printable(reason.replace(known, "").rstrip(": ") if known and reason != known else reason)


def _outcome_of(record: RoundRecord) -> str:
    outcome = "done" if record.committed else "failed" if record.task.tries_clients else "abandoned"
    counts = f"{record.reported} of {counted(record.selected, 'client')} reported"
    if record.samples_selected:  # unknown in a secure round
        counts += f", {record.samples_share:.0%} of their data"
    means = [
        f"{where}: {figures(found)}"
        for where, found in (("training", record.metrics), ("held-out", record.evaluation))
        if found
    ]
    mu = [] if record.proximal_mu is None else [f"mu {record.proximal_mu:g}"]
    cost = [] if record.epsilon is None else [f"epsilon {record.epsilon:.3g} so far"]
    return f"{name_of(record)}: {outcome} in {record.wall_s:.1f} s, {'; '.join([counts, *means, *mu, *cost])}"
