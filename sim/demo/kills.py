"""The processes that the demo kills in the middle of a round and restarts: one client, then the coordinator.

Both get SIGKILL, which no process can handle, and both restart over the same files.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from umbel.aggregation.phrases import counted
from umbel.aggregation.run.records import ClientRecord, Fate, LiveRound, RoundRecord, RunProgress
from umbel.sim.demo.board import Board
from umbel.sim.demo.plan import DemoPlan
from umbel.sim.demo.sites import SiteProcesses
from umbel.sim.processes import Child, CoordinatorProcess, start_coordinator

_COUNTS = (Fate.ACCEPTED, Fate.PARTIAL)


class ReportLost(Exception):
    """A report that the coordinator accepted before the kill does not count."""


class VictimClient:
    """The client whose process is killed. The kill itself is done by `SiteProcesses`, when the client trains."""

    def __init__(self, plan: DemoPlan, sites: SiteProcesses, board: Board) -> None:
        self._plan, self._sites, self._board = plan, sites, board

    def tend(self) -> None:
        """Report the kill, restart the process some rounds later, and report its return."""
        victim, sites, board = self._plan.victim, self._sites, self._board
        if victim is None or not sites.was_killed:
            return
        if board.killed_after is None:
            board.note_kill(victim.name)
        elif not board.is_restarting and len(board.rounds) >= board.killed_after + self._plan.rounds_down:
            board.note_restart(victim.name)
            sites.restart_victim()
        elif sites.has_returned and victim.name in board.down:
            board.note_return(victim.name)


@dataclass(frozen=True, slots=True)
class InterruptedRound:
    """A round when the coordinator was killed. `accepted`: the clients with accepted reports."""

    round: int
    attempt: int
    accepted: frozenset[str]

    def check(self, record: RoundRecord) -> None:
        """Raise `ReportLost` unless the ended round counts all of them."""
        if lost := self.accepted - _accepted(record.clients):
            raise ReportLost(f"round {record.round} lost accepted reports: {', '.join(sorted(lost))} ({record.reason})")


def is_the_moment(plan: DemoPlan, board: Board, live: LiveRound) -> bool:
    """Whether to kill the coordinator now, in a round in which the killed client is missing.

    Such a round stays open to its window's end, long after enough reports are in.
    """
    after = plan.coordinator_killed_after
    if after is None or board.killed_after is None or board.coordinator_killed_in is not None:
        return False
    is_late_enough = len(board.rounds) >= board.killed_after + after
    enough = plan.reports_to_close(len(live.clients))
    return is_late_enough and live.phase == "training" and len(_accepted(live.clients)) >= enough


class VictimCoordinator:
    """The coordinator's process, over the files in `data`, killed once. `children`: all running processes."""

    def __init__(self, data: Path, plan: DemoPlan, board: Board, children: list[Child], start_limit_s: float) -> None:
        self._data, self._plan, self._board, self._children = data, plan, board, children
        self._start_limit_s = start_limit_s
        self._interrupted: InterruptedRound | None = None
        self.noted_heads: list[str] = []
        self.now = self._start(0)

    def tend(self, progress: RunProgress) -> None:
        """Kill it if it is time, and restart it at the same address."""
        self.now.child.require_alive()
        live = progress.live
        if live is None or not is_the_moment(self._plan, self._board, live):
            return
        began = time.monotonic()
        self._interrupted = InterruptedRound(live.round, live.attempt, _accepted(live.clients))
        self.noted_heads.append(progress.run.audit_head)
        self._children.remove(self.now.child)
        self.now.child.kill()
        self._board.note_coordinator_kill(live.round, len(self._interrupted.accepted))
        self.now = self._start(urlsplit(self.now.url).port or 0)
        self._board.note_coordinator_return(time.monotonic() - began)

    def check(self, record: RoundRecord) -> None:
        """Raise `ReportLost` if this is the interrupted round and an accepted report does not count."""
        was = self._interrupted
        if was is None or (record.round, record.attempt) != (was.round, was.attempt):
            return
        was.check(record)
        n = len(was.accepted)
        those = counted(
            n,
            "report that was accepted before the kill is counted",
            "reports that were accepted before the kill are counted",
        )
        self._board.tell(f"{'all ' if n > 1 else ''}{those} in round {record.round}")

    def _start(self, port: int) -> CoordinatorProcess:
        started = start_coordinator(self._data, self._start_limit_s, port=port)
        self._children.append(started.child)
        return started


def _accepted(clients: Iterable[ClientRecord]) -> frozenset[str]:
    return frozenset(client.client for client in clients if client.fate in _COUNTS)
