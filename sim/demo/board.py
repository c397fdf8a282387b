"""What the demo knows at this moment, gathered in one place for whoever shows it: live view, plain lines, plot.

Facts come from the coordinator's own records; the demo adds the accuracy it measured on its held-out test set, and what
it did itself (killed and restarted a process).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from umbel.aggregation.phrases import counted
from umbel.aggregation.run.records import ClientRecord, Fate, LiveRound, RoundRecord
from umbel.sim.data.samples import Score
from umbel.sim.demo.baselines import Baselines
from umbel.sim.demo.members import members_line
from umbel.sim.demo.plan import NAME_PREFIX, ClientPlan, DemoPlan, Role
from umbel.sim.demo.proof import Proof

NAMED_MAX = 2


@dataclass(frozen=True, slots=True)
class DemoRound:
    """One ended attempt; `score` of the model it made, None for an abandoned one."""

    record: RoundRecord
    score: Score | None


@dataclass(frozen=True, slots=True)
class ClientLine:
    """What is to be shown of one client: its state in one word, and the details."""

    name: str
    kind: str
    sample_count: int
    state: str
    note: str


@dataclass(slots=True)
class Board:
    """`stage`: what the demo does now, in words. `down`: clients whose process is not there, and why.
    `members_sha256`: of the list that the clinics have pinned; empty while there is none, and in a plain run.
    `baselines`: as far as they are known. `killed_after`: how many rounds had ended when the victim was killed.
    `coordinator_killed_in`: the round. `proof`: once the run is over and audited. `tell` is called with each event
    worth reading.
    """

    plan: DemoPlan
    sample_counts: dict[str, int]
    tell: Callable[[str], None]
    stage: str = "starting"
    live: LiveRound | None = None
    rounds: list[DemoRound] = field(default_factory=list[DemoRound])
    down: dict[str, str] = field(default_factory=dict[str, str])
    members_sha256: str = ""
    baselines: Baselines | None = None
    killed_after: int | None = None
    is_restarting: bool = False
    coordinator_killed_in: int | None = None
    is_coordinator_down: bool = False
    proof: Proof | None = None
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
        """A round has ended: remember it and tell of it."""
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
        self.tell(f"with it, {target} fast ones fill the target; the slow are told to stop")

    def note_coordinator_kill(self, number: int, n_reports: int) -> None:
        self.coordinator_killed_in, self.is_coordinator_down = number, True
        self.say_stage(f"the coordinator is killed (SIGKILL) in round {number}, {counted(n_reports, 'report')} in")

    def note_coordinator_return(self, seconds: float) -> None:
        self.is_coordinator_down = False
        self.say_stage(f"the coordinator is back over the same files after {seconds:.1f} s")

    def note_proof(self, proof: Proof) -> None:
        self.proof = proof
        for line in proof_lines(proof.bundles, proof.round, proof.model_sha256):
            self.tell(line)

    def lines(self) -> list[ClientLine]:
        """One line per client, from the round under way or else from the last one."""
        if self.live is not None and self.live.clients:
            records = self.live.clients
        else:
            records = self.rounds[-1].record.clients if self.rounds else ()
        by_name = {record.client: record for record in records}
        return [self._line(client, by_name.get(client.name)) for client in self.plan.clients]

    def _line(self, client: ClientPlan, record: ClientRecord | None) -> ClientLine:
        state, note = self._state(client.name, record)
        return ClientLine(client.name, _KINDS[client.role], self.sample_counts[client.name], state, note)

    def _state(self, name: str, record: ClientRecord | None) -> tuple[str, str]:
        down = self.down.get(name)
        if down is not None and (record is None or record.fate in (Fate.TRAINING, Fate.LOST, Fate.RELEASED)):
            return "lost", down
        return ("waiting", "") if record is None else (STATES[record.fate], _note(record))


STATES = {
    Fate.TRAINING: "training",
    Fate.ACCEPTED: "reported",
    Fate.PARTIAL: "partial",
    Fate.RELEASED: "told to stop",
    Fate.DECLINED: "declined",
    Fate.LOST: "lost",
    Fate.UNFIT: "unfit",
}
_KINDS = {Role.ORDINARY: "", Role.VICTIM: "will be killed", Role.SLOW: "slow machine"}


def proof_lines(n_bundles: int, number: int, replayed: str) -> tuple[str, str]:
    """What was proven, in words. `replayed`: the hash that the last round came to again; empty for a secure one."""
    return (
        f"chain of {n_bundles} bundles verified, with the clients' own signatures",
        f"round {number} made again from what is stored: same hash"
        if replayed
        else "not possible, and meant so: nobody has a clinic's update, only their sum",
    )


def sentence(ended: DemoRound, n_rounds: int) -> str:
    """A round in one short line: what came of it, who did not simply report (by number), and the accuracy."""
    record = ended.record
    if not record.committed:
        return f"round {record.round}: attempt {record.attempt} abandoned: {record.reason}"
    parts = [f"{record.reported} of {record.selected} in"]
    for word, fate in _REMARKS:
        if clients := [client for client in record.clients if client.fate is fate]:
            parts.append(f"{word} {_who(clients)}")
    accuracy = f" {ended.score.accuracy:6.1%}" if ended.score else ""
    return f"round {record.round:2}/{n_rounds} {record.wall_s:4.1f} s{accuracy}  {', '.join(parts)}"


_REMARKS = (("partial", Fate.PARTIAL), ("lost", Fate.LOST), ("declined", Fate.DECLINED), ("stopped", Fate.RELEASED))


def _who(clients: Sequence[ClientRecord]) -> str:
    """Some by the number in their names, many by how many they are."""
    if len(clients) > NAMED_MAX:
        return f"{len(clients)} clients"
    return "+".join(client.client.removeprefix(NAME_PREFIX) for client in clients)


def _note(record: ClientRecord) -> str:
    match record.fate:
        case Fate.PARTIAL:
            return f"{record.steps_done} of {counted(record.steps_planned, 'step')}"
        case Fate.ACCEPTED:
            return "" if record.report_s is None else f"after {record.report_s:.1f} s"
        case Fate.TRAINING:
            return f"silent for {record.silent_s:.0f} s" if record.silent_s >= 1 else ""
        case Fate.RELEASED:
            return ""
        case Fate.DECLINED | Fate.LOST | Fate.UNFIT:
            return record.reason
