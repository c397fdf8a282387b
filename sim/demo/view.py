"""The demo in a terminal: the client's own screen of a run, with the demo's accuracy and events around it."""

import io
import textwrap
from collections import deque
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from umbel.client.cli.view import RunPicture
from umbel.sim.demo.board import Board

EVENTS_MAX = 16
_COLUMNS = 80  # of plain lines
_BARS = "▁▂▃▄▅▆▇█"


class View:
    """Something Rich can draw at any time. With a `console`, each event is also printed there."""

    def __init__(self, console: Console | None = None) -> None:
        self.board: Board | None = None
        self._console = console
        self._events: deque[str] = deque(maxlen=EVENTS_MAX)

    def tell(self, event: str) -> None:
        """Take an event worth reading."""
        self._events.append(event)
        if self._console is not None and self.board is not None:
            at = f"{self.board.elapsed_s:5.1f} s  "
            lines = textwrap.fill(event, _COLUMNS, initial_indent=at, subsequent_indent=" " * len(at))
            self._console.print(lines, soft_wrap=True, markup=False, highlight=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The screen, at most as high as the terminal is at this moment, which people resize."""
        if self.board is None:
            yield "starting"
            return
        height = options.height or options.size.height
        around = list(_demo_lines(self.board))
        events = [Text(event) for event in self._events][-max(1, height // 4) :]
        room = height - len(around) - len(events)
        for line in around:
            yield _cut(line, options.max_width)
        if self.board.run is not None and room > 1:
            yield from _run_screen(self.board, options.max_width, room)
        for line in events:
            yield _cut(line, options.max_width)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as a row of bars from 0 to 1."""
    return "".join(_BARS[min(int(max(value, 0.0) * len(_BARS)), len(_BARS) - 1)] for value in values[-width:])


def _demo_lines(board: Board) -> Iterator[Text]:
    """What the demo does, which clients are down, and the accuracy that it has measured."""
    yield Text.assemble(("umbel demo", "bold cyan"), f"  {board.elapsed_s:.0f} s  ", (board.stage, "italic"))
    values, known = board.accuracies, board.baselines
    together = f"{values[-1]:.1%}" if values else "…"
    pooled = f"{known.pooled:.1%}" if known else "…"
    alone = f"{known.alone_mean:.1%}" if known and known.alone else "…"
    accuracy = Text("held-out accuracy: together ").append(together, "bold green")
    yield accuracy.append(f", pooled data {pooled}, each alone {alone}  ").append(sparkline(values, 24), "green")
    for name, why in board.down.items():
        yield Text(f"{name}: {why}", "red")


def _run_screen(board: Board, width: int, height: int) -> RenderResult:
    """The client's screen of the run, drawn as on a console of this size."""
    assert board.run is not None
    screen = Console(file=io.StringIO(), width=width, height=height + 1)
    ended = [one.record for one in board.rounds]
    yield from screen.render(RunPicture(board.run, ended, board.live, fits_screen=True))


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line
