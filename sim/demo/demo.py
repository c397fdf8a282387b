"""`umbel demo`: the whole system on one machine, with real processes, real HTTP and real data.

This file is the order of events. `plan.py` says what is asked of which client; `sites.py` runs the client processes
and lists their keys, `kills.py` kills and restarts; `board.py` shows the progress.
"""

import contextlib
import tempfile
import threading
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter
from rich.console import Console
from rich.live import Live

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.trust.members import SignedMembers, members_bytes
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.client import Operator
from umbel.client.operator import audit
from umbel.client.operator.replay import ReplaySource, replay
from umbel.sim.data.data_set import Score, score
from umbel.sim.demo.baselines import Baselines
from umbel.sim.demo.board import Board, DemoRound, Proof, View
from umbel.sim.demo.digits import DemoData, build_model, load_data
from umbel.sim.demo.kills import VictimClient, VictimCoordinator
from umbel.sim.demo.plan import RUN, SPLIT, DemoPlan, pace_of, run_toml
from umbel.sim.demo.plot import draw_curves
from umbel.sim.demo.sites import SiteProcesses, agree, pin, write_shards
from umbel.sim.demo.summary import DemoSummary, round_line, summarize
from umbel.sim.processes import Child, start, stopping, wait_until

START_LIMIT_S = 90.0
SECONDS_PER_ROUND_MAX = 12.0
PROGRESS_WAIT_S = 0.3
PATIENCE_S = 10.0  # with connections that a killed coordinator left behind
_BASELINES = TypeAdapter(Baselines)


class DemoFailed(Exception):
    """The demo could not continue; the message says why."""


@dataclass(slots=True)
class DemoRun:
    """The demo's directories, processes and facts."""

    plan: DemoPlan
    data: DemoData
    out: Path
    work: Path
    board: Board
    children: list[Child]
    sites: SiteProcesses
    deadline: float
    judges: Child | None = None

    def check(self) -> None:
        """Raise if a process has died or time is up."""
        for child in (*self.sites.running, *([self.judges] if self.judges else [])):
            child.require_alive(may_finish=True)
        if time.monotonic() > self.deadline:
            raise DemoFailed(
                f"the demo took too long (stage: {self.board.stage}); stop other programs, and run it again"
            )


def run_demo(plan: DemoPlan, out: Path, console: Console, *, keep: bool) -> DemoSummary:
    """Run the demo; `out` gets `rounds.jsonl` and `curves.png`.

    Raises `DemoFailed`, `ReportLost`, `AuditFailed`, `ChildDied`, `ClientError`.
    """
    torch.set_num_threads(1)  # the clients need the cores
    out.mkdir(parents=True, exist_ok=True)
    data = load_data(SPLIT, plan.seed)
    with _workspace(out, keep) as work, _shown(console) as view:
        view.board = board = Board(plan, view.tell)
        with stopping([]) as children:
            sites = SiteProcesses(plan, work / "sites", children)
            limit_s = START_LIMIT_S + plan.run_file.rounds.count * SECONDS_PER_ROUND_MAX
            demo = DemoRun(plan, data, out, work, board, children, sites, board.started + limit_s)
            _play(demo)
    draw_curves(out / "curves.png", board, data.class_counts)
    return summarize(board, board.elapsed_s)


def _play(demo: DemoRun) -> None:
    """Start everything, train, and wait for the baselines."""
    board, plan = demo.board, demo.plan
    n_processes = len(plan.processes)
    board.say_stage(f"starting a coordinator and {len(plan.clients)} clients in {n_processes} processes")
    write_shards(plan, demo.data, demo.work / "sites")
    demo.sites.start_all()
    coordinator = VictimCoordinator(demo.work / "coordinator", plan, board, demo.children, START_LIMIT_S)
    with Operator(coordinator.now.url, coordinator.now.admin_key) as operator:
        names = [client.name for client in plan.clients]
        tokens = operator.create_tokens(len(names))
        demo.sites.introduce(coordinator.now.url, dict(zip(names, tokens, strict=True)))
        wait_until(lambda: demo.sites.all_ready, demo.children, START_LIMIT_S, "the client processes to be ready")
        _begin(demo, operator)
        _start_baselines(demo)
        key = operator.audit_key()  # known before the run, to check the later account
        _follow(demo, operator, coordinator)
        board.say_stage("checking the signed audit bundle of every round")
        board.note_proof(prove(operator, RUN, key, coordinator.noted_heads))
    board.say_stage("training the same model on pooled data, and on each client's data alone")
    while not _is_measured(board):
        demo.check()
        time.sleep(0.05)


def _begin(demo: DemoRun, operator: Operator) -> None:
    """Create the run with a window for this machine, and start it once every client has enrolled."""
    pace = pace_of(demo.sites.rehearsals_s)
    plan = demo.plan.at_pace(pace)
    list_text = None
    if secure := plan.run_file.secure:
        members = _pin_members(demo, secure.minimum_work)
        plan, list_text = plan.bound_to(members.list.sha256), members_bytes(members).decode()
    demo.board.say_stage("every client enrols with a key of its own")
    if pace > 1:
        demo.board.tell(f"this machine is slow or busy: reporting windows are {pace:g} times as long")
    sha256 = operator.upload_model(encode_model(build_model(plan.seed).state_dict()))
    operator.create_run(RUN, run_toml(plan.run_file), sha256, list_text)
    operator.pause_run(RUN, "the clients are enrolling")
    demo.sites.go(pace)
    n_clients = len(plan.clients)
    wait_until(lambda: len(operator.clients()) == n_clients, demo.children, START_LIMIT_S, "the clients to enrol")
    operator.resume_run(RUN)


def _pin_members(demo: DemoRun, minimum_work: float | None) -> SignedMembers:
    """Officers list the keys from the clinics' processes, and every clinic pins the list."""
    signed = agree(demo.work / "officers", demo.sites.public_keys)
    for client in demo.plan.clients:
        pin(signed, demo.work / "sites" / client.name, minimum_work)
    demo.board.note_members(signed.list.sha256)
    return signed


def _is_measured(board: Board) -> bool:
    return board.baselines is not None and bool(board.baselines.alone)


def _follow(demo: DemoRun, operator: Operator, coordinator: VictimCoordinator) -> None:
    """Watch the run until it is over: score each model, kill and restart."""
    judge = _Judge(operator, demo.work / "model.safetensors", demo.data)
    victim = VictimClient(demo.plan, demo.sites, demo.board)
    with (demo.out / "rounds.jsonl").open("w") as file:
        for progress in operator.follow(RUN, PROGRESS_WAIT_S, PATIENCE_S):
            demo.board.run, demo.board.live = progress.run, progress.live
            for record in progress.ended:
                ended = DemoRound(record, judge.score(record))
                file.write(round_line(ended) + "\n")
                demo.board.add(ended)
                coordinator.check(record)
            victim.tend()
            coordinator.tend(progress)
            demo.check()
    demo.board.live = None
    end = operator.run(RUN)
    if end.status is not RunStatus.FINISHED:
        raise DemoFailed(f"the run ended as {end.status.value}: {end.reason}")


class _Judge:
    """Scores committed models on the demo's held-out test set."""

    def __init__(self, operator: Operator, path: Path, data: DemoData) -> None:
        self._operator, self._path, self._data = operator, path, data
        self._model = build_model(0)

    def score(self, record: RoundRecord) -> Score | None:
        if record.model_sha256 is None:
            return None
        self._operator.download_model(record.model_sha256, self._path)
        _, state = decode_model(self._path.read_bytes())
        self._model.load_state_dict(state)
        return score(self._model, self._data.test)


def _start_baselines(demo: DemoRun) -> None:
    """In a process of low priority, because rounds leave the machine idle much of the time."""
    seed, rounds = demo.plan.seed, demo.plan.run_file.rounds.count
    argv = ["-m", "umbel.sim.demo.baselines", str(seed), str(rounds)]
    demo.judges = start("the process of the baselines", argv, demo.work / "baselines.log")
    demo.children.append(demo.judges)
    threading.Thread(target=_hear_baselines, args=(demo, demo.judges), name="baselines", daemon=True).start()


def _hear_baselines(demo: DemoRun, child: Child) -> None:
    for line in child.stdout:
        demo.board.baselines = _BASELINES.validate_json(line)


def prove(operator: Operator, run: str, key: str, heads: Iterable[str]) -> Proof:
    """Verify the coordinator's signed account of a run, and replay its last round if the updates are stored.

    It is the code of `umbel run audit` and `umbel run replay`.

    `key`: the audit key as it was told before the run; `heads`: noted on the way, the chain must hold them. Raises
    `AuditFailed` for what does not fit.
    """
    newest = operator.run(run).audit_head
    auditor, lines = audit.verify(audit.download(operator, run), [public_key_bytes(key)])
    for head in (*heads, newest):
        auditor.require_head(head)
    number = max(auditor.rounds)
    bundle, ended = auditor.rounds[number]
    assert auditor.created is not None, "the chain begins with the run's creation"
    if ended.plan.secure is not None:
        return Proof(len(lines), number, "")
    made = replay(ReplaySource(operator, run, bundle), ended, auditor.created, lambda _said: None)
    return Proof(len(lines), number, made.sha256)


@contextlib.contextmanager
def _workspace(out: Path, keep: bool) -> Generator[Path]:
    """The folder of the coordinator's and the clients' files; with `keep`, one in `out` that stays."""
    if keep:
        yield Path(tempfile.mkdtemp(prefix="work-", dir=out))
        return
    with tempfile.TemporaryDirectory(prefix="umbel-demo-") as work:
        yield Path(work)


@contextlib.contextmanager
def _shown(console: Console) -> Generator[View]:
    """A live view on a terminal; elsewhere one line for each event."""
    if not console.is_terminal:
        yield View(console)
        return
    view = View()
    with Live(view, console=console, refresh_per_second=8):
        yield view
