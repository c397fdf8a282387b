"""The life of a client, on one page: ask for work, fetch the model, train, send, report, and ask again.

```
          enrol once
              |
              v        no work: wait as told
   +-----> check in <---------------------------+
   |          | assignment                      |
   |          v                                 |
   |    fetch the model                         |
   |          v                                 |
   |    evaluate, train ---- round closed ------+
   |          v                                 |
   |    update and report on disk               |
   |          v                                 |
   |    upload, report ----- round closed ------+
   |          v
   +---- forget the update
```

A client that is killed goes on at its next start: the coordinator hands out the same assignment again, and training
goes on from its checkpoint; once update and report are on disk, they are sent. A coordinator that is away is asked
again, for ever: an update that could not be sent in its window is kept until the coordinator says that it is too late.

In a secure round, keys are exchanged beside the training, and after the report the sum is opened (`secure_round.py`);
what a killed client had begun there is lost, and it goes on with the next attempt.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from umbel.aggregation.codec.kernels.native import NoKernels, chosen
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.messages import (
    LAYOUT_CHARS_MAX,
    CheckedIn,
    CheckIn,
    Outcome,
    RunStatus,
)
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.secagg.turns import ASKED_SHARE, after_s
from umbel.aggregation.types import ClientId, RunId
from umbel.client.app import Checkpoint, Client, LocalPlan
from umbel.client.errors import (
    AccessRefused,
    Alarm,
    AssignmentClosed,
    AttemptRefused,
    ClientError,
    CoordinatorBusy,
    CoordinatorMisbehaved,
    CoordinatorRefused,
    OutOfTime,
    StateError,
    TooLittleDone,
    TrainingFailed,
    UnfitWork,
    WorkRefused,
)
from umbel.client.policy.policy import SitePolicy
from umbel.client.policy.site import SecureRandom, Site
from umbel.client.rounds.delivery import Delivery
from umbel.client.rounds.measure import measure
from umbel.client.rounds.offers import check_able, check_layout, check_offer
from umbel.client.rounds.refusals import decline
from umbel.client.rounds.secure import SecureRound
from umbel.client.rounds.secure_keys import KeyExchange
from umbel.client.rounds.secure_offers import check_window, read_offer
from umbel.client.rounds.shutdown import Interrupted, Shutdown
from umbel.client.rounds.told import name_of, warn_if_too_slow
from umbel.client.rounds.watch import Watch
from umbel.client.rounds.work import Trained, asked_of_site, save_work, train
from umbel.client.state.enrol import ensure_enrolled, identify
from umbel.client.state.failures import FAILURES_MAX
from umbel.client.state.identity import Identity
from umbel.client.state.state_dir import locked
from umbel.client.state.store import PendingReport, Store
from umbel.client.wire.addresses import addresses_in, warn_if_readable
from umbel.client.wire.backoff import CLOSED_BACKOFF, DECLINED_BACKOFF, RETRY_AFTER_MAX_S
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.fetch import Wanted, fetch_model
from umbel.client.wire.redirect import Links
from umbel.client.wire.timing import Timing, within
from umbel.client.wire.transport import Patience, Transport, connect, patiently

# The least time between two questions, whatever the coordinator says: a check-in that is held open costs nothing more,
# one that is answered at once must not become a flood.
_IDLE_PAUSE_S = 0.05
_OUT_OF_TIME_PAUSE_S = 1.0
log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Why a client left. `status`: the run's, or `interrupted`. `reports`, `accepted`, `masked`, `opened`: how many of
    them, as `Delivery` counts them.
    """

    client: str
    run: str
    status: str
    reason: str
    reports: int
    accepted: int
    masked: int
    opened: int

    @property
    def reports_in_words(self) -> str:
        """What is known of them, and no more: a client is not told which rounds were abandoned in the end."""
        if self.masked:
            return f"masked reports: {self.masked} sent, {self.opened} in sums that this client gave its shares for"
        return f"reports: {self.reports} sent, {self.accepted} accepted when they came"


def run_client(
    app: Client,
    server: str,
    state_dir: Path | str,
    run: str,
    token: str | None = None,
    name: str | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    policy: SitePolicy | None = None,
    shutdown: Shutdown | None = None,
    transport: httpx.BaseTransport | None = None,
    secure_random: SecureRandom | None = None,
) -> RunEnd:
    """Take part in `run` until it ends or this client is told to leave.

    `server`: the coordinator's address, or those of its replicas, `URL[,URL...]`; one that does not answer is left for
    the next. `token`: needed until the client has enrolled once. `name`: how the client is known; by default made from
    the host's name. `labels`: facts about this site, told at its enrolment, such as `{"tier": "hospital"}`.
    `policy`: what this site allows, whatever it is asked. `transport`: for tests and proxies. `secure_random`: what
    this site draws in a secure round, for tests that repeat one; anywhere else the default alone is safe.
    Raises `ClientError`; `ValueError` for unusable arguments, and `OSError`, or `MembersRefused`, for the policy's
    member list.
    """
    state_dir, shutdown = Path(state_dir), shutdown or Shutdown()
    try:
        chosen()  # kernels that are asked for and not there: said now, not after the first training
    except NoKernels as error:
        raise ValueError(str(error)) from error
    replicas = connect(server, transport)
    warn_if_readable(addresses_in(server), "models and updates")
    with replicas, locked(state_dir), shutdown.on_signals():
        store = Store(state_dir, server)
        identity = identify(store, name, token)
        coordinator = CoordinatorClient(Transport(replicas, identity.authorize))
        site = Site(RunId(run), identity, policy, state_dir, store.secure, secure_random)
        participant = ClientLoop(app, coordinator, store, RunId(run), identity, site, shutdown)
        try:
            with shutdown.interruptible():
                ensure_enrolled(coordinator, store, identity, token, labels or {}, Patience(wait=shutdown.wait))
            return participant.take_part()
        except Interrupted as interruption:
            return participant.end("interrupted", str(interruption))


class ClientLoop:
    """One enrolled client in one run. Only the main loop's thread may call it."""

    def __init__(
        self,
        app: Client,
        coordinator: CoordinatorClient,
        store: Store,
        run: RunId,
        identity: Identity,
        site: Site,
        shutdown: Shutdown,
    ) -> None:
        self._app = app
        self._coordinator = coordinator
        self._store = store
        self._run = run
        self._client = ClientId(identity.name)
        self._site = site
        self._shutdown = shutdown
        self._layout = Layout.of_state(app.model.state_dict())
        self._delivery = Delivery(coordinator, store)
        self._links = Links(site.policy.link_rules)
        self._failures = 0
        self._declines = 0
        self._closings = 0  # in a row
        self._has_checked_in = False
        self._told_count = 0  # of samples, until the run needs it
        self._waits_in: RunStatus | None = None

    def take_part(self) -> RunEnd:
        """Until the run is over. Raises `Interrupted` when told to leave, `ClientError` when it cannot go on."""
        self._store.failures.check(self._run)
        self._settle_pending()
        log.info("%s: asking for work in run %s", self._client, self._run)
        while True:
            answer = self._check_in()
            if answer.run_status.is_over:
                return self.end(answer.run_status.value, answer.reason)
            self._tell_of_waiting(answer)
            if answer.assignment is None:
                self._pause(answer.retry_after_s)
            else:
                self._survive(answer.assignment)

    def _tell_of_waiting(self, answer: CheckedIn) -> None:
        """Once, when there is no work, or a run is paused or goes on: a silent log would look like a dead client."""
        status = answer.run_status if answer.assignment is None else None
        if status is not None and status is not self._waits_in:
            log.info("no work yet, %s; waiting", answer.reason or "the coordinator does not say why")
        self._waits_in = status

    def end(self, status: str, reason: str) -> RunEnd:
        sent = self._delivery
        return RunEnd(self._client, self._run, status, reason, sent.reports, sent.accepted, sent.masked, sent.opened)

    def _check_in(self) -> CheckedIn:
        with self._shutdown.interruptible():
            answer = patiently(self._try_check_in, Patience(wait=self._shutdown.wait))
        self._has_checked_in = True
        return answer

    def _try_check_in(self) -> CheckedIn:
        """A run that was there comes back: its coordinator is being restored. One that never was has a wrong name."""
        message = CheckIn(self._run, self._told_count, self._layout.digest)
        try:
            return self._coordinator.check_in(message)
        except CoordinatorRefused as error:
            if error.kind == "wrong-layout":
                raise self._with_difference(message, error) from error
            if error.kind == "unknown-run" and self._has_checked_in:
                raise CoordinatorBusy(f"the coordinator has forgotten the run: {error.detail}") from error
            if error.kind == "sample-count-needed" and not self._told_count:
                self._told_count = self._count_to_tell()
                return self._coordinator.check_in(replace(message, sample_count=self._told_count))
            raise

    def _count_to_tell(self) -> int:
        if not self._site.policy.tells_count:
            raise WorkRefused(
                "the run needs each client's sample count, and this site's policy keeps it: set share_sample_count = "
                "true there, or have the run aggregate securely, weighted by samples"
            )
        return self._app.sample_count

    def _with_difference(self, message: CheckIn, refusal: CoordinatorRefused) -> CoordinatorRefused:
        """Show the coordinator the layout that it refuses: its refusal then says, here and there, what differs."""
        text = self._layout.to_json()
        if len(text) > LAYOUT_CHARS_MAX:
            return refusal
        try:
            self._coordinator.check_in(replace(message, layout=text, wait_s=0.0))
        except CoordinatorRefused as told:
            return told if told.kind == refusal.kind else refusal
        return refusal

    def _pause(self, seconds: float) -> None:
        self._pause_for(min(max(seconds, _IDLE_PAUSE_S), RETRY_AFTER_MAX_S))

    def _patience(self, timing: Timing, until: float | None = None) -> Patience:
        """To send what is done: a request that is under way is finished, but who is to leave waits for no next try."""
        return Patience(timing, until, self._pause_for)

    def _pause_for(self, seconds: float) -> None:
        with self._shutdown.interruptible():
            self._shutdown.wait(seconds)

    def _survive(self, offer: Assignment) -> None:
        """Do an assignment; say so where it cannot be done. Several failures in a row end the client."""
        check_offer(offer, self._run, self._client, self._layout)
        window_end = time.monotonic() + offer.window_s
        try:
            if offer.is_secure:
                self._work_securely(offer, window_end)
            elif offer.task.sends_updates:
                self._work(offer, window_end)
            else:
                self._measure(offer, window_end)
            self._failures = self._declines = self._closings = 0
            if offer.is_secure:
                self._store.failures.succeeded(self._run)
        except AssignmentClosed as error:
            log.info("%s: not sent, %s", name_of(offer), error)
            self._store.forget_work()
            self._declines = 0
            self._closings += 1
            self._pause_for(CLOSED_BACKOFF.bound_s(self._closings))
        except OutOfTime as error:
            log.info("%s: not finished, %s", name_of(offer), error)
            self._pause(_OUT_OF_TIME_PAUSE_S)  # a coordinator that offers no time would be asked again at once
            self._settle_pending()
        except AttemptRefused as error:
            self._decline(offer, window_end, error)
        except (AccessRefused, StateError):
            raise
        except (WorkRefused, TrainingFailed, CoordinatorRefused, CoordinatorMisbehaved, Alarm) as error:
            self._fail(offer, window_end, error)

    def _decline(self, offer: Assignment, window_end: float, error: AttemptRefused) -> None:
        """The next attempt is another matter, so the client stays; but the more it has declined in a row, the longer it
        is away before it can be asked again.
        """
        away_s = self._next_away_s()
        log.warning("%s: declined, %s; asking for work again in %.0f s", name_of(offer), error, away_s)
        self._tell(offer, window_end, error)
        self._pause(away_s)

    def _tell(self, offer: Assignment, window_end: float, error: ClientError) -> None:
        """Decline. How long that is tried says nothing of the reason."""
        # Its report is waited for until the window's end, its signature for some time after.
        until = window_end + after_s(offer.window_s) if offer.is_secure else window_end
        decline(self._coordinator, offer.id, error.told, self._patience(within(offer.window_s), until))

    def _next_away_s(self) -> float:
        self._declines += 1
        return DECLINED_BACKOFF.bound_s(self._declines)

    def _fail(self, offer: Assignment, window_end: float, error: ClientError) -> None:
        own_fault = error.__cause__ if isinstance(error, TrainingFailed) else None
        log.error("%s: %s", name_of(offer), error, exc_info=own_fault)
        self._store.forget_work()
        if offer.is_secure:
            self._store.failures.count(self._run, error)
        self._tell(offer, window_end, error)
        self._failures += 1
        advice = self._store.failures.advice(self._run)
        if advice:
            log.error("this client takes no further part in run %s: %s", self._run, advice)
        elif self._failures >= FAILURES_MAX:
            log.error(
                "this client ends, because it could not do %d assignments of run %s in a row; the last: %s",
                self._failures,
                self._run,
                error,
            )
        if advice or self._failures >= FAILURES_MAX:
            raise error
        if offer.is_secure:
            self._pause(self._next_away_s())  # when it asks again says no more of why it declined than its words do

    def _work(self, offer: Assignment, window_end: float) -> None:
        self._site.check_plain(self._layout)
        check_able(offer, self._app.sample_count, self._layout)
        timing = within(offer.window_s)
        start = self._fetch(offer, timing, window_end)
        log.info("%s: training, %.0f s left", name_of(offer), window_end - time.monotonic())
        with Watch(self._coordinator, offer.id, offer.window_s) as watch:
            done = train(self._app, self._layout, start, self._local_plan(offer, window_end, watch))
        if self._delivery.reports == 0:
            warn_if_too_slow(offer, done, time.monotonic() - window_end)
        if watch.closed is not None:
            raise AssignmentClosed("assignment-closed", watch.closed, 200)
        pending = save_work(self._app, self._layout, start, offer, done, self._store, self._delivery.link)
        self._delivery.deliver(pending, offer.window_s, self._patience(timing, window_end), resume=False)

    def _work_securely(self, offer: Assignment, window_end: float) -> None:
        """The same in a round whose coordinator learns the sum alone. Nothing of it outlives this process."""
        check_layout(offer, self._layout)
        asked = read_offer(offer, self._client, self._layout)
        check_window(asked, offer.window_s, ASKED_SHARE, "the assignment arrived")
        admitted, timing = self._site.admit(asked, self._layout), within(offer.window_s)
        patience = self._patience(timing)
        part = SecureRound(self._coordinator, self._store, self._site, self._layout, asked, admitted, patience)
        with part.exchange() as exchange:
            start = self._fetch(offer, timing, window_end)
            part.check_time(window_end - time.monotonic())
            log.info("%s: training, %.0f s left", name_of(offer), window_end - time.monotonic())
            plan = self._plan(offer, window_end, exchange, part.update_bytes)
            done = self._train_unseen(part, exchange, start, replace(plan, seed=admitted.seed), window_end)
            if self._shutdown.reason is not None:
                log.info("%s: staying until its sum is opened; ask again to leave at once", name_of(offer))
            exchange.wait(window_end - time.monotonic())
        try:
            sha256, n_bytes = part.mask(self._app, start, done)
            self._delivery.upload(offer.id, n_bytes, sha256, offer.window_s, patience)
            answer = part.report(sha256)
            steps = (0, 0) if done is None else (done.result.steps_done, done.result.steps_planned)
            self._delivery.note(offer.id, answer, *steps)
            self._delivery.masked += 1
            if answer.outcome is Outcome.ACCEPTED:
                self._delivery.opened += part.open()
        finally:
            admitted.client.abort()
            self._store.forget_work()

    def _train_unseen(
        self, part: SecureRound, exchange: KeyExchange, start: Path, plan: LocalPlan, window_end: float
    ) -> Trained | None:
        """None if training has failed, or done too little, in a round that noise covers, which goes on with noise
        alone. Raises `UnfitWork`, or `TooLittleDone`, for that in another secure round: how training went may hang on
        the data, so the coordinator does not hear of it.
        """
        try:
            done = train(self._app, self._layout, start, plan)
            if self._delivery.reports == 0:
                warn_if_too_slow(part.offer, done, time.monotonic() - window_end)
            exchange.check()
            part.check_work(plan, done)
            return done
        except TrainingFailed as error:
            log.error("%s: training failed", name_of(part.offer), exc_info=error.__cause__)
            unfit: ClientError = UnfitWork(str(error))
        except (TooLittleDone, UnfitWork) as error:
            unfit = error
        if not part.is_covered:
            self._leave_unseen(exchange, unfit)
            raise unfit
        log.error(
            "%s: this client has no update for this private round, so it sends only noise: %s",
            name_of(part.offer),
            unfit,
        )
        return None

    def _leave_unseen(self, exchange: KeyExchange, unfit: ClientError) -> None:
        """Where the round has ended, go as one goes whose training went well: without a word. It counts all the same,
        for how soon this client asks for work again may tell.
        """
        try:
            exchange.check()
        except AssignmentClosed:
            self._store.failures.count(self._run, unfit)
            raise

    def _measure(self, offer: Assignment, window_end: float) -> None:
        """Say how the model does here. Nothing of it is kept on disk: after a kill it is measured again."""
        self._site.check_plain(self._layout)
        check_able(offer, self._app.sample_count, self._layout)
        timing = within(offer.window_s)
        start, patience = self._fetch(offer, timing, window_end), self._patience(timing, window_end)
        log.info("%s: measuring the model, %.0f s left", name_of(offer), window_end - time.monotonic())
        with Watch(self._coordinator, offer.id, offer.window_s) as watch:
            done = measure(self._app, self._layout, start, offer)
        if watch.closed is not None:
            raise AssignmentClosed("assignment-closed", watch.closed, 200)
        if done is None:
            decline(self._coordinator, offer.id, "this client has no held-out data to measure the model on", patience)
        else:
            answer = patiently(lambda: self._coordinator.report_evaluation(offer.id, done), patience)
            self._delivery.count(answer)
            log.info("%s: measured, %s: %s", offer.id, answer.outcome.value, answer.reason)

    def _fetch(self, offer: Assignment, timing: Timing, window_end: float) -> Path:
        patience = Patience(timing, window_end, self._shutdown.wait)
        wanted = Wanted(offer.model, self._layout, offer.changes)
        try:
            with self._shutdown.interruptible():
                path, self._delivery.link = fetch_model(
                    self._coordinator, self._store, wanted, self._delivery.link, patience, self._links
                )
                return path
        except Interrupted as interruption:
            decline(self._coordinator, offer.id, f"the client is leaving: {interruption}", Patience(until=0.0))
            raise

    def _local_plan(self, offer: Assignment, window_end: float, watch: Watch) -> LocalPlan:
        codec = codec_for(offer.codec, offer.grid, self._layout)
        checkpoint = Checkpoint() if offer.task.tries_clients else self._store.checkpoint(offer)
        plan = self._plan(offer, window_end, watch, codec.update_bytes[-1])
        return replace(plan, within=codec.within(), checkpoint=checkpoint)

    def _plan(self, offer: Assignment, window_end: float, watch: Watch, update_bytes_max: int) -> LocalPlan:
        return replace(
            asked_of_site(offer.training, offer.seed, offer.share),
            deadline=window_end - self._delivery.link.reserve_s(update_bytes_max, offer.window_s),
            told_to_stop=_either(lambda: watch.ended, lambda: self._shutdown.reason),
        )

    def _settle_pending(self) -> None:
        """Send what an earlier process trained, or what missed its window, if its round still wants it, and the policy,
        which may be another now, allows it still.
        """
        pending = self._store.pending()
        if pending is not None and not self._may_send(pending):
            return
        while pending is not None and not self._is_settled(pending):
            self._pause(_OUT_OF_TIME_PAUSE_S)

    def _may_send(self, pending: PendingReport) -> bool:
        """What is pending is of a plain round: nothing of a secure one outlives its process."""
        try:
            self._site.check_plain(self._layout)
        except WorkRefused as error:
            log.warning("dropped the unsent update for %s: %s", pending.assignment, error)
            self._store.forget_work()
            return False
        return True

    def _is_settled(self, pending: PendingReport) -> bool:
        try:
            with self._shutdown.interruptible():
                window_s = self._delivery.window_left_s(pending.assignment, Patience(wait=self._shutdown.wait))
            patience = self._patience(within(window_s), time.monotonic() + window_s)
            self._delivery.deliver(pending, window_s, patience, resume=True)
        except OutOfTime as error:
            log.info("%s: not sent yet, %s", pending.assignment, error)
            return False
        except AccessRefused:
            raise
        except (CoordinatorRefused, CoordinatorMisbehaved) as error:
            log.info("dropped the unsent update for %s: %s", pending.assignment, error)
            self._store.forget_work()
        return True


def _either(*askers: Callable[[], str | None]) -> Callable[[], str | None]:
    """The first reason that any of these gives."""
    return lambda: next((reason for ask in askers if (reason := ask()) is not None), None)
