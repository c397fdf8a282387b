"""Whom the demo kills in the middle of a round, and how they come back: one client, then the coordinator.

Both die of SIGKILL, which no process can hear, and both start again over the files they had.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from umbel.aggregation.records import ClientRecord, Fate, LiveRound, RoundRecord, RunProgress
from umbel.sim.demo_board import Board
from umbel.sim.demo_plan import DemoPlan
from umbel.sim.demo_sites import SiteProcesses
from umbel.sim.processes import Child, CoordinatorProcess, start_coordinator

_COUNTS = (Fate.ACCEPTED, Fate.PARTIAL)


class ReportLost(Exception):
    """A report that the coordinator had accepted before it was killed does not count."""


class VictimClient:
    """The client whose process is killed. The kill itself is done by `SiteProcesses`, when the client trains."""

    def __init__(self, plan: DemoPlan, sites: SiteProcesses, board: Board) -> None:
        self._plan, self._sites, self._board = plan, sites, board

    def tend(self) -> None:
        """Tell of the kill, start the process again some rounds later, and tell of its return."""
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


class VictimCoordinator:
    """The coordinator's process, over the files in `data`. `children`: the list of all processes, kept true.

    It is killed once, in a round in which the killed client is missing: such a round is open to the window's end, long
    after enough reports to close it are in.
    """

    def __init__(self, data: Path, plan: DemoPlan, board: Board, children: list[Child], start_limit_s: float) -> None:
        self._data, self._plan, self._board, self._children = data, plan, board, children
        self._start_limit_s = start_limit_s
        self._accepted: frozenset[str] = frozenset()
        self._round: tuple[int, int] | None = None
        self.noted_heads: list[str] = []
        self.now = self._start(0)

    def tend(self, progress: RunProgress) -> None:
        """Kill it if this is the moment, and start it again at the same address."""
        self.now.child.require_alive()
        if progress.live is None or not self._is_the_moment(progress.live):
            return
        live, began = progress.live, time.monotonic()
        self._accepted, self._round = _accepted(live.clients), (live.round, live.attempt)
        self.noted_heads.append(progress.run.audit_head)
        self._children.remove(self.now.child)
        self.now.child.kill()
        self._board.note_coordinator_kill(live.round, len(self._accepted))
        self.now = self._start(urlsplit(self.now.url).port or 0)
        self._board.note_coordinator_return(time.monotonic() - began)

    def check(self, record: RoundRecord) -> None:
        """Raise `ReportLost` unless the interrupted round counts every report that was accepted before the kill."""
        if (record.round, record.attempt) != self._round:
            return
        if lost := self._accepted - _accepted(record.clients):
            raise ReportLost(f"round {record.round} lost accepted reports: {', '.join(sorted(lost))} ({record.reason})")
        self._board.tell(f"all {len(self._accepted)} reports that it had accepted count in round {record.round}")

    def _start(self, port: int) -> CoordinatorProcess:
        started = start_coordinator(self._data, self._start_limit_s, port=port)
        self._children.append(started.child)
        return started

    def _is_the_moment(self, live: LiveRound) -> bool:
        board, after = self._board, self._plan.coordinator_killed_after
        if after is None or board.coordinator_killed_in is not None or board.killed_after is None:
            return False
        is_late_enough = len(board.rounds) >= board.killed_after + after
        return is_late_enough and live.phase == "training" and len(_accepted(live.clients)) >= self._minimum

    @property
    def _minimum(self) -> int:
        return self._plan.run_file.rounds.minimum


def _accepted(clients: Iterable[ClientRecord]) -> frozenset[str]:
    return frozenset(client.client for client in clients if client.fate in _COUNTS)
