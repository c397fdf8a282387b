"""A run's progress as something to look at: the round under way, who does what in it, and the rounds that ended."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from umbel.aggregation.records import ClientRecord, Fate, LiveRound, RoundRecord, RunView
from umbel.client.printable import printable

ENDED_SHOWN = 10
CLIENTS_SHOWN = 20
_STYLES = {
    Fate.TRAINING: "cyan",
    Fate.ACCEPTED: "green",
    Fate.PARTIAL: "yellow",
    Fate.RELEASED: "dim",
    Fate.DECLINED: "magenta",
    Fate.LOST: "red",
}


def render_run(run: RunView, ended: Sequence[RoundRecord], live: LiveRound | None) -> RenderableType:
    """The whole picture, for `rich.live.Live`."""
    parts: list[RenderableType] = [_headline(run)]
    if ended:
        parts.append(_ended_table(ended[-ENDED_SHOWN:]))
    if live is not None:
        parts.append(_live_line(live))
        if live.clients:
            parts.append(_client_table(live.clients))
    return Group(*parts)


def _headline(run: RunView) -> Text:
    line = Text.assemble((run.name, "bold"), f"  {run.rounds_done} of {run.rounds_planned} rounds  ", run.status.value)
    return line.append(f"  {printable(run.reason)}", "dim") if run.reason else line


def _live_line(live: LiveRound) -> Text:
    left = "" if live.closes_in_s is None else f", closes in {live.closes_in_s:.0f} s"
    attempt = "" if live.attempt == 1 else f" (attempt {live.attempt})"
    line = Text(f"round {live.round}{attempt}: {live.phase}{left}")
    return line.append(f"  {printable(live.why)}", "dim")


def _ended_table(ended: Sequence[RoundRecord]) -> Table:
    table = Table("round", "reported", "partial", "dropped", "MB up", "MB down", "seconds", "measured", box=None)
    for record in ended:
        measured = {**record.metrics, **record.evaluation}
        figures = "  ".join(f"{name} {value:.4g}" for name, value in sorted(measured.items()))
        table.add_row(
            str(record.round) if record.committed else f"{record.round} abandoned",
            f"{record.reported} of {record.selected}",
            str(record.partial),
            str(record.dropped),
            f"{record.bytes_up / 1e6:.2f}",
            f"{record.bytes_down / 1e6:.2f}",
            f"{record.wall_s:.1f}",
            Text(figures or printable(record.reason)),
        )
    return table


def _client_table(clients: Sequence[ClientRecord]) -> Table:
    table = Table("client", "state", "steps", "samples", "", box=None)
    for client in clients[:CLIENTS_SHOWN]:
        steps = f"{client.steps_done} of {client.steps_planned}" if client.steps_planned else ""
        state = Text(client.fate.value, _STYLES[client.fate])
        table.add_row(client.client, state, steps, str(client.sample_count), Text(printable(client.reason)))
    if rest := Counter(client.fate.value for client in clients[CLIENTS_SHOWN:]):
        table.add_row("…", ", ".join(f"{count} {fate}" for fate, count in sorted(rest.items())))
    return table
