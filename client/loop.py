"""The life of a client, on one page: ask for work, do it, report, and ask again.

```
          enrol once
              |
              v        no work: wait as long as the coordinator asks
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

`rounds/worker.py` does the work of one assignment.

A killed client resumes at its next start: the coordinator gives it the same assignment again, training resumes from its
checkpoint, and an update that is on disk with its report is sent. A client keeps an update that missed its window until
the coordinator says that it is too late. Of a secure round nothing survives a kill, because its keys are only in
memory.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from umbel.aggregation.kernels.native import NoKernels, chosen
from umbel.aggregation.messages import LAYOUT_CHARS_MAX, CheckedIn, CheckIn, RunStatus
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.secagg.turns import after_s
from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.client.app import Client
from umbel.client.errors import (
    AccessRefused,
    Alarm,
    AssignmentClosed,
    AttemptRefused,
    CannotGoOn,
    ClientError,
    CoordinatorBusy,
    CoordinatorGone,
    CoordinatorMisbehaved,
    CoordinatorRefused,
    OutOfTime,
    RankFailed,
    StateError,
    TrainingFailed,
    WorkRefused,
    error_of_site,
)
from umbel.client.policy.policy import SitePolicy
from umbel.client.policy.site import SecureRandom, Site
from umbel.client.rounds.delivery import decline
from umbel.client.rounds.shutdown import Interrupted, Shutdown
from umbel.client.rounds.turn import Turn
from umbel.client.rounds.withdrawal import while_allowed
from umbel.client.rounds.work import name_of
from umbel.client.rounds.worker import RoundWorker
from umbel.client.state.enrol import ensure_enrolled, identify
from umbel.client.state.failures import FAILURES_MAX
from umbel.client.state.state_dir import locked
from umbel.client.state.store import PendingReport, Store
from umbel.client.wire.addresses import addresses_in, warn_if_readable
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.offers import check_offer
from umbel.client.wire.silence import Silence
from umbel.client.wire.timing import CLOSED_BACKOFF, DECLINED_BACKOFF, RETRY_AFTER_MAX_S, within
from umbel.client.wire.transport import Patience, Transport, connect, patiently

_IDLE_PAUSE_S = 0.05  # the shortest time between two check-ins, so that quick answers cause no flood of them
_OUT_OF_TIME_PAUSE_S = 1.0
_WITHDRAWN = "this site no longer takes part in the run"
log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Why a client left a run, and the counts of its reports as in `Delivery`."""

    client: str
    run: str
    status: str  # the run's, or `interrupted`
    reason: str
    reports: int
    accepted: int
    masked: int
    opened: int
    masked_evaluations: int

    @property
    def reports_in_words(self) -> str:
        """The counts in words. Which rounds were abandoned in the end is unknown to a client."""
        if self.masked:
            of_each = (
                (self.masked - self.masked_evaluations, "masked update"),
                (self.masked_evaluations, "masked evaluation"),
            )
            sent = " and ".join(counted(n, one) for n, one in of_each if n)
            return f"{sent} sent; this client helped to unmask the sums of {self.opened} of them"
        return f"reports: {self.reports} sent, {self.accepted} accepted on arrival"


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
    give_up_after_s: float = math.inf,
    shutdown: Shutdown | None = None,
    transport: httpx.BaseTransport | None = None,
    secure_random: SecureRandom | None = None,
) -> RunEnd:
    """Take part in `run` until it ends or this client is asked to leave.

    Raises `ClientError`; `ValueError` for unusable arguments; `OSError`, `MembersRefused` for the policy's list.

    Args:
        server: the coordinator's address, or those of its replicas, `URL[,URL...]`.
        state_dir: this client's own directory, for its key and unsent work.
        token: the one-time token; needed until the client has enrolled.
        name: the client's name; by default made from the host's name.
        labels: facts about this site, sent at its enrolment, such as `{"tier": "hospital"}`.
        policy: what this site allows, whatever the coordinator asks.
        give_up_after_s: raise `CoordinatorGone` when no request got a usable answer for this long. By default the
            client asks until one does.
        shutdown: asks the client to leave; SIGINT and SIGTERM do so too.
        transport: for tests and proxies.
        secure_random: the random draws of secure rounds, for tests that repeat a round; only the default is safe.
    """
    state_dir, shutdown = Path(state_dir), shutdown or Shutdown()
    silence = Silence(give_up_after_s, lambda: shutdown.request("the coordinator does not answer"))
    require_kernels()
    replicas = connect(server, transport)
    warn_if_readable(addresses_in(server), "models and updates")
    with replicas, locked(state_dir), shutdown.on_signals():
        store = Store(state_dir, server)
        identity = identify(store, name, token)
        coordinator = CoordinatorClient(Transport(replicas, while_allowed(identity.authorize, shutdown), silence))
        site = Site(RunId(run), identity, policy, state_dir, store.secure, secure_random)
        client_loop = ClientLoop(RoundWorker(app, coordinator, store, ClientId(identity.name), site, shutdown))
        patience = Patience(wait=shutdown.wait)
        end = client_loop.live(lambda: ensure_enrolled(coordinator, store, identity, token, labels or {}, patience))
    if silence.is_too_long:
        raise CoordinatorGone(give_up_after_s, silence.cause)
    return end


def require_kernels() -> None:
    """Raise `ValueError` for missing kernels now, not after the first training."""
    try:
        chosen()
    except NoKernels as error:
        raise ValueError(str(error)) from error


class ClientLoop:
    """One client in one run. Only the main loop's thread may call it."""

    def __init__(self, worker: RoundWorker, turn: Turn | None = None) -> None:
        """`turn`: when the client may train beside other runs of its site; by default always."""
        self._worker = worker
        self._turn = turn or Turn()
        self._coordinator, self._store, self._client = worker.coordinator, worker.store, worker.client
        self._site, self._run = worker.site, worker.site.run
        self._delivery, self._shutdown = worker.delivery, worker.shutdown
        self._failures = self._declines = self._closings = 0  # in a row
        self._has_checked_in = False
        self._sent_sample_count = 0  # 0 until the run needs it
        self._waits_in: RunStatus | None = None  # the status of the run at the last log line about waiting

    def live(self, enrol: Callable[[], None] = lambda: None) -> RunEnd:
        """Enrol, then work until the run is over or the client is asked to leave. Raises as `take_part` does."""
        try:
            with self._shutdown.interruptible():
                enrol()
            return self.take_part()
        except Interrupted as interruption:
            if self._shutdown.is_withdrawn and (pending := self._store.pending()) is not None:
                self._discard(pending.assignment, pending.assignment, was_begun=True)
            return self.end("interrupted", str(interruption))

    def take_part(self) -> RunEnd:
        """Work until the run is over. Raises `Interrupted` when asked to leave, `ClientError` if it cannot continue."""
        self._store.failures.check(self._run)
        self._send_pending()
        log.info("%s: asking for work in run %s", self._client, self._run)
        while True:
            self._turn.reported(self._delivery.reports)
            self._turn.wait(self._worker.pause_for)
            answer = self._check_in()
            if answer.run_status.is_over:
                return self.end(answer.run_status.value, answer.reason)
            self._turn.check()
            self._log_waiting(answer)
            if answer.assignment is None:
                self._pause(answer.retry_after_s)
            else:
                self._do_assignment(answer.assignment)

    def end(self, status: str, reason: str) -> RunEnd:
        sent = self._delivery
        counts = sent.reports, sent.accepted, sent.masked, sent.opened, sent.masked_evaluations
        return RunEnd(self._client, self._run, status, reason, *counts)

    def _check_in(self) -> CheckedIn:
        with self._shutdown.interruptible():
            answer = patiently(self._try_check_in, Patience(wait=self._shutdown.wait))
        self._has_checked_in = True
        return answer

    def _try_check_in(self) -> CheckedIn:
        message = CheckIn(self._run, self._sent_sample_count, self._worker.layout.digest, self._turn.hold_s)
        try:
            return self._coordinator.check_in(message)
        except CoordinatorRefused as error:
            if error.kind == "wrong-layout":
                if error.tensors is not None and self._worker.apply(error.tensors):
                    return self._try_check_in()  # once only, because the rules are no longer new
                return self._check_in_with_frozen(message, error)
            if error.kind == "unknown-run" and self._has_checked_in:  # the coordinator is being restored
                raise CoordinatorBusy(f"the coordinator no longer knows the run: {error.detail}") from error
            if error.kind == "sample-count-needed" and not self._sent_sample_count:
                self._sent_sample_count = self._sample_count_to_send()
                return self._coordinator.check_in(replace(message, sample_count=self._sent_sample_count))
            raise

    def _check_in_with_frozen(self, message: CheckIn, refusal: CoordinatorRefused) -> CheckedIn:
        """Try the layout of a model that sends frozen parameters too. Raises the refusal if there is none."""
        default = self._worker.shared
        if not self._worker.send_frozen():
            raise self._with_difference(message, refusal) from refusal
        try:
            answer = self._try_check_in()
        except CoordinatorRefused as again:
            if again.kind != refusal.kind:
                raise
            self._worker.shared = default
            raise self._with_difference(message, refusal) from refusal
        log.warning(
            "the run's model sends parameters that are frozen here, so the codec's noise moves them a little each "
            "round; a model that `umbel model init --app` makes leaves them as they are"
        )
        return answer

    def _sample_count_to_send(self) -> int:
        if not self._site.policy.tells_count:
            raise WorkRefused(
                "the run needs each client's sample count, but this site's policy forbids sending it (it has "
                "share_sample_count = false, or requires secure aggregation). Change the policy, or ask the operator "
                "for a run with secure aggregation that weights clients by samples"
            )
        return self._worker.app.sample_count

    def _with_difference(self, message: CheckIn, refusal: CoordinatorRefused) -> CoordinatorRefused:
        """Send the layout that the coordinator refuses; its second refusal, and its log, then name the difference."""
        text = self._worker.layout.to_json()
        if len(text) > LAYOUT_CHARS_MAX:
            return refusal
        try:
            self._coordinator.check_in(replace(message, layout=text, wait_s=0.0))
        except CoordinatorRefused as detailed:
            return detailed if detailed.kind == refusal.kind else refusal
        return refusal

    def _log_waiting(self, answer: CheckedIn) -> None:
        """Log once that there is no work, and again when the run's status changes."""
        status = answer.run_status if answer.assignment is None else None
        if status is not None:
            self._turn.waits(answer.reason)
        if status is not None and status is not self._waits_in:
            log.info("no work yet, %s; waiting", answer.reason or "the coordinator does not say why")
        self._waits_in = status

    def _pause(self, seconds: float) -> None:
        self._worker.pause_for(min(max(seconds, _IDLE_PAUSE_S), RETRY_AFTER_MAX_S))

    # --- one assignment, and what follows if it fails ---

    def _do_assignment(self, offer: Assignment) -> None:
        """Do an assignment, or decline it. Several failures in a row end the client."""
        check_offer(offer, self._run, self._client, self._worker.layout_in(offer))
        window_end = time.monotonic() + offer.window_s
        try:
            with self._turn.training(offer, self._worker.pause_for):
                self._worker.do(offer, window_end)
            self._failures = self._declines = self._closings = 0
            if offer.is_secure:
                self._store.failures.succeeded(self._run)
        except AssignmentClosed as error:
            if self._shutdown.is_withdrawn:  # this client's own threads have closed it
                self._discard(offer.id, name_of(offer), was_begun=self._delivery.begun == offer.id)
                raise Interrupted(self._shutdown.reason) from error
            log.info("%s: this client's work was not sent: %s", name_of(offer), error)
            self._store.forget_work()
            self._declines = 0
            self._closings = 1 if self._worker.had_model else self._closings + 1
            self._worker.pause_for(CLOSED_BACKOFF.bound_s(self._closings))
        except OutOfTime as error:
            log.info("%s: this client's work was not finished: %s", name_of(offer), error)
            self._pause(_OUT_OF_TIME_PAUSE_S)  # else a coordinator that offers no time would be asked at once
            self._send_pending()
        except AttemptRefused as error:
            away_s = self._next_away_s()
            log.warning("%s: this client declines: %s. It asks for work again in %.0f s", name_of(offer), error, away_s)
            self._decline(offer, window_end, error)
            self._pause(away_s)
        except (AccessRefused, StateError):
            raise
        except CannotGoOn as error:
            if isinstance(error, RankFailed) and not offer.is_secure:
                self._decline(offer, window_end, error)
            raise
        except Interrupted:
            if self._shutdown.is_withdrawn:
                self._discard(offer.id, name_of(offer), was_begun=self._delivery.begun == offer.id)
            raise
        except (WorkRefused, TrainingFailed, CoordinatorRefused, CoordinatorMisbehaved, Alarm) as error:
            self._fail(offer, window_end, error)

    def _discard(self, assignment: AssignmentId, name: str, *, was_begun: bool) -> None:
        """Forget the work of a client that was withdrawn, say so in the site's log, and decline."""
        self._store.forget_work()
        sent = "some of it may have been sent before; nothing more is sent" if was_begun else "nothing of it was sent"
        log.info("%s: %s; this client's work was discarded: %s", name, _WITHDRAWN, sent)
        decline(self._coordinator, assignment, _WITHDRAWN, Patience(until=0.0))

    def _decline(self, offer: Assignment, window_end: float, error: ClientError) -> None:
        """Decline. How long the client tries must say nothing of its reason."""
        # In a secure round the coordinator waits for a signature for some time after the window.
        until = window_end + after_s(offer.window_s) if offer.is_secure else window_end
        patience = self._worker.patience(within(offer.window_s), until)
        decline(self._coordinator, offer.id, error.public_reason, patience)

    def _next_away_s(self) -> float:
        """How long to stay away. It grows with each attempt that the client declines in a row."""
        self._declines += 1
        return DECLINED_BACKOFF.bound_s(self._declines)

    def _fail(self, offer: Assignment, window_end: float, error: ClientError) -> None:
        log.error("%s: %s", name_of(offer), error, exc_info=error_of_site(error))
        self._store.forget_work()
        if offer.is_secure:
            self._store.failures.count(self._run, error)
        self._decline(offer, window_end, error)
        self._failures += 1
        advice = self._store.failures.advice(self._run)
        if advice:
            log.error("this client takes no further part in run %s: %s", self._run, advice)
        elif self._failures >= FAILURES_MAX:
            log.error(
                "this client stops, because %d assignments of run %s failed in a row. The last error: %s",
                self._failures,
                self._run,
                error,
            )
        if advice or self._failures >= FAILURES_MAX:
            raise error
        if offer.is_secure:
            self._pause(self._next_away_s())  # as after any other refusal, so the time away says nothing of the reason

    # --- work that an earlier process left, or that missed its window ---

    def _send_pending(self) -> None:
        """Send a pending update if its round still wants it and the policy, which may have changed, allows it."""
        pending = self._store.pending()
        if pending is not None and self._may_send(pending):
            while not self._is_settled(pending):
                self._pause(_OUT_OF_TIME_PAUSE_S)

    def _may_send(self, pending: PendingReport) -> bool:
        """Whether the policy allows it. A pending update is of a plain round: no masked one outlives its process."""
        try:
            self._site.check_plain(self._worker.layout)
        except WorkRefused as error:
            log.warning("%s: the update of an earlier process is dropped: %s", pending.assignment, error)
            self._store.forget_work()
            return False
        return True

    def _is_settled(self, pending: PendingReport) -> bool:
        """Try to send it. False if it must be tried again."""
        try:
            with self._shutdown.interruptible():
                window_s = self._delivery.window_left_s(pending.assignment, Patience(wait=self._shutdown.wait))
            patience = self._worker.patience(within(window_s), time.monotonic() + window_s)
            self._delivery.deliver(pending, window_s, patience, resume=True)
        except OutOfTime as error:
            log.info("%s: the update is not sent yet: %s", pending.assignment, error)
            return False
        except AccessRefused:
            raise
        except (CoordinatorRefused, CoordinatorMisbehaved) as error:
            log.info("%s: the update of an earlier process is not sent (again): %s", pending.assignment, error)
            self._store.forget_work()
        return True
