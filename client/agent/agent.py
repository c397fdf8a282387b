"""The life of an agent: one process, one identity, and a process for each run that the site takes part in.

```
the coordinator's open runs     the policy            decisions of a person
      (listing.py)          (policy_file.py)             (decisions.py)
            +----------------------+---------------------------+
                                   v
                verdict on each run, twice a second (verdict.py)
                                   v
        allowed: a process (process.py, child.py)      otherwise: it is asked to leave
                                   v
           what it notes (notes.py) -> the board (board.py), for `umbel site runs`

why the site does not come to an open run (absences.py) -> the coordinator, for `umbel run show`
```

The agent holds the state directory's lock, so no `umbel join` shares its identity. The processes of its runs share the
key and the record of earlier sums, and each has the lock of its run's own directory.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from umbel.aggregation.messages import OpenRun
from umbel.aggregation.types import RunId
from umbel.client.agent.absences import AbsenceTeller
from umbel.client.agent.apps import AppRule, app_of
from umbel.client.agent.board import BoardFile, RunsBoard
from umbel.client.agent.decisions import DecisionStore, SiteDecision
from umbel.client.agent.listing import RunsWatch
from umbel.client.agent.order import ChildOrder
from umbel.client.agent.policy_file import InForce, PolicyFile
from umbel.client.agent.site_commands import SiteCommands
from umbel.client.agent.site_run import SupervisedRun, clear
from umbel.client.agent.verdict import Stand, Verdict, undecided, verdict
from umbel.client.agent.verdict_log import VerdictLog
from umbel.client.errors import ClientError, StateError
from umbel.client.policy.decided import DecidedTerms
from umbel.client.rounds.shutdown import Interrupted, Shutdown
from umbel.client.state.enrol import ensure_enrolled, identify
from umbel.client.state.home import Home
from umbel.client.state.state_dir import locked, work_dir
from umbel.client.user_code import require_app_module
from umbel.client.wire.addresses import addresses_in, warn_if_readable
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.transport import Patience, Transport, connect

LOOK_S = 0.5
_LEAVING_LOOK_S = 0.1
AT_ONCE_MAX = 256
PROCESSES_MAX = 64  # each needs the memory of Python and torch, and the coordinator chooses how many runs it lists
ENDED_SHOWN_MAX = 20
_LAST_WAIT_S = 10.0  # for processes that were told to leave at once
NO_ROOM = f"it waits until one of {PROCESSES_MAX} other runs is over; deny runs that you do not need"
NO_ROOM_PUBLIC = f"the site takes part in {PROCESSES_MAX} other runs, and cannot take part in more at once"
TROUBLE_PUBLIC = "the site's policy file is not valid, and until it is, the site takes part in no run"
_BESIDE = "end the other process first: an agent and umbel join cannot use one state directory at the same time"
log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What an operator of a site tells its agent.

    Args:
        server: the coordinator's address, or those of its replicas, `URL[,URL...]`.
        state_dir: the site's own directory, for its key, its decisions and its unsent work.
        apps: which code trains in which run; the first rule that names the run counts.
        policy: the file of the site's policy; None: a person confirms each run.
        at_once: how many runs may train at the same time.
    """

    server: str
    state_dir: Path
    apps: tuple[AppRule, ...]
    policy: Path | None = None
    at_once: int = 2

    def __post_init__(self) -> None:
        if not self.apps:
            raise ValueError("an agent needs the site's code: pass --app at least once")
        if not 1 <= self.at_once <= AT_ONCE_MAX:
            raise ValueError(f"--at-once must lie between 1 and {AT_ONCE_MAX}, not {self.at_once}")


@dataclass(frozen=True, slots=True)
class FirstStart:
    """What the first start of a client tells its coordinator; later starts need none of it."""

    token: str | None = None
    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


def run_agent(
    options: AgentOptions,
    enrolling: FirstStart | None = None,
    *,
    shutdown: Shutdown | None = None,
    transport: httpx.BaseTransport | None = None,
) -> str:
    """Take part in the runs that the site allows until the agent is asked to leave; returns why.

    Raises `ClientError`, such as `AccessRefused` once the operator has removed this client, or, before it enrols,
    `AppError` if the module of an app does not exist; `ValueError` for a policy that is not valid at the start;
    `OSError`.

    Args:
        options: how the site takes part.
        enrolling: for the first start.
        shutdown: asks the agent to leave; SIGINT and SIGTERM do so too.
        transport: for tests and proxies.
    """
    enrolling, shutdown = enrolling or FirstStart(), shutdown or Shutdown()
    for rule in options.apps:
        require_app_module(rule.spec)
    replicas = connect(options.server, transport)
    warn_if_readable(addresses_in(options.server), "models and updates")
    with replicas, locked(options.state_dir, _BESIDE), shutdown.on_signals():
        home = Home(options.state_dir, options.server)
        identity = identify(home, enrolling.name, enrolling.token)
        coordinator = CoordinatorClient(Transport(replicas, identity.authorize))
        agent = Agent(options, home, identity.name, coordinator)
        try:
            agent.require_valid_policy()
            with shutdown.interruptible():
                patience = Patience(wait=shutdown.wait)
                ensure_enrolled(coordinator, home, identity, enrolling.token, enrolling.labels, patience)
            agent.live(shutdown)
        except Interrupted as interruption:
            agent.end()
            return str(interruption)
        raise AssertionError("an agent only ends when it is asked to, or with an error")


class Agent:
    """One site's agent. Only the thread that made it may call it. `watch`: knows the open runs."""

    def __init__(self, options: AgentOptions, home: Home, client: str, coordinator: CoordinatorClient) -> None:
        self._options = options
        self._home = home
        self._client = client
        self._commands = SiteCommands.of(options.state_dir)
        self._policy = PolicyFile(options.policy, options.state_dir)
        self._decisions = DecisionStore(home.path)
        self._board = BoardFile(home.path)
        self.watch = RunsWatch(coordinator)
        self._absences = AbsenceTeller(coordinator)
        self._runs: dict[RunId, SupervisedRun] = {}
        self._verdict_log = VerdictLog(self._commands)
        self._has_listing = False
        self._n_free = 0  # how many more processes may be started at this look

    def require_valid_policy(self) -> None:
        """Raise `ValueError` for a policy that is not valid: at the start a person is there to mend it."""
        if trouble := self._policy.look().trouble:
            raise ValueError(trouble)

    def live(self, shutdown: Shutdown) -> None:
        """Look at everything about twice a second. Raises `Interrupted` when asked to leave, or a `ClientError`."""
        self.watch.start()
        self._absences.start()
        log.info("%s: looking for open runs at %s", self._client, self._home.server_url)
        try:
            while True:
                self.look(time.monotonic())
                if self.watch.failed is not None:
                    raise self.watch.failed
                with shutdown.interruptible():
                    shutdown.wait(LOOK_S)
        except ClientError:
            self.end()
            raise

    def look(self, now: float) -> None:
        """Judge every run, and start, keep or end its process. `now`: on the monotonic clock."""
        in_force, listed = self._policy.look(), self.watch.runs
        self._verdict_log.begin(now)
        if listed is not None:
            self._take_up(listed)
        self._n_free = PROCESSES_MAX - len(self._alive())
        for name, known in self._runs.items():
            run = None if listed is None else listed.get(name)
            if run is None:
                known.unlist(now)
                self._judge_unlisted(known, in_force)
                known.follow(None, now)
            else:
                known.follow(self._judge(known, run, in_force), now)
        self._verdict_log.end()
        self._forget_old()
        self._absences.take({name: why for name, one in self._runs.items() if (why := one.absence()) is not None})
        self._show(in_force)

    def end(self) -> None:
        """Ask every process to leave, and wait until it has. A second signal makes them leave at once."""
        self.watch.stop()
        self._absences.stop()
        try:
            self._wait_for_all()
        except Interrupted:
            for one in self._runs.values():
                one.interrupt()
            self._wait_for_last()
        self._show(self._policy.look())
        self._board.hide()

    # --- the runs ---

    def _take_up(self, listed: Mapping[RunId, OpenRun]) -> None:
        """Know the new runs of the list, and at the first list clear what runs have left that are over."""
        for name, run in listed.items():
            if name not in self._runs:
                work = work_dir(self._home.path, name)
                self._runs[name] = SupervisedRun(run, work, self._commands, self._verdict_log)
        if not self._has_listing:
            self._has_listing = True
            for left in sorted((self._home.path / "runs").glob("*")):
                if left.name not in listed:
                    clear(left)

    def _judge(self, known: SupervisedRun, run: OpenRun, in_force: InForce) -> ChildOrder | None:
        """The order for the run's process; None if the site takes no part."""
        decision, app = self._decision(run.name), app_of(run.name, self._options.apps)
        found = self._verdict(run, in_force, decision, app)
        starts = found.stand is Stand.ALLOWED and not (known.is_alive or known.is_over)
        if has_room := not starts or self._n_free > 0:
            self._n_free -= starts
        else:
            found = Verdict(Stand.ALLOWED, NO_ROOM, NO_ROOM_PUBLIC, may_change=True)
        known.judge(run, found, None if isinstance(decision, StateError) else decision, app)
        if found.stand is not Stand.ALLOWED or app is None or not has_room:
            return None
        options = self._options
        return ChildOrder(
            options.server,
            options.state_dir.absolute(),
            run.name,
            app,
            in_force.policy,
            DecidedTerms.of(run),
            options.at_once,
        )

    def _judge_unlisted(self, known: SupervisedRun, in_force: InForce) -> None:
        """A denial, or a stricter policy, also counts for a process that only has to leave: nothing more is sent."""
        if known.is_alive:
            decision, app = self._decision(known.name), app_of(known.name, self._options.apps)
            known.take_verdict(self._verdict(known.run, in_force, decision, app))

    def _verdict(
        self, run: OpenRun, in_force: InForce, decision: SiteDecision | StateError | None, app: str | None
    ) -> Verdict:
        if in_force.trouble:
            return Verdict(Stand.REFUSED, in_force.trouble, TROUBLE_PUBLIC, may_change=True)
        if isinstance(decision, StateError):
            return Verdict(Stand.ASKED, str(decision), undecided(run), may_change=True)
        is_of_members = bool(in_force.list_sha256) and run.members_sha256 == in_force.list_sha256
        return verdict(
            run, in_force.policy, is_of_members=is_of_members, decision=decision, app=app, commands=self._commands
        )

    def _decision(self, name: RunId) -> SiteDecision | StateError | None:
        try:
            return self._decisions.of(name)
        except StateError as error:
            return error

    def _forget_old(self) -> None:
        """Show only the newest of the runs that are over."""
        over = [name for name, one in self._runs.items() if one.is_over and name not in (self.watch.runs or {})]
        for name in over[:-ENDED_SHOWN_MAX]:
            del self._runs[name]
            if (left := work_dir(self._home.path, name)).exists():  # of a process that was told to leave before the end
                clear(left)

    def _show(self, in_force: InForce) -> None:
        trouble = in_force.trouble
        if not trouble and self.watch.runs is None:
            trouble = "the coordinator has not answered yet"
        runs = tuple(self._runs[name].shown() for name in sorted(self._runs))
        self._board.show(RunsBoard(self._client, self._home.server_url, self._options.at_once, runs, trouble))

    # --- the end ---

    def _wait_for_all(self) -> None:
        """Wait without a limit: in a secure round others may need this site's shares. Raises `Interrupted`."""
        while self._alive():
            self._leave_all()
            time.sleep(_LEAVING_LOOK_S)  # a second signal raises `Interrupted` here

    def _wait_for_last(self) -> None:
        until = time.monotonic() + _LAST_WAIT_S
        while self._alive() and time.monotonic() < until:
            self._leave_all()
            time.sleep(_LEAVING_LOOK_S)
        for one in self._runs.values():
            one.kill()

    def _leave_all(self) -> None:
        in_force = self._policy.look()
        for one in self._runs.values():
            one.leave()
            self._judge_unlisted(one, in_force)
            one.follow(None, time.monotonic())

    def _alive(self) -> Sequence[SupervisedRun]:
        return [one for one in self._runs.values() if one.is_alive]
