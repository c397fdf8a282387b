"""A run inside one process group, round after round: the coordinator's own machine and endings, without a coordinator.

```
   +--> recruit --> train, measure (client) --> reports of all ranks --> machine --> the network's sum --> next model
   |                                                                                                          |
   +------------- the next attempt, round or evaluation (aggregation/run/endings.py) <------------------------+
```

Every rank does all of this, on the same inputs: the run file, the ranks' sample counts, and the reports, with rank 0's
clock among them. So all come to the same states, records and models without a leader that tells them. With its report
each rank states the hash of its model, so that a rank which computes otherwise is named.

The sums are those of a coordinator, to the bit. Updates of plain rounds are added up as integers of the codec: each
rank folds its own, and an all-reduce adds the sums up. If that takes fewer bytes, each rank gets all updates and folds
them. Where the run file has [secure_aggregation], the ranks' levels and words are those that clients would mask, and
an all-reduce adds them up. Nothing is masked inside the group.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import TypeAdapter

from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.collective.lanes import Lanes
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.next_model import HasMean
from umbel.aggregation.model.state import State
from umbel.aggregation.phrases import agreeing
from umbel.aggregation.plans.assignment import Assignment, assignment_id
from umbel.aggregation.plans.codec import CodecPlan, Part
from umbel.aggregation.plans.masks import ONE_STEP
from umbel.aggregation.plans.round import RoundPlan, Task, ranks_of
from umbel.aggregation.reports import EvaluationDone, WorkDone
from umbel.aggregation.round.cohort import Expected
from umbel.aggregation.round.machine import advance, advance_to_end
from umbel.aggregation.round.retry import declines
from umbel.aggregation.round.states import (
    Abandoned,
    Closing,
    Declined,
    Event,
    Gathered,
    Recruiting,
    Reported,
    Spoiled,
    Tick,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.endings import EvaluationClosed, Known, abandoned, finished
from umbel.aggregation.run.ledger import Book, MemberFacts, client_records
from umbel.aggregation.run.model_state import ModelState, SummedModel
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.run_end import RoundEnd
from umbel.aggregation.run.server_step import server_step
from umbel.aggregation.run.standing import Standing
from umbel.aggregation.run.tuning import TuningFacts
from umbel.aggregation.secagg.numbers.composition import WORD_BYTES, Composition
from umbel.aggregation.secagg.numbers.totals import Totals, TotalsRefused, totals
from umbel.aggregation.types import ClientId, client_name
from umbel.aggregation.update.grid import sum_sha256
from umbel.client.datacenter.ranks.group import Group, GroupError
from umbel.client.datacenter.ranks.names import RankNames
from umbel.client.datacenter.train.cost import AttemptCost, CostMeter
from umbel.client.datacenter.train.differences import RankUpdates, compared
from umbel.client.datacenter.train.rank_client import RankClient, RankWork
from umbel.client.errors import TrainingFailed
from umbel.client.user_code import where_raised

_SUM_BYTES = 8  # of an integer of a sum
_ATTEMPTS_MAX = 3  # at a round: in a group nobody comes or goes, so another attempt hardly ends otherwise
log = logging.getLogger("umbel.client")
_NOT_ASKED = "this rank is not in the cohort"


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank tells all others of its work in an attempt."""

    model_sha256: str  # of the model that it began with
    elapsed_s: float  # since the attempt began, on its own clock
    work: WorkDone | EvaluationDone | None = None
    refusal: str = ""  # why there is no work
    update_bytes: int = 0
    samples_seen: int = 0  # of all steps, where the training has counted them
    failed: str = ""  # why its own code failed, which ends the run
    leaves: str = ""  # why its machine is about to stop, after this attempt


_REPORT = TypeAdapter(RankReport)


@dataclass(frozen=True, slots=True)
class _RoundSum:
    """What a round's sum says."""

    mean: HasMean
    sum_sha256: str
    update_rms: float | None = None
    totals: Totals | None = None


@dataclass(frozen=True, slots=True)
class GroupAttempt:
    """An ended attempt, and what it has cost on this rank."""

    record: RoundRecord
    cost: AttemptCost
    samples_seen: int = 0  # by all ranks
    figures: RankUpdates | None = None  # if they are measured


class GroupFederation:
    """One run of a group. `sizes`: the sample count of each rank. `leaves`: why this rank must leave after the attempt
    under way; None while it may stay. `compares_updates`: whether `differences.py` measures each round's.
    """

    def __init__(
        self,
        group: Group,
        rank_client: RankClient,
        sizes: Sequence[int],
        standing: Standing,
        model: ModelState,
        leaves: Callable[[], str | None] = lambda: None,
        *,
        compares_updates: bool = False,
    ) -> None:
        self._compares_updates = compares_updates
        self._group, self.rank_client, self._sizes, self._leaves = group, rank_client, sizes, leaves
        self.standing, self.model = standing, model
        self.leaving = ""  # which rank must leave after the last attempt, and why
        self._too_slow = ""  # which rank has needed longer than the window in the last attempt, and what helps
        self._has_warned = False
        self._declines = ""  # which reason the ranks had that declined the last attempt

    def attempts(self) -> Iterator[GroupAttempt]:
        """Every attempt until the run is over or a rank must leave.

        Raises `GroupError` if a rank fails or is lost, and for a round that fails again and again.
        """
        while self.standing.status is RunStatus.RUNNING and not self.leaving:
            meter = CostMeter()
            ended = self._attempt(meter)
            yield ended
            record = ended.record
            if not record.committed and record.task.makes_model and record.attempt >= _ATTEMPTS_MAX:
                declined, slow = self._declines and f"; {self._declines}", self._too_slow and f". {self._too_slow}"
                told = f"{record.reason}{declined}{slow}"
                raise GroupError(f"round {record.round} was abandoned {record.attempt} times: {told}")

    def _attempt(self, meter: CostMeter) -> GroupAttempt:
        plan = self.standing.state.plan
        opened = self._recruited()
        if isinstance(opened, Abandoned):
            known = Known((), opened.opened_at, opened.closed_at, self.standing.history, self._evidence())
            return GroupAttempt(self._end(abandoned(self.standing, replace(opened, plan=plan), known)), meter.ended())
        began, composition = time.monotonic(), self._composition(plan)
        made = self._made(plan, opened, composition, began)
        meter.end("train_s")
        reports = self._exchanged(made, _sent_bytes(made), time.monotonic() - began)
        meter.end("wait_s")
        self._look_at_times(plan, reports)
        state: Closing | Abandoned = replace(_played(opened, reports), plan=plan)
        found: _RoundSum | Totals | None = None
        if isinstance(state, Closing):
            try:
                found = self._summed(state, made, reports, composition)
            except TotalsRefused as error:
                spoiled, _ = advance(state, Spoiled(state.closed_at, str(error)))
                assert isinstance(spoiled, Abandoned), "no model is made of its sum"
                state = spoiled
        meter.end("sum_s")
        figures = None
        if self._compares_updates and isinstance(found, _RoundSum):
            figures = compared(self._group, None if made.change is None else made.change(), found.mean)
        record = self._ended(state, found, reports, self._shared_elapsed(began))
        meter.end("apply_s")
        return GroupAttempt(record, meter.ended(), sum(one.samples_seen for one in reports), figures)

    # --- before the sum -----------------------------------------------------------------------------------------------

    def _recruited(self) -> Training | Abandoned:
        """Draw the cohort at once: no other rank will ever come. The machine has no masks to wait for. Ranks that have
        trained the newest model measure it too, because often there are no others.
        """
        state, now = self.standing.state, max(self.standing.now, self.standing.state.not_before)
        candidates = tuple(Candidate(client_name(rank), size) for rank, size in enumerate(self._sizes))
        plain = replace(state, plan=replace(state.plan, secure=None), excluded=())
        following, _ = advance(plain, Gathered(now, candidates, expected=Expected({})))
        if isinstance(following, Recruiting):
            raise GroupError(f"round {state.plan.number} cannot begin: {following.why}; start more ranks")
        assert isinstance(following, Training | Abandoned), "nothing has been reported yet"
        return following

    def _composition(self, plan: RoundPlan) -> Composition | None:
        if plan.secure is None:
            return None
        layout, only = self.model.layout, not plan.task.sends_updates
        secure = replace(plan.secure, minimum_work=ONE_STEP)  # nobody has to be hidden among equals here
        return Composition(plan.codec, secure, plan.grid, plan.sample_count_max, layout, only)

    def _made(self, plan: RoundPlan, opened: Training, composition: Composition | None, began: float) -> RankWork:
        """What this rank has to say. A failure of its own code is what it says then, so that no rank waits for it."""
        if (name := self.rank_client.name) not in opened.cohort:
            return RankWork(None, _NOT_ASKED)
        offer, weights = self._offer(plan, ranks_of(opened.cohort)[name]), self._weights()
        try:
            if plan.task is Task.EVALUATION:
                return self.rank_client.measure(weights, offer, composition)
            return self.rank_client.train(weights, offer, composition, began + plan.window_s)
        except TrainingFailed as error:
            cause = error.__cause__
            return RankWork(None, failed=f"{error}" if cause is None else where_raised(cause))

    def _weights(self) -> State:
        return self.model.layout.full_state(self.model.published)

    def _offer(self, plan: RoundPlan, rank: int) -> Assignment:
        file, name = self.standing.file, self.rank_client.name
        return Assignment(
            id=assignment_id(plan.run, plan.number, plan.attempt, name, plan.task),
            run=plan.run,
            round=plan.number,
            attempt=plan.attempt,
            model=self.standing.model,
            training=file.training_of(plan),
            codec=CodecPlan() if plan.secure is not None else plan.codec,
            grid=plan.grid,
            sample_count_max=plan.sample_count_max,
            seed=plan.seed_of(name),
            window_s=plan.window_s,
            task=plan.task,
            rank=rank,
            tensors=file.tensor_rules,
        )

    def _exchanged(self, made: RankWork, sent_bytes: int, elapsed_s: float) -> list[RankReport]:
        """The reports of all ranks. Raises `GroupError` if a rank has failed, or has another model."""
        sha256 = self.standing.model.sha256
        mine = RankReport(
            sha256,
            elapsed_s,
            made.report,
            made.refusal,
            sent_bytes,
            made.samples_seen,
            made.failed,
            self._leaves() or "",
        )
        with self._group.waiting_for(f"the reports on round {self.standing.state.plan.number}"):
            reports = [_REPORT.validate_json(one) for one in self._group.gather(_REPORT.dump_json(mine))]
        for rank, one in enumerate(reports):
            if one.failed:
                raise GroupError(f"the code of {self._group.names.of(rank)} failed: {one.failed}")
            if one.leaves and not self.leaving:
                self.leaving = f"{self._group.names.of(rank)} must leave: {one.leaves}"
        _require_same([one.model_sha256 for one in reports], "the model that the round begins with", self._group.names)
        return reports

    def _look_at_times(self, plan: RoundPlan, reports: Sequence[RankReport]) -> None:
        """Note which rank has needed longer than the window. If only its first step counts, rank 0 logs that once."""
        rank, slowest = max(enumerate(reports), key=lambda one: one[1].elapsed_s)
        is_over, work, names = slowest.elapsed_s > plan.window_s, slowest.work, self._group.names
        self._too_slow = (
            f"{names.of(rank).capitalize()} has needed {slowest.elapsed_s:.3g} s, and window_s is {plan.window_s:g}: "
            f"set it to {math.ceil(2 * slowest.elapsed_s)} or more in [rounds], or give this {names.noun} less work"
            if is_over
            else ""
        )
        has_one = isinstance(work, WorkDone) and work.steps_done == 1 < work.steps_planned
        if is_over and has_one and self._group.is_first and not self._has_warned:
            self._has_warned = True
            log.warning("round %d counts only the first step of a %s. %s", plan.number, names.noun, self._too_slow)

    def _shared_elapsed(self, began: float) -> float:
        """Seconds since the attempt began on rank 0's clock, the same number on every rank."""
        return float(self._group.from_first(repr(time.monotonic() - began).encode()))

    # --- the sum ------------------------------------------------------------------------------------------------------

    def _summed(
        self, closing: Closing, made: RankWork, reports: Sequence[RankReport], composition: Composition | None
    ) -> "_RoundSum | Totals | None":
        if composition is not None:
            return self._added_levels(closing, made, composition)
        return self._folded(closing, made, reports) if closing.plan.task.makes_model else None

    def _folded(self, closing: Closing, made: RankWork, reports: Sequence[RankReport]) -> _RoundSum:
        """The sum of a plain round, as a coordinator folds it."""
        codec = codec_for(closing.plan.codec, closing.plan.grid, self.model.layout)
        whole, ranks = codec.new_sum(), ranks_of(closing.cohort)
        parts = [Part(one.weight, ranks[client]) for client, one in sorted(closing.accepted.items())]
        updates = {self.rank_client.name: made.update}
        if gathers := _gathers(self._group.size, max(one.update_bytes for one in reports), whole.n_sums):
            updates = {client_name(rank): one for rank, one in enumerate(self._group.gather(made.update))}
        part = whole if gathers else codec.new_sum()
        for client, update in updates.items():
            if (accepted := closing.accepted.get(client)) is not None:
                view = memoryview(update)
                pieces = codec.integers(update[: codec.header_bytes], [view[codec.header_bytes :]], ranks[client])
                part.add(pieces, accepted.weight)
        if not gathers:
            self._group.add_up(part, whole)
        return _RoundSum(codec.mean(whole, parts), sum_sha256(whole), codec.update_rms(whole))

    def _added_levels(self, closing: Closing, made: RankWork, composition: Composition) -> "_RoundSum | Totals":
        """The sum of the numbers that clients would mask. Raises `TotalsRefused`."""
        ranks = ranks_of(closing.cohort)
        mine = made.contribution if self.rank_client.name in closing.accepted else None
        levels = self._group.add_levels(None if mine is None else mine.levels(), _lanes(composition))
        none = torch.zeros(composition.n_words, dtype=torch.int64)
        words = self._group.add_words(none if mine is None else mine.words)
        found = totals(composition, levels, words, [ranks[client] for client in closing.accepted])
        if not closing.plan.task.makes_model:
            return found
        return _RoundSum(found.mean, found.sum_sha256, totals=found)

    # --- after the sum ------------------------------------------------------------------------------------------------

    def _ended(
        self,
        state: Closing | Abandoned,
        found: "_RoundSum | Totals | None",
        reports: Sequence[RankReport],
        elapsed_s: float,
    ) -> RoundRecord:
        known = self._known(state, reports, elapsed_s)
        self._declines = declines(state) if isinstance(state, Abandoned) else ""
        if isinstance(state, Abandoned):
            return self._end(abandoned(self.standing, state, known))
        if not isinstance(found, _RoundSum):
            return self._end(finished(self.standing, state, EvaluationClosed(found), known))
        file = self.standing.file
        try:
            model = self.model.after(found.mean, server_step(file, state, found.totals), file.downlink.change_step)
        except ValueError as error:
            raise GroupError(f"round {state.plan.number} makes no model: {error}") from error
        made = SummedModel(model, found.sum_sha256, found.update_rms, found.totals)
        end = finished(self.standing, state, made, known)
        if self.rank_client.name in state.accepted:
            self.rank_client.keep()
        return self._end(end, model, sum(one.update_bytes for one in reports) // len(reports))

    def _known(self, state: Closing | Abandoned, reports: Sequence[RankReport], elapsed_s: float) -> Known:
        facts, opened_at = dict[ClientId, MemberFacts](), state.opened_at
        for rank, one in enumerate(reports):
            if (name := client_name(rank)) in state.cohort:
                reported = None if one.work is None else opened_at + one.elapsed_s
                facts[name] = MemberFacts(self._sizes[rank], one.work is None, reported, one.update_bytes)
        now = max(opened_at + elapsed_s, state.closed_at)
        book = Book(facts, opened_at, lambda _: now, self.standing.file.retention.per_site_metrics)
        return Known(client_records(state, book), opened_at, now, self.standing.history, self._evidence())

    def _evidence(self) -> TuningFacts:
        return TuningFacts(self.standing.observations, self.model.file.size_bytes, self._group.size)

    def _end(self, end: RoundEnd, model: ModelState | None = None, update_bytes: int | None = None) -> RoundRecord:
        if model is not None:
            self.model = model
        self.standing = self.standing.after(end, update_bytes)
        return replace(end.record, secure=False)  # nothing was masked


def _played(opened: Training, reports: Sequence[RankReport]) -> Closing | Abandoned:
    """The attempt after these reports, in the order of their times. None is late: all ranks have waited for all."""
    events = list[tuple[float, ClientId, Event]]()
    last = math.nextafter(opened.closes_at, 0.0)
    for rank, one in enumerate(reports):
        if (name := client_name(rank)) in opened.cohort:
            at = min(opened.opened_at + one.elapsed_s, last)
            events.append((at, name, Reported(at, name, one.work) if one.work else Declined(at, name, one.refusal)))
    in_order = [event for _, _, event in sorted(events, key=lambda one: one[:2])]
    ended = advance_to_end(opened, [*in_order, Tick(opened.closes_at)])
    assert isinstance(ended, Closing | Abandoned), "a window ends"
    return ended


def _lanes(composition: Composition) -> Lanes:
    return Lanes(composition.n_levels, composition.secure.bits)


def _sent_bytes(made: RankWork) -> int:
    """The length of what a rank gives to the sum."""
    if made.contribution is None:
        return len(made.update)
    composition = made.contribution.composition
    return _lanes(composition).n_bytes + WORD_BYTES * composition.n_words


def _gathers(n_ranks: int, update_bytes: int, n_sums: int) -> bool:
    """Whether all ranks get all updates, because that takes fewer bytes than an all-reduce of the sums.

    A ring sends (P - 1) updates to gather them, and 2 (P - 1) / P sums to add them up.
    """
    return n_ranks * update_bytes < 2 * _SUM_BYTES * n_sums


def _require_same(values: Sequence[str], what: str, names: RankNames) -> None:
    """Raise `GroupError`, which names the ranks that differ from most others."""
    usual = max(values, key=values.count)
    if odd := [rank for rank, one in enumerate(values) if one != usual]:
        ranks = names.of(odd[0]) if len(odd) == 1 else names.of_several(", ".join(map(str, odd)))
        differs = agreeing(len(odd), "differs", "differ")
        raise GroupError(f"{what} is not the same on all {names.plural}: {ranks} {differs} from the others")
