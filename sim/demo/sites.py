"""The demo's client processes, one of which is killed in mid-training and restarted; and the list of the clients' keys.

A thread per process reads its events. The thread kills the victim when the victim says that it trains.

Officers list the keys that the clinics made, sign the list, and each clinic pins it: docs/how-to/run-a-consortium.md in
small, by the code behind `umbel members`. A pipe from the clinic's process stands for the telephone call. Nothing of
this goes through the coordinator. It gets the list with the run that is bound to it, and so draws no other client.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter
from safetensors.torch import save_file

from umbel.aggregation.trust.members import MemberList, SignedMembers
from umbel.aggregation.trust.public_keys import grouped, public_key_text
from umbel.client.operator.members_editing import new_file, sign_file, write_members_file
from umbel.client.private_keys import make_officer_key
from umbel.sim.demo.client import POLICY_FILE, SHARD_FILE, DemoSite, SiteEvent
from umbel.sim.demo.digits import DemoData
from umbel.sim.demo.plan import MINIMUM, RUN, ClientPlan, DemoPlan
from umbel.sim.processes import Child, start

LIST = "demo"
LIST_FILE = f"{LIST}-1.json"
OFFICERS = ("anna", "bert")


def agree(folder: Path, keys: Mapping[str, str]) -> SignedMembers:
    """The first list of these clients (names to public keys), signed by all officers, whose keys are made in `folder`.

    Raises `ValueError` for what is no key, or one that two clients have; `OSError`.
    """
    folder.mkdir()
    officers = {name: _officer_key(folder / f"{name}.pem") for name in OFFICERS}
    path = folder / LIST_FILE
    signed = new_file(path, MemberList(LIST, 1, keys, officers, quorum=len(OFFICERS)))
    for name in OFFICERS:
        signed = sign_file(path, folder / f"{name}.pem", _no_passphrase)
    return signed


def pin(signed: SignedMembers, directory: Path, minimum_work: float | None = None) -> None:
    """Write the list into a clinic's directory, and a policy that trusts it and takes part in secure rounds alone.

    `minimum_work`: the share of its steps with which a clinic sends its update; None for all of them.
    """
    write_members_file(directory / LIST_FILE, signed)
    policy = f"""\
secure_aggregation = "required"
members = "{LIST_FILE}"
members_sha256 = "{grouped(signed.list.sha256)}"
minimum_cohort = {MINIMUM}
# The difference of two sums, with and without the killed clinic, shows about what it sent. "refuse" would stop rounds.
cohort_change = "warn"
"""
    if minimum_work is not None:
        policy += f"minimum_work = {minimum_work:g}\n"
    (directory / POLICY_FILE).write_text(policy)


def members_line(n_keys: int, sha256: str) -> str:
    """The agreement in words, with the list's hash as people compare it."""
    signed = f"{n_keys} keys on a list that {len(OFFICERS)} officers signed"
    return f"{signed}; every clinic has pinned the list's hash: {grouped(sha256)}"


def _officer_key(path: Path) -> str:
    return public_key_text(make_officer_key(path, "").public_key().public_bytes_raw())


def _no_passphrase() -> str:
    return ""  # none was set


_SITES = TypeAdapter(list[DemoSite])
_EVENT = TypeAdapter(SiteEvent)


def write_shards(plan: DemoPlan, data: DemoData, folder: Path) -> None:
    """Give each client a directory with its own shard."""
    for client in plan.clients:
        directory = folder / client.name
        directory.mkdir(parents=True)
        shard = data.shards[client.shard]
        save_file({"images": shard.inputs.contiguous(), "labels": shard.targets.contiguous()}, directory / SHARD_FILE)


class SiteProcesses:
    """`children`: the list of all processes; its owner stops them."""

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
        """Send every process its clients' settings."""
        has_policy = bool(self._plan.run_file.secure)
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
        """By client, from its own process. They are complete once `all_ready`, if they are to be listed."""
        return dict(self._public_keys)

    @property
    def rehearsals_s(self) -> list[float]:
        """The rehearsal time of each process, with all at work."""
        return list(self._rehearsals_s.values())

    @property
    def running(self) -> Sequence[Child]:
        """The processes that should be running now."""
        with self._lock:
            return [child for child in self._current.values() if child in self._children]

    def go(self, pace: float) -> None:
        """Start all clients. `pace`: a factor of the waits of data sets."""
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
    """Write a line to a process; a dead one is noticed elsewhere, with its log."""
    try:
        child.stdin.write(line)
        child.stdin.flush()
    except BrokenPipeError:
        pass
