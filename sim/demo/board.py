"""The current facts of the demo, and how a terminal shows them.

The facts come from the coordinator's records. The demo adds the accuracy on its held-out test set, and its own kills
and restarts. The screen is the client's own screen of a run, with the demo's accuracy and events around it.
"""

import io
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from umbel.aggregation.phrases import counted
from umbel.aggregation.run.records import ClientRecord, Fate, LiveRound, RoundRecord, RunView
from umbel.client.cli.view import RunPicture
from umbel.sim.data.data_set import Score
from umbel.sim.demo.baselines import Baselines
from umbel.sim.demo.plan import NAME_PREFIX, DemoPlan
from umbel.sim.demo.sites import members_line

NAMED_MAX = 2


@dataclass(frozen=True, slots=True)
class Proof:
    """`bundles`: of the verified audit chain. `round`: the last one, whose replay gave `model_sha256`; empty for a
    secure round, which has no stored updates.
    """

    bundles: int
    round: int
    model_sha256: str


@dataclass(frozen=True, slots=True)
class DemoRound:
    """One ended attempt; `score` of the model it made, None for an abandoned one."""

    record: RoundRecord
    score: Score | None


@dataclass(slots=True)
class Board:
    """The facts about the demo at this moment."""

    plan: DemoPlan
    tell: Callable[[str], None]  # called with each event worth reading
    stage: str = "starting"  # what the demo does now
    run: RunView | None = None
    live: LiveRound | None = None
    rounds: list[DemoRound] = field(default_factory=list[DemoRound])
    down: dict[str, str] = field(default_factory=dict[str, str])  # clients without a process, and why
    members_sha256: str = ""  # of the list that the clinics have pinned, if any
    baselines: Baselines | None = None  # as far as they are measured
    killed_after: int | None = None  # how many rounds had ended when the victim was killed
    is_restarting: bool = False
    coordinator_killed_in: int | None = None  # the round
    proof: Proof | None = None  # once the run is over and audited
    started: float = field(default_factory=time.monotonic)

    @property
    def committed(self) -> list[DemoRound]:
        return [ended for ended in self.rounds if ended.record.committed]

    @property
    def accuracies(self) -> list[float]:
        return [ended.score.accuracy for ended in self.committed if ended.score is not None]

    @property
    def n_rounds(self) -> int:
        return self.plan.run_file.rounds.count

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def say_stage(self, stage: str) -> None:
        self.stage = stage
        self.tell(stage)

    def add(self, ended: DemoRound) -> None:
        """Take a round that has ended."""
        self.rounds.append(ended)
        self.tell(sentence(ended, self.n_rounds))

    def note_members(self, sha256: str) -> None:
        self.members_sha256 = sha256
        self.tell(members_line(len(self.plan.clients), sha256))

    def note_kill(self, name: str) -> None:
        self.killed_after = len(self.rounds)
        self.down[name] = "killed by the demo"
        self.tell(f"{name} is killed (SIGKILL) while it trains")

    def note_restart(self, name: str) -> None:
        self.is_restarting = True
        self.down[name] = "starting again"
        self.tell(f"{name} is started again, with the same state directory")

    def note_return(self, name: str) -> None:
        del self.down[name]
        self.tell(f"{name} is back, with the same key and without enrolling again")
        target = self.plan.run_file.rounds.target
        self.tell(f"with {name}, {target} fast clients can fill the target; the slow clients are told to stop")

    def note_coordinator_kill(self, number: int, n_reports: int) -> None:
        self.coordinator_killed_in = number
        self.say_stage(f"the coordinator is killed (SIGKILL) in round {number}, after {counted(n_reports, 'report')}")

    def note_coordinator_return(self, seconds: float) -> None:
        self.say_stage(f"the coordinator is back with the same files after {seconds:.1f} s")

    def note_proof(self, proof: Proof) -> None:
        self.proof = proof
        for line in proof_lines(proof.bundles, proof.round, proof.model_sha256):
            self.tell(line)


def proof_lines(n_bundles: int, number: int, replayed: str) -> tuple[str, str]:
    """The proof in words. `replayed`: the model hash of the replayed last round; empty for a secure one."""
    return (
        f"chain of {n_bundles} bundles verified, with the clients' own signatures",
        f"round {number} replayed from the stored updates: same hash"
        if replayed
        else "not possible, by design: only the sum of the updates is known",
    )


def sentence(ended: DemoRound, n_rounds: int) -> str:
    """A round in one short line: its outcome, the clients that did not simply report, and the accuracy."""
    record = ended.record
    if not record.committed:
        return f"round {record.round}: attempt {record.attempt} abandoned: {record.reason}"
    parts = [f"{record.reported}/{record.selected} reports"]
    for word, fate in _REMARKS:
        if clients := [client for client in record.clients if client.fate is fate]:
            parts.append(f"{word} {_who(clients)}")
    accuracy = f" {ended.score.accuracy:5.1%}" if ended.score else ""
    return f"round {record.round:2}/{n_rounds} {record.wall_s:4.1f} s{accuracy} {', '.join(parts)}"


_REMARKS = (("partial", Fate.PARTIAL), ("lost", Fate.LOST), ("declined", Fate.DECLINED), ("stopped", Fate.RELEASED))


def _who(clients: Sequence[ClientRecord]) -> str:
    """A few clients by the numbers in their names, many by their count."""
    if len(clients) > NAMED_MAX:
        return f"{len(clients)} clients"
    return "+".join(client.client.removeprefix(NAME_PREFIX) for client in clients)


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
