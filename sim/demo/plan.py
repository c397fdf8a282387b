"""The demo's plan: twelve clients in five processes, and the run file that the coordinator gets.

Nine ordinary clients share three processes. One client has its own process, which the demo kills in the middle of a
round and restarts some rounds later; meanwhile the coordinator is killed too. Two clients have the smallest shards on
slow machines: their data set waits before each sample. Normally the ten fast clients reach the target early and the
slow ones are told to stop. While the killed client is missing, the target is all twelve, so these rounds last to their
window's end and count the slow clients' partial work; only then is a silent client known to be lost. Masked updates of
partial work need the consent of run file and policy (`MINIMUM_WORK`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from statistics import median
from typing import cast

from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import DownlinkSection, Override, RetentionSection, RoundsSection
from umbel.aggregation.secagg.section import SecureAggregationSection, survivors_needed
from umbel.sim.data.partition.labels import DirichletSplit

RUN = "demo"
N_CLIENTS = 12
NAME_PREFIX = "clinic-"
BATCH_SIZE = 16
LOCAL_EPOCHS = 4
LEARNING_RATE = 0.3
SPLIT = DirichletSplit(n_clients=N_CLIENTS, alpha=4.0, size_alpha=5.0, min_samples=40)

KILL_IN_TRAINING = 3  # which is in round 3, unless the victim missed one
ROUNDS_DOWN = 4  # rounds that end between the kill and the restart
COORDINATOR_KILLED_AFTER = 2  # rounds that end between the client's kill and the coordinator's
WINDOW_S, SECURE_WINDOW_S = 3.5, 5.0  # on a machine where the rehearsal takes no longer than this:
_SECTIONS = ("rounds", "training", "aggregation", "codec", "secure_aggregation", "downlink", "coverage", "retention")
REHEARSAL_S = 0.7  # on two quiet cores: 0.5 to 0.8 s
PACE_MAX = 3.0
MINIMUM = 6
MINIMUM_WORK = 0.1  # of a clinic's steps: less than the slow ones do, so that they are in the sums
ORDINARY_WAIT_S = 0.0005  # per sample: about 0.2 s for four passes over an ordinary shard
SLOW_WAIT_S = 0.02  # per sample: about a third of four passes over a small shard fits into the window


class Role(StrEnum):
    """How the demo treats a client."""

    ORDINARY = "ordinary"
    VICTIM = "victim"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """One client. `shard`: index into `DemoData.shards`; `wait_s`: what its data set waits before each sample."""

    name: str
    role: Role
    shard: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """`processes`: the clients by process. `kill_in_training`: in which of the victim's trainings, None for no kill.

    `rounds_down`: how many rounds end before the victim's process is started again; `coordinator_killed_after`: how
    many before the coordinator is killed in the middle of the next one, None for no kill.
    """

    seed: int
    run_file: RunFile
    processes: tuple[tuple[ClientPlan, ...], ...]
    kill_in_training: int | None
    rounds_down: int
    coordinator_killed_after: int | None

    @property
    def clients(self) -> tuple[ClientPlan, ...]:
        return tuple(client for process in self.processes for client in process)

    @property
    def victim(self) -> ClientPlan | None:
        return next((client for client in self.clients if client.role is Role.VICTIM), None)

    @property
    def epochs(self) -> int:
        """Passes over the data of a client that takes part in every round: the baselines' budget."""
        return self.run_file.rounds.count * LOCAL_EPOCHS

    def reports_to_close(self, n_asked: int) -> int:
        """How many of `n_asked` clients must report for their round to commit at its window's end."""
        minimum = self.run_file.rounds.minimum
        return max(minimum, survivors_needed(n_asked)) if self.run_file.secure else minimum

    def at_pace(self, pace: float) -> "DemoPlan":
        """The same with a window `pace` times as long."""
        rounds = self.run_file.rounds
        return replace(self, run_file=replace(self.run_file, rounds=replace(rounds, window_s=rounds.window_s * pace)))

    def bound_to(self, members_sha256: str) -> "DemoPlan":
        """The same, bound to this member list; only for secure rounds."""
        section = self.run_file.secure
        assert section is not None, "a plain run has no list"
        bound = replace(section, members_sha256=members_sha256)
        return replace(self, run_file=replace(self.run_file, secure_aggregation=bound))


def pace_of(rehearsals_s: Sequence[float]) -> float:
    """The factor of the window on this machine, from the time of each process's rehearsal.

    With a fixed window, rounds would be abandoned on a busy laptop.
    """
    return min(max(round(median(rehearsals_s) / REHEARSAL_S, 1), 1.0), PACE_MAX)


def make_plan(seed: int, rounds: int, *, calm: bool, plain: bool = False) -> DemoPlan:
    """`calm`: no kills and no slow clients; every round waits for all twelve. `plain`: updates are not masked, and
    those of the last round are kept for its replay.

    Calm and plain, the same seed gives the same final model; in secure rounds clinics draw their own seeds.
    """
    clients = [_client(number, calm) for number in range(1, N_CLIENTS + 1)]
    processes = (clients[0:3], clients[3:6], clients[6:9], clients[9:10], clients[10:12])
    return DemoPlan(
        seed=seed,
        run_file=_run_file(seed, rounds, calm, plain),
        processes=tuple(map(tuple, processes)),
        kill_in_training=None if calm else KILL_IN_TRAINING,
        rounds_down=ROUNDS_DOWN,
        coordinator_killed_after=None if calm else COORDINATOR_KILLED_AFTER,
    )


def run_toml(run_file: RunFile) -> str:
    """The run file as its owner would write it."""
    top = {"name": run_file.name, "seed": run_file.seed}
    lines = _toml_lines(top)
    for name in _SECTIONS:
        if (section := getattr(run_file, name)) is not None:
            lines += ["", f"[{name}]", *_toml_lines(asdict(section))]
    for override in run_file.override:
        lines += ["", "[[override]]", *_toml_lines(asdict(override))]
    return "\n".join(lines) + "\n"


def _toml_lines(values: Mapping[str, object]) -> list[str]:
    """Strings, numbers, booleans and lists of them are the same in TOML and JSON; None and empty tables are no line."""
    return [f"{key} = {_toml_value(value)}" for key, value in values.items() if value is not None and value != {}]


def _toml_value(value: object) -> str:
    if not isinstance(value, Mapping):
        return json.dumps(value)
    table = cast(Mapping[str, object], value)
    return f"{{ {', '.join(_toml_lines({json.dumps(key): one for key, one in table.items()}))} }}"


def _client(number: int, calm: bool) -> ClientPlan:
    role = Role.ORDINARY
    if not calm and number > 9:
        role = Role.VICTIM if number == 10 else Role.SLOW
    wait_s = SLOW_WAIT_S if role is Role.SLOW else ORDINARY_WAIT_S
    return ClientPlan(f"{NAME_PREFIX}{number:02}", role, number - 1, wait_s)


def _run_file(seed: int, rounds: int, calm: bool, plain: bool) -> RunFile:
    window_s = WINDOW_S if plain else SECURE_WINDOW_S
    if calm:
        section = RoundsSection(rounds, N_CLIENTS, N_CLIENTS, over_selection=1.0, window_s=60.0)
    else:
        section = RoundsSection(rounds, target=10, minimum=MINIMUM, over_selection=1.2, window_s=window_s)
    override: tuple[Override, ...] = ()
    if not calm and rounds >= KILL_IN_TRAINING:
        last = min(KILL_IN_TRAINING + ROUNDS_DOWN, rounds)
        override = (Override(KILL_IN_TRAINING, last, target=N_CLIENTS, over_selection=1.0),)
    training = TrainingSection(local_epochs=LOCAL_EPOCHS, batch_size=BATCH_SIZE, learning_rate=LEARNING_RATE)
    return RunFile(
        RUN,
        section,
        seed,
        training,
        override=override,
        codec=CodecSection("integer"),
        downlink=DownlinkSection("change"),
        retention=RetentionSection(updates="1 round" if plain else "none"),
        secure_aggregation=None if plain else _masked(calm),
    )


def _masked(calm: bool) -> SecureAggregationSection:
    """Without slow clients, the default applies: all of the work or nothing."""
    return SecureAggregationSection(metrics=("loss",), evaluation=(), minimum_work=None if calm else MINIMUM_WORK)
