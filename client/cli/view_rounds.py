"""Rounds that ended, as lines: a table of them, and what did not go as planned in each, and why."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.text import Text

from umbel.aggregation.phrases import counted, some
from umbel.aggregation.round.coverage import Gap
from umbel.aggregation.run.records import Absent, AbsentClient, ClientRecord, Fate, Judged, LiveRound, RoundRecord
from umbel.client.cli.tables import Column, figure, table_lines, time_of_day
from umbel.client.printable import printable

EXCEPTIONS_SHOWN = 6
LEGEND = (
    "training: means over the clients' local training in the round. held-out: on held-out data, of the model that"
    " entered the round, measured by its clients before they trained; or, in an evaluation, of the newest, by clients"
    " that did not train it."
)
_NAME_CHARS = 40
_REASON_CHARS = 120  # of what the coordinator says of a client; a reason for declining is never cut
_NAMES_SHOWN = 12  # of the clients that declined for one reason
_WORST_FIRST = (Fate.UNFIT, Fate.DECLINED, Fate.LOST, Fate.RELEASED, Fate.PARTIAL)
_VERDICTS = {Fate.ACCEPTED: "passes", Fate.PARTIAL: "passes"}


def name_of(attempt: LiveRound | RoundRecord) -> str:
    """Which round, what kind where it is not of training, and which attempt where it is not the first."""
    return f"round {_number(attempt)}"


def table_of(records: Sequence[RoundRecord], width: int) -> list[Text]:
    """A row a round. Where not all columns fit, how far it came and what it measured stay the longest."""

    def column(head: str, worth: int, cells: Sequence[str]) -> Column:
        return Column(head, [Text(cell) for cell in cells], worth)

    columns = [
        Column("round", [Text(_number(one) + _state(one)) for one in records], worth=100, least=12),
        column("reported", 90, [f"{one.reported} of {one.selected}" for one in records]),
        *_data_in(records),
        column("partial", 30, [str(one.partial) for one in records]),
        column("no report", 40, [str(one.dropped) for one in records]),
        column("MB up", 20, [f"{one.bytes_up / 1e6:.3g}" for one in records]),
        column("MB down", 10, [f"{one.bytes_down / 1e6:.3g}" for one in records]),
        column("updates as", 5, [printable(one.codec) for one in records]),
        column("seconds", 70, [f"{one.wall_s:.1f}" for one in records]),
        *_of_known(records),
        *_costs(records),
        *measured("training", 50, [one.metrics for one in records]),
        *measured("held-out", 60, [one.evaluation for one in records]),
    ]
    return table_lines(columns, width)


def _data_in(records: Sequence[RoundRecord]) -> list[Column]:
    """How much of the data that was asked for came; nobody knows that of secure rounds."""
    if all(one.secure for one in records):
        return []
    cells = ["" if one.secure else f"{one.samples_share:.0%}" for one in records]
    return [Column("data in", [Text(cell) for cell in cells], worth=80)]


def _costs(records: Sequence[RoundRecord]) -> list[Column]:
    """What a private run had cost with each of its rounds."""
    if all(one.epsilon is None for one in records):
        return []
    cells = ["" if one.epsilon is None else f"{one.epsilon:.3g}" for one in records]
    return [Column("epsilon so far", [Text(cell) for cell in cells], worth=85)]


def measured(where: str, worth: int, means: Sequence[Mapping[str, float]]) -> list[Column]:
    """A column for each metric."""
    names = sorted({name for one in means for name in one})
    cells = {name: [Text(figure(one[name]) if name in one else "") for one in means] for name in names}
    return [Column(f"{where} {printable(name)[:_NAME_CHARS]}", cells[name], worth) for name in names]


class Notes:
    """Writes notes on rounds, in the order of the calls. Each reason for declining is written whole, and once: a later
    round refers to the round whose notes have it.
    """

    def __init__(self) -> None:
        self._rounds: dict[str, str] = {}  # reasons for declining that are written already: the name of the round

    def on(self, record: RoundRecord) -> Text | None:
        """Why it was abandoned, what is not covered, whose work is missing or partial; None if all went as planned."""
        if record.task.tries_clients:
            return _canary(record)
        parts = [] if record.committed else [f"abandoned: {printable(record.reason)}"]
        parts += [_counts(record.judged)] if record.judged else []
        told = "" if record.committed else record.reason  # already, and not again of each client
        parts += [_uncovered(gap, record.absent, told) for gap in record.uncovered[:EXCEPTIONS_SHOWN]]
        parts += self._exceptions(record, told)
        if record.absent is not None and record.absent.clients:
            parts.append(absent_words(record.absent))
            if record.samples_selected:  # a secure round is not told who has how much
                parts.append(f"{record.share_of_known:.0%} of all known data is in")
        return Text(f"{name_of(record)}: " + "; ".join(parts)) if parts else None

    def on_declined(self, live: LiveRound, table: Sequence[Text]) -> Text | None:
        """The reasons for declining in the round under way that its `table` of clients cuts; None if it cuts none."""
        rows = [line.plain for line in table]
        cut = [
            one
            for one in live.clients
            if one.fate is Fate.DECLINED and not any(printable(one.reason) in row for row in rows)
        ]
        parts = [self._exception(group, live, "") for group in _groups(cut)[:EXCEPTIONS_SHOWN]]
        return Text("; ".join(parts)) if parts else None

    def _exceptions(self, record: RoundRecord, told: str) -> list[str]:
        groups = _groups(record.clients)
        rest = Counter(client.fate.value for group in groups[EXCEPTIONS_SHOWN:] for client in group)
        more = ["and " + ", ".join(f"{count} {fate}" for fate, count in sorted(rest.items()))] if rest else []
        return [self._exception(group, record, told) for group in groups[:EXCEPTIONS_SHOWN]] + more

    def _exception(self, group: Sequence[ClientRecord], attempt: LiveRound | RoundRecord, told: str) -> str:
        fate, reason = group[0].fate, group[0].reason
        who = f"{some([printable(client.client) for client in group], _NAMES_SHOWN)} {fate.value}"
        if fate is not Fate.DECLINED:
            return f"{who}: {_short(reason, told)}"
        before = self._rounds.setdefault(reason, name_of(attempt))
        return f"{who}: {_whole(reason, told)}" if before == name_of(attempt) else f"{who}, as in {before}"


def absent_words(absent: Absent) -> str:
    """Who was not there to be asked; the first few by name."""
    named = [f"{printable(one.client)} ({_known(one.sample_count)}{_heard(one)})" for one in absent.named]
    more = absent.clients - len(named)
    is_known = absent.samples and all(one.sample_count for one in absent.named)
    in_all = f", {counted(absent.samples, 'sample')} in all" if is_known else ""
    return "absent: " + ", ".join(named) + (f" and {more} more{in_all}" if more else "")


def _known(sample_count: int) -> str:
    """Nothing of a client that did not say how much data it has, as in secure rounds."""
    return f"{counted(sample_count, 'sample')}, " if sample_count else ""


def _heard(one: AbsentClient) -> str:
    return f"last heard of {time_of_day(one.heard_at)}"


def _number(attempt: LiveRound | RoundRecord) -> str:
    what = "" if attempt.task.makes_model else f" {attempt.task.value}"
    return f"{attempt.round}{what}" + ("" if attempt.attempt == 1 else f" (attempt {attempt.attempt})")


def _state(record: RoundRecord) -> str:
    return "" if record.committed else " failed" if record.task.tries_clients else " abandoned"


def _of_known(records: Sequence[RoundRecord]) -> list[Column]:
    """How much of all known data was in, where somebody was not there to be asked."""
    if not any(one.absent is not None and one.absent.clients and one.samples_selected for one in records):
        return []
    shares = ["" if one.absent is None else f"{one.share_of_known:.0%}" for one in records]
    return [Column("of all known", [Text(cell) for cell in shares], worth=75)]


def _groups(clients: Sequence[ClientRecord]) -> list[list[ClientRecord]]:
    """Clients whose work is missing or partial, the worst first. Those that declined for one reason are one group."""
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
    """What early stopping goes by, which is not the mean over all samples."""
    value = "" if judged.value is None else f"counts as {figure(judged.value)}, "
    return printable(f"{judged.metric}: {value}{judged.why}")


def _canary(record: RoundRecord) -> Text:
    """What was found, client by client, in full: this is what a canary is for."""
    lines = [f"{name_of(record)}: {printable(record.reason)}"]
    lines += [
        f"  {printable(one.client)} {_VERDICTS.get(one.fate, one.fate.value)}: {printable(one.reason)}"
        for one in record.clients
    ]
    return Text("\n".join(lines))


def _uncovered(gap: Gap, absent: Absent | None, told: str) -> str:
    """How much data is missing there is left out where nobody knows it."""
    samples = gap.sample_count or (absent.samples_of(gap.name) if absent and gap.kind == "site" else 0)
    how_much = f", {counted(samples, 'sample')}" if samples else ""
    return f"{printable(gap.what)} not covered{how_much}: {_short(gap.reason, told)}"


def _short(reason: str, told: str) -> str:
    """Cuts what `_whole` gives at `_REASON_CHARS`."""
    words = _whole(reason, told)
    return words if len(words) <= _REASON_CHARS else words[: _REASON_CHARS - 1] + "…"


def _whole(reason: str, told: str) -> str:
    """A reason, which may be a peer's words, without what was told before. `printable` cuts it where the coordinator
    refuses a longer one (`messages.REASON_CHARS_MAX`).
    """
    return printable(reason.replace(told, "").rstrip(": ") if told and reason != told else reason)
