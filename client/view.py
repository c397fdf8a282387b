"""A run's progress as something to look at: the round under way, who does what in it, and the rounds that ended."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from umbel.aggregation.coverage import Gap
from umbel.aggregation.records import ClientRecord, Fate, Judged, LiveRound, RoundRecord, RunView, TurnedAway
from umbel.client.printable import printable

ENDED_SHOWN = 10
CLIENTS_SHOWN = 20
EXCEPTIONS_SHOWN = 6
_REASON_CHARS = 120
_STYLES = {
    Fate.TRAINING: "cyan",
    Fate.ACCEPTED: "green",
    Fate.PARTIAL: "yellow",
    Fate.RELEASED: "dim",
    Fate.DECLINED: "magenta",
    Fate.LOST: "red",
    Fate.UNFIT: "red",
}
_WORST_FIRST = (Fate.UNFIT, Fate.DECLINED, Fate.LOST, Fate.RELEASED, Fate.PARTIAL)
_VERDICTS = {Fate.ACCEPTED: "passes", Fate.PARTIAL: "passes"}
_LEGEND = (
    "training: means over the clients' local training in the round. held-out data: the model that entered the round,"
    " measured by its clients before they trained; or, in an evaluation, the newest, by clients that did not train it."
)


def render_run(
    run: RunView, ended: Sequence[RoundRecord], live: LiveRound | None, turned_away: Sequence[TurnedAway] = ()
) -> RenderableType:
    """The whole picture, for `rich.live.Live`."""
    parts: list[RenderableType] = [_headline(run)]
    if ended:
        parts += _ended(ended[-ENDED_SHOWN:])
    if live is not None:
        parts.append(_live_line(live))
        if live.clients:
            parts.append(_client_table(live.clients))
    if turned_away:
        parts.append(_away(turned_away))
    return Group(*parts)


def _headline(run: RunView) -> Text:
    line = Text.assemble(
        (printable(run.name), "bold"), f"  {run.rounds_done} of {run.rounds_planned} rounds  ", run.status.value
    )
    if run.reason:
        line.append(f"  {printable(run.reason)}", "dim")
    return line.append(f"\naudit head {printable(run.audit_head)}", "dim") if run.audit_head else line


def _live_line(live: LiveRound) -> Text:
    left = "" if live.closes_in_s is None else f", closes in {live.closes_in_s:.0f} s"
    line = Text(f"{_name(live)}: {printable(live.phase)}{left}")
    return line.append(f"  {printable(live.why)}", "dim")


def _name(attempt: LiveRound | RoundRecord) -> str:
    return f"round {_number(attempt)}"


def _number(attempt: LiveRound | RoundRecord) -> str:
    what = "" if attempt.task.makes_model else f" {attempt.task.value}"
    return f"{attempt.round}{what}" + ("" if attempt.attempt == 1 else f" (attempt {attempt.attempt})")


def _ended(records: Sequence[RoundRecord]) -> Iterable[RenderableType]:
    """The rounds as a table; below it, round by round, what did not go as planned and why."""
    yield _ended_table(records)
    for record in records:
        if notes := _notes(record):
            yield Padding(notes, (0, 0, 0, 1))
    if any(record.evaluation for record in records):
        yield Text(_LEGEND, "dim")


def _ended_table(records: Sequence[RoundRecord]) -> Table:
    counts, means = ("clients reported", "data in", "partial", "dropped"), ("training", "held-out data")
    table = Table("round", *counts, "MB up", "MB down", "seconds", *means, box=None)
    for record in records:
        table.add_row(
            _number(record) + ("" if record.committed else " failed" if record.task.tries_clients else " abandoned"),
            f"{record.reported} of {record.selected}",
            f"{record.samples_share:.0%}",
            str(record.partial),
            str(record.dropped),
            f"{record.bytes_up / 1e6:.2f}",
            f"{record.bytes_down / 1e6:.2f}",
            f"{record.wall_s:.1f}",
            _figures(record.metrics),
            _figures(record.evaluation),
        )
    return table


def _figures(means: Mapping[str, float]) -> Text:
    return Text("  ".join(f"{printable(name)} {value:.4g}" for name, value in sorted(means.items())))


def _notes(record: RoundRecord) -> Text | None:
    """Why it was abandoned, what is not covered, whose work is missing or partial; None if all went as planned."""
    if record.task.tries_clients:
        return _canary(record)
    parts = [] if record.committed else [f"abandoned: {printable(record.reason)}"]
    parts += [_counts(record.judged)] if record.judged else []
    parts += [_uncovered(gap) for gap in record.uncovered[:EXCEPTIONS_SHOWN]]
    exceptions = sorted(
        (client for client in record.clients if client.fate in _WORST_FIRST),
        key=lambda client: (_WORST_FIRST.index(client.fate), client.client),
    )
    parts += [_exception(client) for client in exceptions[:EXCEPTIONS_SHOWN]]
    if rest := Counter(client.fate.value for client in exceptions[EXCEPTIONS_SHOWN:]):
        parts.append("and " + ", ".join(f"{count} {fate}" for fate, count in sorted(rest.items())))
    if not parts:
        return None
    return Text(f"{_name(record)}: " + "; ".join(parts))


def _counts(judged: Judged) -> str:
    """What early stopping goes by, which is not the mean over all samples."""
    value = "" if judged.value is None else f"counts as {judged.value:.4g}, "
    return printable(f"{judged.metric}: {value}{judged.why}")


def _canary(record: RoundRecord) -> Text:
    """What was found, client by client, in full: this is what a canary is for."""
    lines = [f"{_name(record)}: {printable(record.reason)}"]
    lines += [
        f"  {printable(one.client)} {_VERDICTS.get(one.fate, one.fate.value)}: {printable(one.reason)}"
        for one in record.clients
    ]
    return Text("\n".join(lines))


def _away(turned_away: Sequence[TurnedAway]) -> Text:
    """Those who may not take part, and why: nobody else would tell who waits for them."""
    lines = [f"{printable(one.client)} turned away: {printable(one.reason)}" for one in turned_away]
    return Text("\n".join(lines), "magenta")


def _uncovered(gap: Gap) -> str:
    return f"{printable(gap.what)} not covered, {gap.sample_count} samples: {_short(gap.reason)}"


def _exception(client: ClientRecord) -> str:
    return f"{printable(client.client)} {client.fate.value}: {_short(client.reason)}"


def _short(reason: str) -> str:
    words = printable(reason)
    return words if len(words) <= _REASON_CHARS else words[: _REASON_CHARS - 1] + "…"


def _client_table(clients: Sequence[ClientRecord]) -> Table:
    table = Table("client", "state", "steps", "samples", "", box=None)
    for client in clients[:CLIENTS_SHOWN]:
        steps = f"{client.steps_done} of {client.steps_planned}" if client.steps_planned else ""
        state = Text(client.fate.value, _STYLES[client.fate])
        table.add_row(
            Text(printable(client.client)), state, steps, str(client.sample_count), Text(printable(client.reason))
        )
    if rest := Counter(client.fate.value for client in clients[CLIENTS_SHOWN:]):
        table.add_row("…", ", ".join(f"{count} {fate}" for fate, count in sorted(rest.items())))
    return table
