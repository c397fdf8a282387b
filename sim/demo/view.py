"""The demo in a terminal: one picture that `rich.live.Live` redraws, made from the board alone."""

import textwrap
from collections import deque
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from umbel.sim.demo.board import Board, ClientLine
from umbel.sim.demo.tally import tally

EVENTS_MAX = 16
_EVENTLESS_LINES = 21  # header, clients and all frames
_COLUMNS = 80  # of plain lines
_WIDE = 96  # columns; in fewer, what can be spared is left out
_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "waiting": ("·", "dim"),
    "training": ("●", "cyan"),
    "reported": ("✔", "green"),
    "partial": ("◐", "yellow"),
    "told to stop": ("◌", "blue"),
    "declined": ("✖", "magenta"),
    "lost": ("✖", "bold red"),
}


class View:
    """Something Rich can draw at any time. With a `console`, each event is also printed there."""

    def __init__(self, console: Console | None = None) -> None:
        self.board: Board | None = None
        self._console = console
        self._events: deque[str] = deque(maxlen=EVENTS_MAX)

    def tell(self, event: str) -> None:
        """An event worth reading has happened."""
        self._events.append(event)
        if self._console is not None and self.board is not None:
            at = f"{self.board.elapsed_s:5.1f} s  "
            lines = textwrap.fill(event, _COLUMNS, initial_indent=at, subsequent_indent=" " * len(at))
            self._console.print(lines, soft_wrap=True, markup=False, highlight=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The picture, for the terminal as it is at this moment: people change its size."""
        height = options.height or options.size.height
        yield "starting" if self.board is None else render(self.board, self._events, options.max_width, height)


def render(board: Board, events: Iterable[str], width: int, height: int) -> RenderableType:
    """The whole picture, at most `height` lines of `width` columns; good from 80 x 24 on."""
    n_events = max(1, min(EVENTS_MAX, height - _EVENTLESS_LINES))
    is_wide = width >= _WIDE
    middle = Table.grid(expand=True, padding=(0, 1 if is_wide else 0, 0, 0))
    middle.add_column(ratio=1)
    middle.add_column(width=36 if is_wide else 28)
    middle.add_row(_clients(board.lines(), is_wide), Group(_accuracy(board), _totals(board)))
    return Group(_header(board), middle, _events(list(events)[-n_events:], n_events))


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as a row of bars from 0 to 1."""
    return "".join(_BARS[min(int(max(value, 0.0) * len(_BARS)), len(_BARS) - 1)] for value in values[-width:])


def si_bytes(n_bytes: int) -> str:
    """Bytes for people: powers of ten, three digits."""
    size = float(n_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _header(board: Board) -> Panel:
    done = len(board.committed)
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(width=16)
    bar.add_column(ratio=1)
    bar.add_column(justify="right", width=8)
    label = f"round {min(done + 1, board.n_rounds)} of {board.n_rounds}"
    bar.add_row(label, ProgressBar(total=board.n_rounds, completed=done), f"{board.elapsed_s:.0f} s")
    return Panel(Group(bar, _phase(board)), title="[bold]umbel demo[/]", title_align="left", border_style="cyan")


def _phase(board: Board) -> Text:
    live = board.live
    if live is None or board.is_coordinator_down:
        return Text(board.stage, style="italic", no_wrap=True, overflow="ellipsis")
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(live.phase, style="bold")
    if live.attempt > 1:
        text.append(f" (attempt {live.attempt})", style="yellow")
    if live.closes_in_s is not None:
        text.append(f", window closes in {max(live.closes_in_s, 0):.1f} s")
    return text.append(f"  {live.why}", style="dim")


def _clients(lines: Sequence[ClientLine], is_wide: bool) -> Panel:
    table = Table(box=None, expand=True, padding=(0, 1), header_style="dim")
    table.add_column("client", no_wrap=True, min_width=9)
    if is_wide:
        table.add_column("samples", justify="right")
    table.add_column("state", no_wrap=True, min_width=14)
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for line in lines:
        sign, style = _STYLES[line.state]
        note = Text(line.note or line.kind, style="dim" if line.state != "lost" else "red")
        samples = [str(line.sample_count)] if is_wide else []
        table.add_row(line.name, *samples, Text(f"{sign} {line.state}", style=style), note)
    return Panel(table, title="clients", title_align="left", border_style="dim")


def _accuracy(board: Board) -> Panel:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim")
    grid.add_column(justify="right")
    values = board.accuracies
    grid.add_row("together", Text(f"{values[-1]:.1%}" if values else "…", style="bold green"))
    known = board.baselines
    grid.add_row("pooled data", f"{known.pooled:.1%}" if known else "…")
    grid.add_row("each alone", f"{known.alone_mean:.1%}" if known and known.alone else "…")
    spark = Text(sparkline(values, 24) or " ", style="green")
    return Panel(Group(spark, grid), title="accuracy, held-out", title_align="left", border_style="dim")


def _totals(board: Board) -> Panel:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim")
    grid.add_column(justify="right")
    counts = tally(ended.record for ended in board.rounds)
    grid.add_row("asked", str(counts.asked))
    grid.add_row("counted", Text(str(counts.reported), style="green"))
    grid.add_row("  of it partial", Text(str(counts.partial), style="yellow"))
    grid.add_row("stopped or lost", Text(str(counts.dropped), style="red"))
    grid.add_row("abandoned", str(counts.abandoned))
    grid.add_row("bytes down", si_bytes(counts.bytes_down))
    grid.add_row("bytes up", si_bytes(counts.bytes_up))
    return Panel(grid, title="all rounds", title_align="left", border_style="dim")


def _events(events: Sequence[str], n_lines: int) -> Panel:
    """The newest last; as high with few of them as with many, so that nothing jumps."""
    padded = [*events, *[""] * (n_lines - len(events))]
    lines = [Text(event, no_wrap=True, overflow="ellipsis") for event in padded]
    return Panel(Group(*lines), title="what happened", title_align="left", border_style="dim")
