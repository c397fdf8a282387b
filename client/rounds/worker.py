"""Do one assignment, from fetching the model to reporting: train, train for a masked sum, or only measure."""

import logging
import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.messages import Outcome, ReportAnswer
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.plans.tensors import TensorRules
from umbel.aggregation.secagg.turns import ASKED_SHARE
from umbel.aggregation.types import AssignmentId, ClientId
from umbel.client.app import Client
from umbel.client.errors import (
    AssignmentClosed,
    ClientError,
    CoordinatorMisbehaved,
    TooLittleDone,
    TrainingFailed,
    UnfitWork,
    WorkRefused,
    error_of_site,
)
from umbel.client.local.checkpoint import Checkpoint
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import Evaluation
from umbel.client.policy.site import Site
from umbel.client.rounds.delivery import Delivery, decline
from umbel.client.rounds.fetch import ModelFetcher
from umbel.client.rounds.inexactness import MissingGamma
from umbel.client.rounds.secure import SecureRound
from umbel.client.rounds.shutdown import Interrupted, Shutdown
from umbel.client.rounds.site_code import Trained, asked_of_site, evaluation_of, keep_state, train, with_kept
from umbel.client.rounds.unlisted import UnlistedMetrics
from umbel.client.rounds.watch import KeyExchange, Watch
from umbel.client.rounds.work import NOTHING_HELD_OUT, measure, name_of, save_work, warn_if_too_slow
from umbel.client.state.model_files import load_model
from umbel.client.state.site_state import SiteState
from umbel.client.state.store import Store
from umbel.client.training.shared_state import SharedState
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.download import Links
from umbel.client.wire.offers import check_able, check_layout, check_window, read_offer
from umbel.client.wire.timing import Timing, within
from umbel.client.wire.transport import Patience, patiently

log = logging.getLogger("umbel.client")


@dataclass
class RoundWorker:
    app: Client
    coordinator: CoordinatorClient
    store: Store
    client: ClientId
    site: Site
    shutdown: Shutdown

    def __post_init__(self) -> None:
        self._share(SharedState(self.app))
        self.delivery = Delivery(self.coordinator, self.store)
        self.had_model = False  # whether the model of the last assignment had come, so that its work began
        self._links = Links(self.site.policy.link_rules)
        self._unlisted, self._missing = UnlistedMetrics(), MissingGamma()

    @property
    def layout(self) -> Layout:
        """The layout of the run's model, as far as this client knows it."""
        return self.shared.layout

    def layout_in(self, offer: Assignment) -> Layout:
        """The layout of the model file of this assignment."""
        return self.shared.layout_in(offer.training)

    def apply(self, rules: TensorRules | None) -> bool:
        """Take over the run's rules of what travels; returns whether they are new.

        Raises `WorkRefused` if they do not fit the client's model, `CoordinatorMisbehaved` if the run had other ones
        before: a run file never changes.
        """
        if rules == self.shared.rules:
            return False
        if self.shared.rules is not None:
            raise CoordinatorMisbehaved(
                "the run's [tensors] or base_sha256 differ from what the coordinator sent before"
            )
        self._share(self.shared.under(rules))
        return True

    def send_frozen(self) -> bool:
        """Send changes of frozen parameters too; returns whether that is new. Models that `umbel model init` has not
        made, or that an older version has made, have no other kind for them.
        """
        shared = self.shared.sending_frozen()
        if shared.layout.digest == self.shared.layout.digest:
            return False
        self._share(shared)
        return True

    def _share(self, shared: SharedState) -> None:
        self.shared = shared
        self._first_private = shared.private()  # as the client makes them, for a run without a state yet

    def do(self, offer: Assignment, window_end: float) -> None:
        """Do an assignment to its end. `window_end` is on `time.monotonic`'s clock. Raises `ClientError`."""
        self.had_model = False
        self.apply(offer.tensors)
        self.shared.require_base()
        self.store.forget_pending()
        if offer.is_secure:
            self._work_securely(offer, window_end)
            return
        layout = self.layout_in(offer)
        self.site.check_plain(layout)
        check_able(offer, self.app.sample_count, layout)
        if offer.task.sends_updates:
            self._train(offer, window_end)
        else:
            self._measure(offer, window_end)

    def patience(self, timing: Timing, until: float = math.inf) -> Patience:
        """Patience for sending: a request under way is finished, but a client that should leave waits for no retry."""
        return Patience(timing, until, self.pause_for)

    def pause_for(self, seconds: float) -> None:
        """Wait. Raises `Interrupted` when the client is asked to leave."""
        with self.shutdown.interruptible():
            self.shutdown.wait(seconds)

    def _train(self, offer: Assignment, window_end: float) -> None:
        timing = within(offer.window_s)
        start = self._fetch(offer, timing, window_end)
        log.info("%s: training, %.0f s left", name_of(offer), window_end - time.monotonic())
        with Watch(self.coordinator, offer.id, offer.window_s) as watch:
            plan = self._plain_plan(offer, window_end, watch)
            with self.shutdown.require_allowed_after(), _closed_rather_than_stopped(watch):
                done = train(self.app, self.shared, start, plan, self._missing)
            self._warn_if_too_slow(offer, done, window_end)
            watch.check()
            self.shared.require_base()
            keep = partial(self._keep_state, offer, plan)
            pending = save_work(self.app, self.shared, start, offer, done, self.store, self.delivery.bandwidth, keep)
        self.delivery.deliver(pending, offer.window_s, self.patience(timing, window_end), resume=False)

    def _measure(self, offer: Assignment, window_end: float) -> None:
        """Evaluate the model and report. Nothing is kept on disk: after a kill the client measures it again."""
        timing = within(offer.window_s)
        start, patience = self._fetch(offer, timing, window_end), self.patience(timing, window_end)
        log.info("%s: measuring the model, %.0f s left", name_of(offer), window_end - time.monotonic())
        with Watch(self.coordinator, offer.id, offer.window_s) as watch:
            self._prepare(offer, window_end, watch)
            with self.shutdown.require_allowed_after(), _closed_rather_than_stopped(watch):
                done = measure(self.app, self.shared, start, offer)
        watch.check()
        if done is None:
            decline(self.coordinator, offer.id, NOTHING_HELD_OUT, patience)
        else:
            self.delivery.begun = offer.id
            answer = patiently(lambda: self.coordinator.report_evaluation(offer.id, done), patience)
            self._note(offer, answer, None)

    def _work_securely(self, offer: Assignment, window_end: float) -> None:
        """Train or measure for a coordinator that learns only the sum. Nothing of it outlives this process."""
        layout = self.layout_in(offer)
        check_layout(offer, layout)
        invitation = read_offer(offer, self.client, layout)
        check_window(invitation, offer.window_s, ASKED_SHARE, "the assignment arrived")
        admitted, timing = self.site.admit(invitation, layout), within(offer.window_s)
        patience = self.patience(timing)
        part = SecureRound(
            self.coordinator, self.store, self.site, self.shared, invitation, admitted, patience, self._unlisted
        )
        with part.exchange() as exchange:
            start = self._fetch(offer, timing, window_end)
            with self.shutdown.require_allowed_after():
                mask, done = self._worked_unseen(part, exchange, start, window_end)
            if self.shutdown.reason is not None:
                log.info(
                    "%s: this client leaves once the sum is unmasked; after a second signal it leaves at once",
                    name_of(offer),
                )
            exchange.wait(window_end - time.monotonic())
            sha256, n_bytes = self._masked(part, mask)
        try:
            self.delivery.upload(offer.id, n_bytes, sha256, offer.window_s, patience)
            if offer.task.sends_updates:
                self.store.keep_waiting()
            answer = part.report(sha256)
            self._note(offer, answer, done)
            self.delivery.masked += 1
            self.delivery.masked_evaluations += not offer.task.sends_updates
            if answer.outcome is Outcome.ACCEPTED:
                self.delivery.opened += part.open()
        finally:
            admitted.client.abort()
            self.store.forget_work()

    def _masked(self, part: SecureRound, mask: Callable[[], tuple[str, int]]) -> tuple[str, int]:
        """Mask while the exchange still watches the round. After an error this client's secrets are erased."""
        try:
            return mask()
        except BaseException:
            part.admitted.client.abort()
            self.store.forget_work()
            raise

    def _worked_unseen(
        self, part: SecureRound, exchange: KeyExchange, start: Path, window_end: float
    ) -> tuple[Callable[[], tuple[str, int]], Trained | None]:
        """Train, or only measure the model. Returns what writes the masked upload, and the training, if any."""
        offer = part.offer
        if not offer.task.sends_updates:
            return partial(part.mask_measured, self._measure_unseen(part, exchange, start, window_end)), None
        part.check_time(window_end - time.monotonic())
        log.info("%s: training, %.0f s left", name_of(offer), window_end - time.monotonic())
        plan = self._plan(offer, window_end, exchange, part.update_bytes)
        plan = replace(plan, seed=part.admitted.seed)
        done = self._train_unseen(part, exchange, start, plan, window_end)
        return partial(part.mask, start, done, partial(self._keep_state, offer, plan)), done

    def _measure_unseen(
        self, part: SecureRound, exchange: KeyExchange, start: Path, window_end: float
    ) -> Evaluation | None:
        """Measure the model; None if there is no held-out data, which a sum does not show. Raises `UnfitWork` if the
        site's code fails; the coordinator does not see why.
        """
        log.info("%s: measuring the model", name_of(part.offer))
        self._prepare(part.offer, window_end, exchange)
        try:
            found = evaluation_of(self.app, self.shared, load_model(start, self.layout_in(part.offer)))
        except TrainingFailed as error:
            unfit = _unfit(error)
            self._leave_unseen(part.offer, exchange, unfit)
            raise unfit from error
        except TooLittleDone as error:
            self._leave_unseen(part.offer, exchange, error)
            raise
        exchange.check()
        return found

    def _note(self, offer: Assignment, answer: ReportAnswer, done: Trained | None) -> None:
        if offer.task.sends_updates:
            steps = (0, 0) if done is None else (done.result.steps_done, done.result.steps_planned)
            self.delivery.note(offer.id, answer, *steps)
            return
        self.delivery.count(answer)
        log.info("%s: measured, %s: %s", offer.id, answer.outcome.value, answer.reason)

    def _train_unseen(
        self, part: SecureRound, exchange: KeyExchange, start: Path, plan: LocalPlan, window_end: float
    ) -> Trained | None:
        """Train so that the coordinator cannot see how it went, because that may depend on the data.

        If training failed or did too little: returns None in a round that noise covers, for the client then sends only
        noise; else raises `UnfitWork` or `TooLittleDone`.
        """
        try:
            done = train(self.app, self.shared, start, plan, self._missing)
            self._warn_if_too_slow(part.offer, done, window_end)
            exchange.check()
            part.check_work(plan, done)
            self._require_same_base()
            self._keep_state(part.offer, plan, done)
            return done
        except TrainingFailed as error:
            unfit: ClientError = _unfit(error)
        except (TooLittleDone, UnfitWork) as error:
            unfit = error
        if not part.is_covered:
            self._leave_unseen(part.offer, exchange, unfit)
            raise unfit
        log.error(
            "%s: this client has no update for this private round, so it sends only noise: %s",
            name_of(part.offer),
            unfit,
            exc_info=error_of_site(unfit),
        )
        self._write_state(part.offer, self.store.site_state.as_it_began())
        return None

    def _require_same_base(self) -> None:
        try:
            self.shared.require_base()
        except WorkRefused as error:
            raise UnfitWork(str(error)) from error

    def _leave_unseen(self, offer: Assignment, exchange: KeyExchange, unfit: ClientError) -> None:
        """If the round has ended, leave in silence, as after good training. The failure counts nevertheless: the time
        until the next check-in may reveal it. If the round has not ended, the client's loop logs the failure.
        """
        try:
            exchange.check()
        except AssignmentClosed:
            log.error("%s: %s", name_of(offer), unfit, exc_info=error_of_site(unfit))
            self.store.failures.count(self.site.run, unfit)
            raise

    def _warn_if_too_slow(self, offer: Assignment, done: Trained, window_end: float) -> None:
        if self.delivery.reports == 0:
            warn_if_too_slow(offer, done, time.monotonic() - window_end)

    def _fetch(self, offer: Assignment, timing: Timing, window_end: float) -> Path:
        patience = Patience(timing, window_end, self.shutdown.wait)
        try:
            fetcher = ModelFetcher(self.coordinator, self.store, self.layout_in(offer), self._links)
            with self.shutdown.interruptible():
                path, self.delivery.bandwidth = fetcher.fetch(
                    offer.model, offer.changes, self.delivery.bandwidth, patience
                )
            self.had_model = True
            return path
        except Interrupted as interruption:
            decline(self.coordinator, offer.id, f"the client is leaving: {interruption}", Patience(until=0.0))
            raise

    def _prepare(self, offer: Assignment, window_end: float, watch: Watch) -> None:
        """Restore what the client keeps across rounds, for a round that only measures."""
        self.app.prepare(replace(self._asked(offer, window_end, watch), deadline=window_end))

    def _asked(self, offer: Assignment, window_end: float, watch: Watch) -> LocalPlan:
        """What the run asks, with what the client keeps across rounds."""
        asked = asked_of_site(
            offer.training, offer.seed, offer.share, run=offer.run, number=offer.round, client=self.client
        )
        asked = replace(asked, told_to_stop=lambda: self.shutdown.reason if watch.ended is None else watch.ended)
        before = self.store.site_state.before(offer.run, offer.model.version, self._counts(offer, window_end))
        return with_kept(asked, self.shared, before, self._first_private)

    def _keep_state(self, offer: Assignment, plan: LocalPlan, done: Trained) -> None:
        """Write what the client keeps across rounds, beside the update. Raises `TrainingFailed` if that fails."""
        keep_state(self.shared, plan, done, partial(self._write_state, offer))

    def _write_state(self, offer: Assignment, left: SiteState) -> None:
        """In a round that noise covers there is always a state: whether the next round asks for it (`_counts`) must not
        depend on how the training went.
        """
        is_covered = offer.secure is not None and offer.secure.plan.is_private
        self.store.site_state.wait(offer.run, offer.model.version, offer.id, left, if_empty=is_covered)

    def _counts(self, offer: Assignment, window_end: float) -> Callable[[AssignmentId], bool]:
        """Asks the coordinator whether its newest model has the work of an earlier assignment in it."""
        patience = self.patience(within(offer.window_s), window_end)
        return lambda earlier: patiently(lambda: self.coordinator.counts(earlier), patience)

    def _plain_plan(self, offer: Assignment, window_end: float, watch: Watch) -> LocalPlan:
        codec = codec_for(offer.codec, offer.grid, self.layout_in(offer))
        if offer.codec.feedback:
            self.store.feedback.forget_uncounted(offer.model.version, self._counts(offer, window_end))
        checkpoint = Checkpoint() if offer.task.tries_clients else self.store.checkpoint(offer)
        plan = self._plan(offer, window_end, watch, codec.update_bytes[-1])
        return replace(plan, within=codec.within(), checkpoint=checkpoint)

    def _plan(self, offer: Assignment, window_end: float, watch: Watch, update_bytes_max: int) -> LocalPlan:
        reserve_s = self.delivery.bandwidth.reserve_s(update_bytes_max, offer.window_s)
        return replace(self._asked(offer, window_end, watch), deadline=window_end - reserve_s)


@contextmanager
def _closed_rather_than_stopped(watch: Watch) -> Generator[None]:
    """If the work was ended with its round, raise `AssignmentClosed` instead of `TooLittleDone`."""
    try:
        yield
    except TooLittleDone:
        watch.check()
        raise


def _unfit(error: TrainingFailed) -> UnfitWork:
    """The same failure, without a reason that the coordinator sees."""
    unfit = UnfitWork(str(error))
    unfit.__cause__ = error
    return unfit
