"""One attempt at a secure round in the main thread: from trained weights to the unmasked sum.

```
training, beside it the exchange of keys (`watch.py`)
      v
masked update on disk -> upload -> report -- late, surplus --> forget
                                    v accepted
            GET consistency-check -> PUT its signature          the clients of the sum
                                    v
            GET unmasking -> PUT unmasking                      shares
```

Before the upload, the signature and the shares the site remembers what it is about to send (`earlier_sums.py`). The
keys are only in memory, so a kill ends this client's part in the attempt.
"""

import base64
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from umbel.aggregation.messages import ReportAnswer
from umbel.aggregation.plans.masks import ONE_STEP
from umbel.aggregation.reports import MaskedInput
from umbel.aggregation.secagg.errors import SecAggError
from umbel.aggregation.secagg.masked_input import MaskedReader, masked_input
from umbel.aggregation.secagg.messages import decode_indices
from umbel.aggregation.secagg.numbers.composition import METRIC_LIMIT
from umbel.aggregation.secagg.numbers.contribution import (
    SILENT,
    Contribution,
    ContributionRefused,
    LocalWork,
    contribution,
    measured,
    nothing,
)
from umbel.aggregation.secagg.numbers.plan import steps_needed
from umbel.aggregation.secagg.turns import MODEL_SHARE, Phase
from umbel.client.errors import (
    AssignmentClosed,
    AttemptRefused,
    OutOfTime,
    TooLittleDone,
    UnfitWork,
    WorkRefused,
    alarm_of,
)
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import Evaluation
from umbel.client.policy.earlier_sums import not_signed
from umbel.client.policy.site import Admitted, Site
from umbel.client.policy.terms import as_sent
from umbel.client.rounds.site_code import Trained
from umbel.client.rounds.unlisted import UnlistedMetrics
from umbel.client.rounds.watch import PAUSE_S, KeyExchange, renewal_s
from umbel.client.rounds.work import unfit_refused, weight_changes
from umbel.client.state.store import Store
from umbel.client.training.encoding_device import CPU, where_memory_suffices
from umbel.client.training.kept import control_as_read
from umbel.client.training.shared_state import SharedState
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.offers import SecureInvitation, check_window
from umbel.client.wire.transport import Patience, patiently

T = TypeVar("T")
_WINDOWS_MAX = 2.0  # how many windows long a coordinator may answer "not yet"
log = logging.getLogger("umbel.client")


@dataclass
class SecureRound:
    """This client's part in one attempt."""

    coordinator: CoordinatorClient
    store: Store
    site: Site
    shared: SharedState
    invitation: SecureInvitation
    admitted: Admitted
    patience: Patience  # for a coordinator that is away
    unlisted: UnlistedMetrics

    def __post_init__(self) -> None:
        self.offer, plan = self.invitation.assignment, self.invitation.offer.plan
        self._id = self.offer.id
        self._floor = self.site.policy.work_floor(plan.minimum_work, plan.noise)

    @property
    def update_bytes(self) -> int:
        return MaskedReader(self.admitted.composition).update_bytes.start

    def exchange(self) -> KeyExchange:
        return KeyExchange(
            self.coordinator,
            self._id,
            self.invitation.offer.window_s,
            self.admitted.client,
            lambda roster: self.site.check_roster(self.invitation, roster, self.invitation.composition.layout),
        )

    @property
    def is_covered(self) -> bool:
        """Whether noise that the site relies on covers its contribution. Then nothing may reveal how training went."""
        return self.site.policy.relies_on(self.invitation.offer.plan.noise)

    def mask(self, start: Path, done: Trained | None, keep: Callable[[Trained], None]) -> tuple[str, int]:
        """Write the masked update to disk; returns its SHA-256 and length.

        `done` is None only in a covered round whose training failed. `keep`: writes what the client keeps, again if
        that depends on the update. Raises `UnfitWork` for an update that must not be
        sent, but never in a covered round.
        """
        made = self._contribution(start, done)
        if done is not None and done.control is not None:
            change = made.decoded.to("cpu", torch.float64)
            layout = self.invitation.composition.layout
            before, scale = done.control.before, done.control.scale
            keep(replace(done, kept=control_as_read(layout, scale, lambda start, stop: change[start:stop], before)))
        return self._masked(made)

    def mask_measured(self, evaluation: Evaluation | None) -> tuple[str, int]:
        """Write masked metrics of held-out data to disk, zeros if there are none; returns their SHA-256 and length."""
        composition, found = self.invitation.composition, evaluation or Evaluation(0, {})
        work = self._as_sent(measured(found.metrics, found.counts, found.sample_count, found.weights))
        return self._masked(contribution(composition, nothing(composition), work, self.admitted.secret))

    def _masked(self, made: Contribution) -> tuple[str, int]:
        for complaint in self.admitted.client.complaints:
            log.warning(
                "round %d: a share from another client cannot be decrypted: %s",
                self.offer.round,
                complaint,
            )
        for remark in made.remarks:
            log.warning("%s: %s", self._id, remark)
        self.site.earlier_sums.sending(self.invitation)
        client, device = self.admitted.client, made.values.device
        return where_memory_suffices(lambda at: self.store.save_update(masked_input(made.on(at), client)), device)

    def _contribution(self, start: Path, done: Trained | None) -> Contribution:
        if self.is_covered:
            return self._unseen(start, done)
        assert done is not None, "without noise, failed training is declined"
        try:
            with unfit_refused(self.offer):
                return self._made(start, self._local_work(done), done)
        except (ContributionRefused, WorkRefused) as error:
            raise UnfitWork(str(error)) from error
        except Exception as error:
            log.error("%s: this client's update cannot be read", self._id, exc_info=error)
            raise UnfitWork(
                f"the trained model could not be read: {type(error).__name__}; see this client's log"
            ) from error

    def _unseen(self, start: Path, done: Trained | None) -> Contribution:
        """Contribute the change or, if it cannot be read, only noise: a refusal would tell the coordinator."""
        try:
            return self._made(start, SILENT, done)
        except Exception as error:
            log.error(
                "%s: this client has no update for this private round, so it sends only noise: %s",
                self._id,
                error,
                exc_info=error,
            )
            return self._made(start, SILENT, None)

    def _made(self, start: Path, work: LocalWork, done: Trained | None) -> Contribution:
        """`start`: the file of the start weights. `done`: None for a change of zeros."""
        composition, secret = self.invitation.composition, self.admitted.secret

        def made(device: torch.device) -> Contribution:
            change = nothing(composition)
            if done is not None:
                change = partial(weight_changes, self.shared, start, self.offer.training, done, device)
            return contribution(composition, change, work, secret, is_covered=self.is_covered)

        return where_memory_suffices(made, CPU if done is None else self.shared.encoding_device)

    def check_time(self, left_s: float) -> None:
        """Raise `AttemptRefused` if the model arrived too late for the least amount of work."""
        if self._floor > ONE_STEP:
            check_window(self.invitation, left_s, MODEL_SHARE, "the model arrived")

    def check_work(self, plan: LocalPlan, done: Trained) -> None:
        """Raise `TooLittleDone` if less than the least amount of work was done, `UnfitWork` for inconsistent steps."""
        if self._floor > ONE_STEP:
            check_steps(plan, done)
            check_floor(done, self._floor)
        if plan.has_control and plan.control_variate == "change":
            check_equal_steps(plan, done)

    def _local_work(self, done: Trained) -> LocalWork:
        result, evaluation, words = done.result, done.evaluation, self.invitation.composition.words
        if result.sample_count > words.sample_count_max:
            log.info(
                "%s: at most %d of this client's %d samples count, because the run's sample_count_max is %d",
                self._id,
                words.sample_count_max,
                result.sample_count,
                words.sample_count_max,
            )
        return self._as_sent(
            LocalWork(
                sample_count=result.sample_count,
                steps_done=result.steps_done,
                steps_planned=result.steps_planned,
                metrics=result.metrics,
                evaluation=evaluation.metrics if evaluation else {},
                evaluation_sample_count=evaluation.sample_count if evaluation else 0,
                counts=result.counts,
                evaluation_counts=evaluation.counts if evaluation else {},
                weights=result.weights,
                evaluation_weights=evaluation.weights if evaluation else {},
            )
        )

    def _as_sent(self, done: LocalWork) -> LocalWork:
        """What the policy lets the site send of its work. The log says what is cut or left out."""
        work, words = as_sent(self.site.policy, done), self.invitation.composition.words
        self.unlisted.note(work, words, is_private=self.invitation.offer.plan.is_private)
        of_both = [
            *((work.metrics, name) for name in words.of_training.sent_of(work.metric_names)),
            *((work.evaluation, name) for name in words.of_evaluation.sent_of(work.evaluation_names)),
        ]
        if cut := {f"{name} = {values[name]:g}" for values, name in of_both if _is_cut(values.get(name, 0.0))}:
            log.warning(
                "%s: these metrics are sent as +-%g, the largest value that a masked sum can carry, because they are "
                "larger or are not numbers: %s",
                self._id,
                METRIC_LIMIT,
                ", ".join(sorted(cut)),
            )
        weights = {**work.weights, **work.evaluation_weights}
        if heavy := sorted(name for name, weight in weights.items() if weight > words.sample_count_max):
            log.warning(
                "these metrics count with the weight %d, the run's sample_count_max, because their own weights are "
                "larger: %s",
                words.sample_count_max,
                ", ".join(heavy),
            )
        for warning in (
            *_of_another_length(work.counts, words.counts),
            *_of_another_length(work.evaluation_counts, words.evaluation_counts),
        ):
            log.warning("%s: %s", self._id, warning)
        return work

    def report(self, update_sha256: str) -> ReportAnswer:
        signature = self.admitted.client.sign_input(bytes.fromhex(update_sha256))
        masked = MaskedInput(update_sha256, base64.b64encode(signature).decode())
        return patiently(lambda: self.coordinator.report(self._id, masked), self.patience)

    def open(self) -> bool:
        """Sign the clients of the sum, and reveal shares once all have signed. True if the coordinator took the shares;
        it does not say whether they unmasked the sum.

        Raises `AttemptRefused` if the site refuses this sum, `Alarm`, or `OutOfTime` if the coordinator never asks.
        """
        try:
            self._sign()
            self._reveal()
        except SecAggError as error:
            raise alarm_of(error) from error
        except AssignmentClosed as error:
            log.info("%s: this client's shares are not needed: %s", self._id, error.detail)
            return False
        log.info("%s: the coordinator has received this client's shares", self._id)
        return True

    def _sign(self) -> None:
        client, context = self.admitted.client, self.invitation.context
        inputs = self._ask(Phase.CONSISTENCY_CHECK)
        clients = [context.names[index] for index in decode_indices(inputs, len(context.cohort))]
        try:
            self.site.check_sum(self.invitation, clients)
        except AttemptRefused as error:
            raise not_signed(error) from error
        agreed = client.agree(inputs)
        self.site.earlier_sums.signing(self.invitation, clients)
        patiently(lambda: self.coordinator.send_message(self._id, Phase.CONSISTENCY_CHECK, agreed), self.patience)

    def _reveal(self) -> None:
        shares = self.admitted.client.reveal(self._ask(Phase.UNMASKING))
        self.site.revealing(self.invitation)
        self._until_done(
            lambda hold_s: self.coordinator.send_message(self._id, Phase.UNMASKING, shares, hold_s) or None
        )

    def _ask(self, phase: Phase) -> bytes:
        n_cohort = len(self.invitation.context.cohort)
        return self._until_done(lambda hold_s: self.coordinator.fetch_message(self._id, phase, n_cohort, hold_s))

    def _until_done(self, step: Callable[[float], T | None]) -> T:
        """Repeat a long poll until it has a result. Only time in which the coordinator answers counts."""
        window_s, waited_s = self.invitation.offer.window_s, 0.0
        hold_s, waits_s = renewal_s(window_s), _WINDOWS_MAX * window_s

        def timed() -> tuple[T | None, float]:
            started = time.monotonic()
            return step(hold_s), time.monotonic() - started

        while waited_s < waits_s:
            found, took_s = patiently(timed, self.patience)
            if found is not None:
                return found
            time.sleep(PAUSE_S)
            waited_s += took_s + PAUSE_S
        raise OutOfTime(
            f"the coordinator answers, but did not continue this round within {waits_s:g} s; this client leaves the "
            "attempt"
        )


def _is_cut(value: float) -> bool:
    """Whether a masked sum cannot carry this value; also a NaN."""
    return not abs(value) <= METRIC_LIMIT


def _of_another_length(counts: Mapping[str, Sequence[int]], asked: Mapping[str, int]) -> Iterator[str]:
    """Why counts of a name that the round asks for are not sent."""
    for name, length in asked.items():
        if name in counts and len(counts[name]) != length:
            yield (
                f"the counts {name!r} have {len(counts[name])} numbers, and the run asks for {length}, so they are not "
                f"sent: return {length} numbers, or ask the operator to change [secure_aggregation] of the run file"
            )


def check_steps(plan: LocalPlan, done: Trained) -> None:
    """Raise `UnfitWork` for inconsistent steps: fewer planned than asked, or all done by a training that was stopped.

    A site's own `train` may miscount its steps. A coordinator can leave a site little time, and must not gain by it
    (`aggregation/secagg/numbers/plan.py`).
    """
    result, least = done.result, plan.steps_for(1)  # an epoch has at least one batch
    if not 1 <= result.steps_done <= result.steps_planned:
        raise UnfitWork(
            f"train returned steps_done = {result.steps_done} and steps_planned = {result.steps_planned}: steps_done "
            "must be between 1 and steps_planned"
        )
    if result.steps_planned < least:
        raise UnfitWork(
            f"train returned steps_planned = {result.steps_planned}, and the plan asks for {least} or more: return "
            "plan.steps_for(batches in an epoch), not the steps that were done"
        )
    if done.was_stopped and result.steps_done == result.steps_planned:
        raise UnfitWork(
            f"train was told to stop but reported all {result.steps_planned} planned steps as done: return the steps "
            "actually done as steps_done, and check plan.should_stop() before each step, not after the last"
        )


def check_equal_steps(plan: LocalPlan, done: Trained) -> None:
    """Raise `UnfitWork` unless the client has done as many steps as every other (`TrainingTerms.why_not_masked`)."""
    if done.result.steps_done != plan.steps:
        raise UnfitWork(
            f"train took {done.result.steps_done} steps, and the run asks each client for {plan.steps}: with SCAFFOLD "
            "a client of a secure round takes exactly plan.steps, or its change would stand out"
        )


def check_floor(done: Trained, floor: float) -> None:
    """Raise `TooLittleDone` if less than this share of the planned steps was done, for lack of time.

    If there was time, raise `UnfitWork`: the data may have decided when training ended, and the coordinator can see it.
    """
    result = done.result
    needed = steps_needed(floor, result.steps_planned)
    if result.steps_done >= needed:
        return
    of = f"{result.steps_done} of {result.steps_planned} planned steps"
    if done.could_go_on:
        raise UnfitWork(
            f"train ended after {of}, but a masked update needs {needed} (minimum_work = {floor:g}). It was not told "
            "to stop, and it had time for more: do all steps of the plan, or go on until plan.should_stop() gives a "
            "reason"
        )
    raise TooLittleDone(
        f"only {of} were done in time, and a masked update "
        f"needs {needed} (minimum_work = {floor:g}); with fewer it could stand out in the sum. Ask the operator "
        "for fewer local steps or a longer window_s. Or lower minimum_work in the run file and in this site's policy; "
        "docs/explanation/limits-of-security.md says what that costs"
    )
