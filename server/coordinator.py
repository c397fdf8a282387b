"""The runs of this coordinator, and what devices ask of them. Requests come in parsed and verified."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from sqlalchemy.exc import IntegrityError

from umbel.aggregation.advance import advance
from umbel.aggregation.audit import SignedReport
from umbel.aggregation.layout import Layout
from umbel.aggregation.messages import (
    AssignmentState,
    AssignmentStatus,
    CheckedIn,
    CheckIn,
    ReportAnswer,
    RunStatus,
)
from umbel.aggregation.records import RunView
from umbel.aggregation.round import Abandoned, Answer, Closing, Committed, Declined, Recruiting, Reported, Training
from umbel.aggregation.runfile import RunFile
from umbel.aggregation.types import Assignment, AssignmentId, ClientId, RunId, Work, derive_seed
from umbel.aggregation.weighting import Candidate
from umbel.aggregation.wire import Codec
from umbel.server import journal
from umbel.server.blobs import UnknownBlob
from umbel.server.database_outage import DatabaseAway
from umbel.server.driver import PROGRESS_BELL, RunDriver
from umbel.server.fitness import Unfit, unfit
from umbel.server.letters import Letter, PastAttempt
from umbel.server.model_files import first_master
from umbel.server.problems import Refused, shutting_down
from umbel.server.run_now import view_of
from umbel.server.services import Services
from umbel.server.shelf import hold
from umbel.server.stored import StoredAssignment
from umbel.server.version_store import BeingRemoved, creator_of
from umbel.server.waiter_store import Waiting
from umbel.server.waiting import Line

_log = logging.getLogger(__name__)
RETRY_AFTER_S = 1.0
FLUSH_S = 1.0
LOOK_S = 0.25
OVER_KEPT_S = 600.0
_GRACE_S = 2.0  # beyond what it was told, a client may take this long to come back and still counts as waiting


@dataclass(frozen=True, slots=True)
class Visit:
    """A check-in. `admit` must be awaited once, before it changes anything; `line` holds its request open."""

    client: ClientId
    message: CheckIn
    admit: Callable[[Waiting | None], Awaitable[None]]
    line: Callable[[], AbstractContextManager[Line]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an assignment belongs. `past`: None while it is of the newest attempt, which memory knows."""

    driver: RunDriver
    client: ClientId
    assignment: AssignmentId
    past: StoredAssignment | None = None

    @property
    def training(self) -> Training | None:
        """The round under way, if it still waits for this assignment."""
        is_current = self.driver.assignment_id(self.client) == self.assignment
        return self.driver.open_round(self.client) if is_current else None

    def require_open(self) -> Training:
        """Raise `Refused` unless the round still waits for an update of this assignment."""
        if (training := self.training) is None:
            raise Refused("assignment-closed", "the round no longer waits for this update; check in for the next one")
        if not training.plan.task.sends_updates:
            raise Refused("report-refused", "this assignment asks to measure the model: send an evaluation, no update")
        return training


class Coordinator:
    """Every run's driver, and the devices' side of them.

    Of a run that is over only its view is kept, `OVER_KEPT_S` after it was last asked for; then it is opened anew.
    """

    def __init__(self, services: Services) -> None:
        self.services = services
        self.drivers: dict[RunId, RunDriver] = {}
        self.is_closing = False
        self._over: dict[RunId, RunView] = {}
        self._opening = asyncio.Lock()
        self._heeding = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None

    # --- runs ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take up every stored run where it was, and drop updates that belong to no open round."""
        for name in await self.services.rounds.revisions():
            if driver := await self._open(name):
                await self._let_go_if_idle(driver)
        await self._heed_outage()
        await self.services.uptime.sign()
        self._looking = asyncio.create_task(self._keep_looking(), name="what other replicas do")

    async def close(self) -> None:
        self.hang_up()
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking
        for driver in self.drivers.values():
            await driver.close()
        await self.services.waiters.settle()

    def hang_up(self) -> None:
        """Answer every request that is held open: the coordinator is about to go."""
        self.is_closing = True
        for driver in self.drivers.values():
            driver.bells.ring_all()

    async def driver(self, run: RunId) -> RunDriver:
        """The driver of a run, which may have been created at another replica a moment ago."""
        if (driver := self.drivers.get(run)) is None and (run in self._over or not self.services.replicas.is_alone):
            driver = await self._open(run)
        if driver is None:
            raise Refused("unknown-run", f"there is no run named {run!r}; ask the coordinator's operator for its name")
        driver.asked_at = self.services.clock.now()
        return driver

    def views(self) -> tuple[RunView, ...]:
        """Every run at a glance, the oldest first."""
        views = self._over | {name: view_of(driver.live) for name, driver in self.drivers.items()}
        return tuple(sorted(views.values(), key=lambda view: (view.created_at, view.name)))

    async def create_run(self, file: RunFile, model_sha256: str) -> tuple[RunDriver, bool]:
        """The run of this file, and whether it is new. Raises `Refused` if another run has its name."""
        await self._heed_outage()  # nobody signs while there is no run to sign for
        is_new = False
        if (driver := await self._open(RunId(file.name))) is None:
            is_new = await self._add_run(file, model_sha256)
            driver = await self._open(RunId(file.name))
        assert driver is not None, "it was just stored, and runs are never deleted"
        if driver.run.file != file or driver.run.first_model_sha256 != model_sha256:
            raise Refused("run-exists", f"a run named {file.name!r} exists with another file or model")
        return driver, is_new

    async def _add_run(self, file: RunFile, model_sha256: str) -> bool:
        """Store a new run; False if another request was faster."""
        services, owner = self.services, creator_of(RunId(file.name), model_sha256)
        model = await services.models.model(model_sha256)
        if model is None:
            raise Refused("unknown-model", "no such model here; upload it first, to /v1/admin/models/{sha256}")
        layout = await self._layout(model.layout_digest)
        try:
            master = await asyncio.get_running_loop().run_in_executor(
                services.worker, first_master, services.blobs, model_sha256, layout
            )
            await hold(services, owner, {model_sha256, master})
        except (UnknownBlob, BeingRemoved) as error:
            raise Refused(
                "unknown-model", "this model was deleted with a run's old version; upload it again"
            ) from error
        now = services.clock.now()
        try:
            await services.rounds.add_run(file, model, master, Recruiting(file.first_plan(), since=now), now)
        except IntegrityError:
            await services.versions.release(owner)
            if await services.rounds.load(RunId(file.name)) is None:
                raise
            return False
        journal.run_created(file.name, file.rounds.count, model_sha256)
        return True

    async def _open(self, name: RunId) -> RunDriver | None:
        """A run's driver, made if it is not there yet; None if no such run is stored."""
        async with self._opening:
            if (known := self.drivers.get(name)) is not None:
                return known
            live = await self.services.rounds.load(name)
            if live is None:
                return None
            driver = RunDriver(self.services, live, await self._layout(live.run.model.layout_digest))
            await driver.start()
            self.drivers[name] = driver
            self._over.pop(name, None)
            return driver

    async def _let_go_if_idle(self, driver: RunDriver) -> None:
        """Keep only the view of a run that is over and that nobody has asked for lately: no run comes back to life."""
        async with self._opening:
            is_idle = self.services.clock.now() - driver.asked_at >= OVER_KEPT_S
            if driver.is_over and is_idle and self.drivers.get(driver.name) is driver:
                self._over[driver.name] = view_of(self.drivers.pop(driver.name).live)
                await driver.close()

    async def _layout(self, digest: str) -> Layout:
        layout = await self.services.models.layout(digest)
        assert layout is not None, "a model is stored with its layout"
        return layout

    # --- what other replicas do ---------------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        """See what other replicas have done, and store what has been counted here."""
        while True:
            try:
                await self._look()
            except DatabaseAway:
                pass  # told once, for all that asks
            except Exception:
                _log.exception("cannot see what other replicas do; trying again")
            await asyncio.sleep(FLUSH_S if self.services.replicas.is_alone else LOOK_S)

    async def _look(self) -> None:
        await self._heed_outage()
        if not all(driver.is_over for driver in self.drivers.values()):
            await self.services.uptime.sign()
        revisions: Mapping[RunId, int] = {}
        if not self.services.replicas.is_alone:
            for client in await self.services.registry.refresh(self.services.clock.now()):
                await self.release(ClientId(client))
            revisions = await self.services.rounds.revisions()
        for name in {**revisions, **self.drivers}:
            try:
                await self._look_at(name, revisions.get(name))
            except DatabaseAway:
                raise
            except Exception:  # one run's trouble is not the others'
                _log.exception("run %s: cannot see what other replicas do; trying again", name)

    async def _heed_outage(self) -> None:
        """Where nobody could take reports for a while, no round's window counts that."""
        if await self.services.uptime.outage() is None:
            return
        async with self._heeding:
            if (outage := await self.services.uptime.outage()) is None:
                return  # another request saw to it
            drivers = [one for one in self.drivers.values() if not one.is_over]
            if drivers:  # else there was nothing to sign for
                journal.was_away(outage.now - outage.since)
            for driver in drivers:
                try:
                    await driver.was_away(outage)
                except Exception:  # its next step begins with it
                    _log.exception("run %s: cannot see to its window", driver.name)
            await self.services.uptime.sign()

    async def _look_at(self, name: RunId, revision: int | None) -> None:
        driver = None if name in self._over else self.drivers.get(name) or await self._open(name)
        if driver is None:
            return
        if revision not in (None, driver.live.revision):
            await driver.catch_up()
        await driver.flush_downloads()
        if driver.is_over:
            await self._let_go_if_idle(driver)
        else:
            await driver.pacing.look()

    # --- what devices ask ---------------------------------------------------------------------------------------------

    async def check_in(self, visit: Visit) -> CheckedIn:
        """Wait for work. A client with an open assignment gets that one again, at once."""
        await self._heed_outage()
        driver = await self.driver(visit.message.run)
        if is_misfit := visit.message.layout_digest != driver.layout.digest:
            await visit.admit(None)  # to read a layout takes milliseconds, which no replay is worth
        sites = driver.run.file.coverage.sites
        if (found := await unfit(self.services, driver.layout, sites, visit.client, visit.message)) is not None:
            if not is_misfit:
                await visit.admit(None)
            await self._turn_away(driver, visit.client, found)
            raise found.refusal
        retry_after_s = RETRY_AFTER_S
        if driver.open_round(visit.client) is None and not driver.is_over:
            retry_after_s = await self._wait_for_work(driver, visit)
        else:
            await visit.admit(None)
        return self._checked_in(driver, visit.client, retry_after_s)

    async def _turn_away(self, driver: RunDriver, client: ClientId, found: Unfit) -> None:
        """Note for the operator who is refused, and why."""
        now, reason = self.services.clock.now(), str(found.refusal)
        if await self.services.turned_away.note(driver.name, client, reason, now, found.in_place_of):
            driver.bells.ring((PROGRESS_BELL,))

    async def status(self, client: ClientId, assignment: AssignmentId, wait_s: float, line: Line) -> AssignmentStatus:
        """Whether the round still wants this client's report; held open while it does."""
        place = await self.place(client, assignment)
        if place.training:
            await self._wait_for_close(place, wait_s, line)
        if (training := place.training) is not None:
            left_s = max(0.0, training.closes_at - self.services.clock.now())
            return AssignmentStatus(AssignmentState.OPEN, "the round waits for this report", left_s)
        return AssignmentStatus(AssignmentState.CLOSED, await self._why_closed(client, assignment), 0.0)

    async def report(
        self, client: ClientId, assignment: AssignmentId, work: Work, signed: SignedReport
    ) -> ReportAnswer:
        """Take a report. Answered when it is durable; the same report again gets the same answer."""
        place = await self.place(client, assignment)
        event = Reported(self.services.clock.now(), client, work)
        try:
            answer = await place.driver.submit(Letter(event, assignment, signed=signed))
        except PastAttempt:
            return await self._answer_past(client, assignment, event)
        assert answer is not None, "the machine answers every report"
        return answer

    async def decline(self, client: ClientId, assignment: AssignmentId, reason: str) -> None:
        """Note that a client will not report; too late is the same as nothing to note."""
        place = await self.place(client, assignment)
        if place.training:
            with suppress(PastAttempt):
                await place.driver.submit(Letter(Declined(self.services.clock.now(), client, reason), assignment))
        place.driver.wake()

    async def release(self, client: ClientId) -> None:
        """A client was revoked: no round waits for it or draws it any more, and what it holds open is answered.

        What it has reported stays: it counted when it came.
        """
        for driver in self.drivers.values():
            await driver.waiting.expel(client)
            if driver.open_round(client):
                declined = Declined(self.services.clock.now(), client, "the operator removed this client")
                with suppress(PastAttempt):
                    await driver.submit(Letter(declined, driver.assignment_id(client)))
            driver.bells.ring((client,))
            driver.wake()

    async def place(self, client: ClientId, assignment: AssignmentId) -> Place:
        """Where an assignment belongs. Raises `Refused` unless it is this client's."""
        self.services.registry.refuse_revoked(client)
        await self._heed_outage()
        driver = self.drivers.get(RunId(assignment.partition(".")[0]))
        if driver and driver.knows(client, assignment):
            return Place(driver, client, assignment)
        found = await self.services.rounds.assignment(assignment)
        if found is None or found.client != client:
            raise Refused("unknown-assignment", "this client has no such assignment; check in for a new one")
        driver = await self.driver(RunId(assignment.partition(".")[0]))
        if found.round_id >= driver.live.round_id:
            await driver.catch_up()  # another replica has begun this attempt
        if driver.knows(client, assignment):
            return Place(driver, client, assignment)
        return Place(driver, client, assignment, found)

    def counts_on(self, client: ClientId) -> bool:
        """Whether the coverage of a run that is not over names this client."""
        return any(client in it.run.file.coverage.sites for it in self.drivers.values() if not it.is_over)

    def refuse_if_closing(self) -> None:
        if self.is_closing:
            raise shutting_down()

    async def _wait_for_work(self, driver: RunDriver, visit: Visit) -> float:
        """Hold the request open while there is no work, or send the client away; when it should come back, if so."""
        client, wait_s = visit.client, visit.message.wait_s
        ends_at = self.services.clock.now() + wait_s
        known = await self.services.registry.client(client)
        candidate = Candidate(client, visit.message.sample_count, known.tier if known else "")
        away_s = driver.pacing.send_away_s(driver.state, driver.plan, client, wait_s)
        if away_s is not None:
            await driver.waiting.pass_by(candidate, visit.admit)
            return away_s
        waiter = await driver.waiting.enter(candidate, wait_s + RETRY_AFTER_S + _GRACE_S, visit.admit)
        driver.wake()
        with visit.line() as line:
            try:
                await self._hold(driver, client, line, ends_at)
            finally:
                away_s = driver.pacing.come_back_s(driver.state, driver.plan, client, RETRY_AFTER_S)
                is_back_soon = not line.is_gone and driver.open_round(client) is None and away_s <= RETRY_AFTER_S
                driver.waiting.leave(waiter, still_waits=is_back_soon)
                self._note_heard(client, line)
        return away_s

    async def _hold(self, driver: RunDriver, client: ClientId, line: Line, ends_at: float) -> None:
        """Keep a check-in waiting until there is work for it, the run is over, its time is up, or it has hung up."""
        clock = self.services.clock
        while (left_s := ends_at - clock.now()) > 0 and not line.is_gone:
            if driver.open_round(client) or driver.is_over:
                return
            self.refuse_if_closing()
            with driver.bells.listen(client) as bell:
                await line.hold(clock, bell, left_s)
            self.services.registry.refuse_revoked(client)

    async def _wait_for_close(self, place: Place, wait_s: float, line: Line) -> None:
        clock, ends_at = self.services.clock, self.services.clock.now() + wait_s
        while place.training and (left_s := ends_at - clock.now()) > 0 and not line.is_gone:
            self.refuse_if_closing()
            with place.driver.bells.listen(place.client) as bell:
                await line.hold(clock, bell, left_s)
        self._note_heard(place.client, line)

    def _note_heard(self, client: ClientId, line: Line) -> None:
        if not line.is_gone:
            self.services.heard.note(client)

    def _checked_in(self, driver: RunDriver, client: ClientId, retry_after_s: float) -> CheckedIn:
        training = driver.open_round(client)
        if training is not None:
            return CheckedIn(RunStatus.RUNNING, "work", 0.0, self._assignment(driver, client, training))
        if driver.is_over:
            return CheckedIn(driver.run.status, driver.run.reason, 0.0)
        if driver.is_paused:
            return CheckedIn(RunStatus.PAUSED, f"the run is paused: {driver.run.reason}", retry_after_s)
        why = driver.state.why if isinstance(driver.state, Recruiting) else "a round without this client is under way"
        return CheckedIn(RunStatus.RUNNING, why, retry_after_s)

    def _assignment(self, driver: RunDriver, client: ClientId, training: Training) -> Assignment:
        """The assignment is made from the stored state whenever it is asked for, so a repeat cannot differ.

        Its seed leaves the attempt out: a round that had to be tried again trains as it would have the first time.
        """
        plan = training.plan
        return Assignment(
            id=driver.assignment_id(client),
            run=plan.run,
            round=plan.number,
            attempt=plan.attempt,
            model=driver.run.model,
            training=driver.run.file.training_plan(plan.number),
            codec=Codec.FLOAT32,
            grid=plan.grid,
            sample_count_max=plan.sample_count_max,
            seed=derive_seed(plan.seed, "client", plan.number, client),
            window_s=max(0.0, training.closes_at - self.services.clock.now()),
            task=plan.task,
            share=driver.run.file.share_of(plan.task),
        )

    async def _answer_past(self, client: ClientId, assignment: AssignmentId, event: Reported) -> ReportAnswer:
        """What a report is told after its attempt has ended: what it was told before, or what the machine says."""
        past = await self.services.rounds.assignment(assignment)
        assert past is not None, "assignments are never deleted"
        if past.answer is not None:
            return past.answer
        _, commands = advance(await self.services.rounds.round_state(past.round_id), event)
        answer = next(command for command in commands if isinstance(command, Answer))
        return ReportAnswer(answer.outcome, answer.reason)

    async def _why_closed(self, client: ClientId, assignment: AssignmentId) -> str:
        place = await self.place(client, assignment)
        state = await self.services.rounds.round_state(place.past.round_id) if place.past else place.driver.state
        match state:
            case Recruiting() | Training():
                return "this client has reported or declined, or the window is over"
            case Closing() | Abandoned():
                return state.reason
            case Committed():
                return state.closing.reason
