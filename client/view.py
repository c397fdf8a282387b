"""A run's progress as something to look at: the round under way, who does what in it, and the rounds that ended."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from umbel.aggregation.records import ClientRecord, Fate, LiveRound, RoundRecord, RunView
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
}
_WORST_FIRST = (Fate.DECLINED, Fate.LOST, Fate.RELEASED, Fate.PARTIAL)
_LEGEND = (
    "training: means over the clients' local training in the round. model before: the model that entered the round,"
    " measured on the clients' held-out data before they trained."
)


def render_run(run: RunView, ended: Sequence[RoundRecord], live: LiveRound | None) -> RenderableType:
    """The whole picture, for `rich.live.Live`."""
    parts: list[RenderableType] = [_headline(run)]
    if ended:
        parts += _ended(ended[-ENDED_SHOWN:])
    if live is not None:
        parts.append(_live_line(live))
        if live.clients:
            parts.append(_client_table(live.clients))
    return Group(*parts)


def _headline(run: RunView) -> Text:
    line = Text.assemble(
        (printable(run.name), "bold"), f"  {run.rounds_done} of {run.rounds_planned} rounds  ", run.status.value
    )
    return line.append(f"  {printable(run.reason)}", "dim") if run.reason else line


def _live_line(live: LiveRound) -> Text:
    left = "" if live.closes_in_s is None else f", closes in {live.closes_in_s:.0f} s"
    line = Text(f"round {live.round}{_attempt(live.attempt)}: {printable(live.phase)}{left}")
    return line.append(f"  {printable(live.why)}", "dim")


def _attempt(number: int) -> str:
    return "" if number == 1 else f" (attempt {number})"


def _ended(records: Sequence[RoundRecord]) -> Iterable[RenderableType]:
    """The rounds as a table; below it, round by round, what did not go as planned and why."""
    yield _ended_table(records)
    for record in records:
        if notes := _notes(record):
            yield Padding(notes, (0, 0, 0, 1))
    if any(record.evaluation for record in records):
        yield Text(_LEGEND, "dim")


def _ended_table(records: Sequence[RoundRecord]) -> Table:
    counts, means = ("clients reported", "partial", "dropped"), ("training", "model before")
    table = Table("round", *counts, "MB up", "MB down", "seconds", *means, box=None)
    for record in records:
        table.add_row(
            f"{record.round}{_attempt(record.attempt)}" + ("" if record.committed else " abandoned"),
            f"{record.reported} of {record.selected}",
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
    """Why an attempt was abandoned, and whose work is missing or partial and why; None where all went as planned."""
    parts = [] if record.committed else [f"abandoned: {printable(record.reason)}"]
    exceptions = sorted(
        (client for client in record.clients if client.fate in _WORST_FIRST),
        key=lambda client: (_WORST_FIRST.index(client.fate), client.client),
    )
    parts += [_exception(client) for client in exceptions[:EXCEPTIONS_SHOWN]]
    if rest := Counter(client.fate.value for client in exceptions[EXCEPTIONS_SHOWN:]):
        parts.append("and " + ", ".join(f"{count} {fate}" for fate, count in sorted(rest.items())))
    if not parts:
        return None
    return Text(f"round {record.round}{_attempt(record.attempt)}: " + "; ".join(parts))


def _exception(client: ClientRecord) -> str:
    reason = printable(client.reason)
    short = reason if len(reason) <= _REASON_CHARS else reason[: _REASON_CHARS - 1] + "…"
    return f"{printable(client.client)} {client.fate.value}: {short}"


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
