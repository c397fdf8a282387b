"""The demo's client processes: started, listened to, one of them killed in mid-training and started again.

A thread per process reads its events. The kill happens in that thread, the moment the victim says that it trains.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter
from safetensors.torch import save_file

from umbel.sim.demo.client import SHARD_FILE, DemoSite, SiteEvent
from umbel.sim.demo.data import DemoData
from umbel.sim.demo.plan import RUN, ClientPlan, DemoPlan
from umbel.sim.processes import Child, start

_SITES = TypeAdapter(list[DemoSite])
_EVENT = TypeAdapter(SiteEvent)


def write_shards(plan: DemoPlan, data: DemoData, folder: Path) -> None:
    """Give each client a directory of its own with its own shard, and nothing else."""
    for client in plan.clients:
        directory = folder / client.name
        directory.mkdir(parents=True)
        shard = data.shards[client.shard]
        save_file({"images": shard.inputs.contiguous(), "labels": shard.targets.contiguous()}, directory / SHARD_FILE)


class SiteProcesses:
    """`children`: the list that all processes join, so that whoever stops that list stops them too."""

    def __init__(self, plan: DemoPlan, folder: Path, children: list[Child]) -> None:
        self._plan = plan
        self._folder = folder
        self._children = children
        self._current: dict[tuple[ClientPlan, ...], Child] = {}
        self._specs: dict[tuple[ClientPlan, ...], str] = {}
        self._public_keys: dict[str, str] = {}
        self._rehearsals_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._pace: float | None = None
        self.was_killed = False
        self.has_returned = False

    def start_all(self) -> None:
        """Start every process. They import their libraries while the coordinator starts."""
        for clients in self._plan.processes:
            self._start(clients)

    def introduce(self, server_url: str, tokens: Mapping[str, str]) -> None:
        """Tell every process who it is."""
        has_policy = self._plan.run_file.secure is not None
        for clients, child in self._current.items():
            sites = [
                DemoSite(c.name, str(self._folder / c.name), server_url, RUN, tokens[c.name], c.wait_s, has_policy)
                for c in clients
            ]
            self._specs[clients] = _SITES.dump_json(sites).decode() + "\n"
            _tell(child, self._specs[clients])

    @property
    def all_ready(self) -> bool:
        return len(self._rehearsals_s) == len(self._plan.processes)

    @property
    def public_keys(self) -> Mapping[str, str]:
        """By client, what its own process has told. All are there once `all_ready`, if they are to be listed."""
        return dict(self._public_keys)

    @property
    def rehearsals_s(self) -> list[float]:
        """How long each process took for a round's steps, all of them being at it."""
        return list(self._rehearsals_s.values())

    @property
    def running(self) -> Sequence[Child]:
        """The processes that should be running now."""
        with self._lock:
            return [child for child in self._current.values() if child in self._children]

    def go(self, pace: float) -> None:
        """Let them take part, all at once. `pace`: so many times as long a slow data set waits."""
        with self._lock:
            self._pace = pace
        for child in self._current.values():
            _tell(child, f"{pace}\n")

    def restart_victim(self) -> None:
        """Start the killed process again, with the same state directory."""
        clients = next(clients for clients in self._plan.processes if self._plan.victim in clients)
        self._start(clients)
        _tell(self._current[clients], self._specs[clients])

    def _start(self, clients: tuple[ClientPlan, ...]) -> None:
        names = ", ".join(client.name for client in clients)
        log = self._folder / f"{names.partition(',')[0]}.log"
        child = start(f"the process of {names}", ["-m", "umbel.sim.demo.client"], log)
        with self._lock:
            self._children.append(child)
            self._current[clients] = child
        threading.Thread(target=self._listen, args=(child,), name=f"listen {names}", daemon=True).start()

    def _listen(self, child: Child) -> None:
        for line in child.stdout:
            event = _EVENT.validate_json(line)
            if event.event == "key":
                self._public_keys[event.client] = event.public_key
            elif event.event == "ready":
                self._note_ready(child, event.rehearsal_s)
            elif event.event == "training" and self._is_the_moment(event):
                self._kill(child)
                return

    def _note_ready(self, child: Child, rehearsal_s: float) -> None:
        with self._lock:
            self._rehearsals_s.setdefault(child.name, rehearsal_s)
            pace = self._pace
            self.has_returned = self.has_returned or pace is not None
        if pace is not None:
            _tell(child, f"{pace}\n")

    def _is_the_moment(self, event: SiteEvent) -> bool:
        victim = self._plan.victim
        if victim is None or self.was_killed or event.client != victim.name:
            return False
        return event.n_trainings == self._plan.kill_in_training

    def _kill(self, child: Child) -> None:
        with self._lock:
            self.was_killed = True
            self._children.remove(child)
        child.kill()


def _tell(child: Child, line: str) -> None:
    """Write a line to a process; one that is gone is noticed elsewhere, with its log."""
    try:
        child.stdin.write(line)
        child.stdin.flush()
    except BrokenPipeError:
        pass
