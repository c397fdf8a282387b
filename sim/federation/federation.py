"""A simulated run, round after round: the coordinator's own state machine and endings, in virtual time.

```
   +--> clients that wait (fleet) -> recruit -> what becomes of each (fleet) -> window -> accepted ones train (engine)
   |                                                                                                      |
   +------- the next attempt, round or evaluation (aggregation/run/endings.py) <--- write, read, sum, step (uplink)
```

The coordinator's decisions are made by `umbel.aggregation`: `advance`, `choose`, the codecs and their sum, `finished`
and `abandoned`. The simulation adds when events happen, and how the clients' work is done.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from torch import Tensor

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.assignment import Assignment, assignment_id
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.round import RoundPlan, ranks_of
from umbel.aggregation.reports import EvaluationDone, Work, WorkDone
from umbel.aggregation.round.machine import advance, next_deadline
from umbel.aggregation.round.states import Abandoned, Closing, Gathered, Recruiting, Training
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.canary import CanaryClosed
from umbel.aggregation.run.endings import EvaluationClosed, Known, abandoned, finished
from umbel.aggregation.run.ledger import Book, client_records
from umbel.aggregation.run.model_state import ModelState, SummedModel
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.run_end import RoundEnd
from umbel.aggregation.run.server_step import server_step
from umbel.aggregation.run.standing import Standing
from umbel.aggregation.run.tuning import TuningFacts
from umbel.aggregation.secagg.numbers.totals import TotalsRefused
from umbel.aggregation.secagg.turns import RANDOM_BYTES
from umbel.aggregation.types import ClientId, client_name, client_number
from umbel.client.rounds.work import NOTHING_HELD_OUT
from umbel.client.training.kept import control_as_read
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.clients.work import ClientReport, GlobalModel
from umbel.sim.federation.engine_training import EngineTraining
from umbel.sim.federation.evaluating import evaluations, meter_of
from umbel.sim.federation.local_work import Reports, steps_asked
from umbel.sim.federation.measures import UpdateFigures, UpdateSums
from umbel.sim.federation.memory import Memory
from umbel.sim.federation.own_clients import OwnAttempt, OwnClients
from umbel.sim.federation.possible import SimulationError, require_possible
from umbel.sim.federation.site_policies import SitesInAttempt
from umbel.sim.federation.site_sums import invitation_of
from umbel.sim.federation.uplink import (
    CanaryUplink,
    MaskedUplink,
    PlainUplink,
    RoundSum,
    Uplink,
    model_part,
)
from umbel.sim.federation.window import (
    Cohort,
    DeviceTime,
    Played,
    SecurePlayed,
    SecureWindow,
    Window,
    seed_of,
    without_enough_work,
)
from umbel.sim.federation.world import World
from umbel.sim.fleet.fates import CohortAsk, Fates
from umbel.sim.fleet.faults import Fault
from umbel.sim.fleet.without import WithoutDevices
from umbel.sim.secure.exchange import seeded_bytes

_LOOK_AGAIN_S, _LOOK_AGAIN_S_MAX = 10.0, 3600.0  # virtual pauses between two looks when too few devices wait
_NOBODY_COMES_S = 30 * 86_400.0
_EVALUATION_BATCH = 256


@dataclass(frozen=True, slots=True)
class SimulatedAttempt:
    """An ended attempt, and the run after it."""

    record: RoundRecord  # as a coordinator would have it, times in virtual seconds
    standing: Standing
    model: ModelState
    device_time: DeviceTime  # which a coordinator does not know
    updates: UpdateFigures | None = None  # if `[measure]` needs them
    works: Mapping[ClientId, WorkDone] = field(default_factory=dict[ClientId, WorkDone])  # of clients that trained
    declines: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])  # clients that declined, and why


class _NobodyComes(Exception):
    """A round cannot begin because too few devices ever wait."""


class Federation:
    """One run in one world. Equal files, worlds and starts give equal records and models."""

    def __init__(self, world: World, standing: Standing, model: ModelState, memory: Memory | None = None) -> None:
        self.world, self.standing, self.model = world, standing, model
        self.memory = Memory() if memory is None else memory
        self._kept = dict[ClientId, Tensor]()  # after training in the attempt under way; as are the next three
        self._trained = dict[ClientId, WorkDone]()
        self._declines = dict[ClientId, str]()
        self._updates: UpdateSums | None = None
        require_possible(standing.file, model.layout, world.population, measure_themselves=world.clients is not None)

    def attempts(self) -> Iterator[SimulatedAttempt]:
        """Every attempt until the run is over. The run fails if a round cannot begin."""
        while not (self.standing.status.is_over or self.standing.status is RunStatus.PAUSED):
            try:
                attempt = self._attempt()
            except _NobodyComes as nobody:
                self.standing = replace(self.standing, status=RunStatus.FAILED, reason=str(nobody))
                return
            yield attempt

    def stop(self, reason: str) -> None:
        """End the run after the attempt that came last."""
        self.standing = replace(self.standing, status=RunStatus.FINISHED, reason=reason)

    # --- one attempt --------------------------------------------------------------------------------------------------

    def _attempt(self) -> SimulatedAttempt:
        opened = self._recruit(self.standing.state)
        if isinstance(opened, Abandoned):
            known = Known((), opened.opened_at, opened.closed_at, self.standing.history, self._evidence())
            return self._end(abandoned(self.standing, opened, known))
        if opened.plan.task.sends_updates:
            return self._train(opened)
        return self._evaluate(opened)

    def _recruit(self, state: Recruiting) -> Training | Abandoned:
        """Advance time until a cohort is drawn."""
        now, began = max(self.standing.now, state.since, state.not_before), state.since
        pause_s = _LOOK_AGAIN_S
        is_secure = state.plan.secure is not None
        random = seeded_bytes(f"{seed_of(state.plan)}/coordinator")(RANDOM_BYTES) if is_secure else b""
        while True:
            following, _ = advance(state, Gathered(now, self._candidates(state.plan, now), random))
            if not isinstance(following, Recruiting):
                assert isinstance(following, Training | Abandoned), "nothing has been reported yet"
                return following
            due = next_deadline(following, now)
            if due is None or due <= now:
                due, pause_s = now + pause_s, min(1.5 * pause_s, _LOOK_AGAIN_S_MAX)
            state, now = following, due
            if now > began + _NOBODY_COMES_S:
                raise _NobodyComes(
                    f"round {state.plan.number} did not begin within {_NOBODY_COMES_S / 86_400:.0f} days of virtual "
                    f"time: {state.why}; simulate more clients, let more of them be present ([fleet]), or ask for fewer"
                )

    def _candidates(self, plan: RoundPlan, now: float) -> tuple[Candidate, ...]:
        population = self.world.population
        waiting = self.world.fleet.waiting(now, plan.number, plan.attempt, population.n_clients, plan.n_wanted)
        sizes = population.sizes(waiting)
        return tuple(
            Candidate(client_name(number), size) for number, size in zip(waiting.tolist(), sizes.tolist(), strict=True)
        )

    def _train(self, opened: Training) -> SimulatedAttempt:
        """A round of training, plain or secure, or a canary."""
        self._trained, self._kept = {}, {}
        n_sent = self.model.layout.model.update.n_values
        self._updates = UpdateSums(n_sent) if self.world.measure.needs_updates else None
        played, uplink, works, declines = self._attempted(opened)
        found = None
        if isinstance(played.ended, Closing):
            try:
                found = uplink.result(played, played.ended, works)
            except TotalsRefused as error:
                played = played.spoiled(str(error))
        self._declines = played.declined(declines)
        if isinstance(played, SecurePlayed):
            self.memory.sites.sums += played.remembered
        known = self._known(played, played.book(uplink.sizes, declines))
        if isinstance(played.ended, Abandoned):
            return self._end(abandoned(self.standing, played.ended, known), device_time=played.device_time)
        assert found is not None, "a closed round has a sum, or has tried its clients"
        if isinstance(found, CanaryClosed):
            return self._end(finished(self.standing, played.ended, found, known), device_time=played.device_time)
        made = self._next_model(played.ended, found)
        end = finished(self.standing, played.ended, made, known)
        uplink.keep()
        self.memory.kept |= {name: self._kept[name] for name in played.ended.accepted if name in self._kept}
        if self.world.clients is not None:
            layout, scale = self.model.layout.update, self.standing.file.training_plan(opened.plan.number).control_scale
            as_read = {name: partial(control_as_read, layout, scale, read) for name, read in uplink.read.items()}
            self.world.clients.keep(played.ended.accepted, self.standing.model.version, as_read)
        self.memory.note(made.state)
        mean_bytes = sum(uplink.sizes.values()) // max(1, len(uplink.sizes))
        return self._end(end, made.state, mean_bytes, played.device_time)

    def _attempted(self, opened: Training) -> tuple[Played, Uplink, Sequence[WorkDone], dict[ClientId, str]]:
        """The attempt after its clients have trained, with their updates, their reports by rank, and who declined."""
        uplink = self._uplink(opened)
        cohort, reports = self._cohort(opened, uplink)
        if self.world.clients is not None:
            return self._attempted_by_clients(self.world.clients, opened, cohort)
        window, declines = _window(opened, cohort, uplink), {**self._unreadable(cohort), **cohort.sites.refused}
        if opened.plan.secure is not None:
            declines |= without_enough_work(opened.plan, cohort)
        played = self._played(window, uplink, reports, declines)
        return self._unmasked(played, window, uplink, declines), uplink, reports.works, declines

    def _attempted_by_clients(
        self, clients: OwnClients, opened: Training, cohort: Cohort
    ) -> tuple[Played, Uplink, Sequence[WorkDone], dict[ClientId, str]]:
        uplink = self._uplink(opened)
        attempt = OwnAttempt(
            clients,
            self.world.fleet,
            opened,
            self._offer(opened.plan),
            self.global_model,
            cohort,
            lambda: self._uplink(opened),
            lambda cohort: _window(opened, cohort, uplink),
            self._unreadable(cohort),
            holds_updates=self._holds_updates(opened),
        )
        played = attempt.play()
        declines = attempt.declines
        for names, values, works, weights in attempt.updates(played) if self._updates is not None else ():
            self._note(names, values, works, weights, attempt.uplink.refused)
        return self._unmasked(played, attempt.window, attempt.uplink, declines), attempt.uplink, attempt.works, declines

    def _holds_updates(self, opened: Training) -> bool:
        """Whether the updates of real clients stay in memory until the attempt is played to its end.

        Without devices every client reports at once and in time, so a plain round takes each update when it is there.
        """
        is_plain = opened.plan.secure is None and not opened.plan.task.tries_clients
        return not (is_plain and isinstance(self.world.fleet, WithoutDevices)) or self.world.measure.needs_updates

    @property
    def global_model(self) -> GlobalModel:
        """The newest model, as clients fetch it."""
        return GlobalModel(self.model.layout, self.model.published)

    def _offer(self, plan: RoundPlan) -> Assignment:
        """What the assignments of this attempt have in common. Masked updates carry the whole change."""
        file, codec = self.standing.file, CodecPlan() if plan.secure is not None else plan.codec
        return Assignment(
            id=assignment_id(plan.run, plan.number, plan.attempt, client_name(0), plan.task),
            run=plan.run,
            round=plan.number,
            attempt=plan.attempt,
            model=self.standing.model,
            training=file.training_of(plan),
            codec=codec,
            grid=plan.grid,
            sample_count_max=plan.sample_count_max,
            seed=plan.seed,
            window_s=plan.window_s,
            task=plan.task,
            share=file.share_of(plan.task),
            tensors=file.tensor_rules,
        )

    def scores(self) -> dict[str, float]:
        """The metrics of the newest model: on the test set, or as the experiment's own clients measure them."""
        if self.world.clients is not None:
            return self.world.clients.scores(self.global_model, self._offer(self.standing.state.plan))
        return meter_of(self.world, self.model).of(self.world.population.test)

    def scores_of_each(self) -> list[dict[str, float]]:
        """What each of the experiment's own clients says of the newest model; empty for one that measures nothing."""
        assert self.world.clients is not None, "the simulator measures the models of other experiments itself"
        return self.world.clients.scores_of_each(self.global_model, self._offer(self.standing.state.plan))

    def _unmasked(
        self, played: Played, window: Window | SecureWindow, uplink: Uplink, declines: Mapping[ClientId, str]
    ) -> Played:
        """A secure attempt played with masks, if this world has them."""
        if isinstance(window, SecureWindow) and isinstance(uplink, MaskedUplink) and self.world.masks:
            return window.play(declines, uplink.made)
        return played

    def _uplink(self, opened: Training) -> Uplink:
        plan, layout, ranks = opened.plan, self.model.layout, ranks_of(opened.cohort)
        if plan.secure is not None:
            return MaskedUplink(plan, layout, ranks, keeps=self.world.masks, sites=self.world.sites)
        if plan.task.tries_clients:
            return CanaryUplink(plan, layout, ranks)
        return PlainUplink(plan, layout, ranks, self.standing.model.version, self.memory)

    def _played(
        self, window: Window | SecureWindow, uplink: Uplink, reports: Reports, declines: dict[ClientId, str]
    ) -> Played:
        """Play the window, train the accepted clients, and play it again without clients whose update is refused, until
        all accepted clients have sent their work. Adds the refused ones to `declines`.

        No client of an abandoned attempt trains unless its sum is masked; then a client might have nothing to send.
        """
        cohort, trained = window.cohort, set[ClientId]()
        terms, keeps = self.standing.file.training_of(window.opened.plan), (self.memory.kept, self._kept)
        training = EngineTraining(self.world, self.model, terms, uplink, cohort, reports, self._note, *keeps)
        while True:
            played = window.play(declines)
            new = [i for i, name in enumerate(cohort.names) if name in played.ended.accepted and name not in trained]
            if not new or (isinstance(played.ended, Abandoned) and isinstance(window, Window)):
                break
            training.of(played.ended, np.array(new))
            trained.update(cohort.names[i] for i in new)
            if not uplink.refused.keys() - declines.keys():
                break
            declines |= uplink.refused
        return played

    def _cohort(self, opened: Training, uplink: Uplink) -> tuple[Cohort, Reports]:
        """The clients of the cohort, their fates, and their reports."""
        training = self.standing.file.training_of(opened.plan)
        names = sorted(opened.cohort)
        numbers = np.array([client_number(name) for name in names], dtype=np.int64)
        sizes = self.world.population.sizes(numbers)
        steps = steps_asked(training, sizes, self.standing.file.share_of(opened.plan.task))
        sites = self._sites(opened, names, uplink)
        fates = self._fates(opened, numbers, steps, training.batch_size, uplink.update_bytes, sites)
        self.memory.sites.spent |= sites.charged(names, fates)
        measures = training.evaluate and self.world.clients is None  # those measure by themselves
        held = self.world.population.holdout_of(numbers) if measures else None
        reports = Reports.before(sizes, steps, fates, held)
        return Cohort(names, fates, reports.works, sites), reports

    def _sites(self, opened: Training, names: Sequence[ClientId], uplink: Uplink | None = None) -> SitesInAttempt:
        """What the sites of this cohort decline. `uplink`: None of an evaluation."""
        sites, n_values, invitation = self.world.sites, self.model.layout.n_values, None
        if sites and isinstance(uplink, MaskedUplink):
            invitation = invitation_of(opened, self._offer(opened.plan), uplink.composition)
        return sites.in_attempt(opened.plan, names, n_values, self.memory.sites, invitation)

    def _note(
        self,
        names: Sequence[ClientId],
        values: Tensor,
        works: Sequence[WorkDone],
        weights: Sequence[int],
        refused: Mapping[ClientId, str],
    ) -> None:
        """Keep what `[measure]` needs of clients that have trained and are not refused."""
        if self._updates is None:
            return
        fit = [i for i, name in enumerate(names) if name not in refused]
        self._trained.update((names[i], works[i]) for i in fit)
        self._updates.add(
            [names[i] for i in fit], model_part(self.model.layout, values[fit]), [weights[i] for i in fit]
        )

    def _evaluate(self, opened: Training) -> SimulatedAttempt:
        """An evaluation: clients that did not train measure the model or, under masks, all clients."""
        if opened.plan.secure is not None:
            return self._evaluate_unseen(opened)
        cohort, nothing = self._measuring(opened)
        played, names = Window(opened, cohort).play(nothing), cohort.names
        self._declines = played.declined(nothing)
        known = self._known(played, played.book(dict.fromkeys(names, 0), nothing))
        if isinstance(played.ended, Abandoned):
            return self._end(abandoned(self.standing, played.ended, known), device_time=played.device_time)
        end = finished(self.standing, played.ended, EvaluationClosed(), known)
        return self._end(end, device_time=played.device_time)

    def _measuring(self, opened: Training, uplink: MaskedUplink | None = None) -> tuple[Cohort, dict[ClientId, str]]:
        """The cohort of an evaluation with what each client measured, and who declines, with the reason."""
        names = sorted(opened.cohort)
        numbers = np.array([client_number(name) for name in names], dtype=np.int64)
        sites = self._sites(opened, names, uplink)
        takes_part = np.array([name not in sites.refused for name in names])
        measured = iter(self._measured(opened, numbers[takes_part]) if takes_part.any() else ())
        refused = (sites.refused.get(name) for name in names)
        found = [next(measured) if why is None else ClientReport(None, why) for why in refused]
        nothing = {name: one.refusal for name, one in zip(names, found, strict=True) if one.work is None}
        works: list[Work] = [one.work or EvaluationDone(1, {}) for one in found]
        steps = np.array([max(1, -(-one.sample_count // _EVALUATION_BATCH)) for one in works], dtype=np.int64)
        fates = self._fates(opened, numbers, steps, _EVALUATION_BATCH, uplink.update_bytes if uplink else 0, sites)
        return Cohort(names, fates, works, sites), nothing

    def _evaluate_unseen(self, opened: Training) -> SimulatedAttempt:
        """An evaluation under masks. A client without held-out data takes part with zeros, so that nobody sees it."""
        uplink = MaskedUplink(
            opened.plan, self.model.layout, ranks_of(opened.cohort), keeps=self.world.masks, sites=self.world.sites
        )
        cohort, nothing = self._measuring(opened, uplink)
        empty = {name for name, why in nothing.items() if why == NOTHING_HELD_OUT}
        declines = {name: why for name, why in nothing.items() if name not in empty}
        window = SecureWindow(opened, cohort, uplink.composition)
        played = window.play(declines)
        for name, work in zip(cohort.names, cohort.works, strict=True):
            if name in played.ended.accepted:
                assert isinstance(work, EvaluationDone), "it only measures"
                uplink.add_measured(name, None if name in empty else work)
        unmasked, made = self._unmasked(played, window, uplink, declines), None
        assert isinstance(unmasked, SecurePlayed), "a secure window gives one"
        played = unmasked
        if isinstance(played.ended, Closing):
            made = EvaluationClosed(uplink.totals(sorted(played.ended.accepted), played.sums))
        self._declines = played.declined(declines)
        self.memory.sites.sums += played.remembered
        known = self._known(played, played.book(uplink.sizes, declines))
        if isinstance(played.ended, Abandoned):
            return self._end(abandoned(self.standing, played.ended, known), device_time=played.device_time)
        assert made is not None, "a closed evaluation has a sum"
        return self._end(finished(self.standing, played.ended, made, known), device_time=played.device_time)

    def _measured(self, opened: Training, numbers: Indices) -> list[ClientReport]:
        """What each client says of the model."""
        if self.world.clients is not None:
            return self.world.clients.evaluations(self.global_model, self._offer(opened.plan), numbers)
        held = self.world.population.holdout_of(numbers)
        assert held is not None, "checked when the federation was made"
        return [ClientReport(one, "" if one else NOTHING_HELD_OUT) for one in evaluations(self.world, self.model, held)]

    # --- inputs ----------------------------------------------------------------------------------------------

    def _fates(
        self,
        opened: Training,
        numbers: Indices,
        steps: Indices,
        batch_size: int,
        update_bytes: int,
        sites: SitesInAttempt,
    ) -> Fates:
        expected = min(update_bytes, self.standing.update_bytes or update_bytes)
        names, version = sorted(opened.cohort), self.standing.model.version
        ask = CohortAsk(
            steps=steps,
            batch_size=batch_size,
            down_bytes=self.memory.down_bytes(names, version, self.model),
            update_bytes=np.array([expected]),
            window_s=opened.plan.window_s,
            secure=opened.plan.secure is not None,
            update_bytes_max=update_bytes,
        )
        drawn = self.world.fleet.fates(numbers, opened.plan.number, opened.plan.attempt, opened.opened_at, ask)
        fates = sites.fates_of(names, drawn)
        in_time = fates.fetched_s < np.minimum(fates.lost_s, opened.plan.window_s)
        self.memory.fetched((name for name, has_it in zip(names, in_time.tolist(), strict=True) if has_it), version)
        return fates

    def _unreadable(self, cohort: Cohort) -> dict[ClientId, str]:
        """Clients whose bytes are no update, with the reason: the coordinator refuses them."""
        words = {Fault.GARBAGE: "the update is no update of this round", Fault.LENGTH: "the update has a wrong length"}
        kinds = zip(cohort.names, cohort.fates.fault.tolist(), strict=True)
        return {name: words[Fault(kind)] for name, kind in kinds if kind in words}

    def _next_model(self, closing: Closing, found: RoundSum) -> SummedModel:
        file = self.standing.file
        step = server_step(file, closing, found.totals)
        try:
            state = self.model.after(found.mean, step, file.downlink.change_step)
        except ValueError as error:
            raise SimulationError(f"round {closing.plan.number} makes no model: {error}") from error
        return SummedModel(state, found.sum_sha256, found.update_rms, found.totals)

    def _known(self, played: Played, book: Book) -> Known:
        book = replace(book, keeps_metrics=self.standing.file.retention.per_site_metrics)
        clients = client_records(played.ended, book)
        return Known(clients, book.opened_at, played.at, self.standing.history, self._evidence())

    def _evidence(self) -> TuningFacts:
        """For self-tuning."""
        return TuningFacts(self.standing.observations, self.model.file.size_bytes, self.world.population.n_clients)

    # --- results -----------------------------------------------------------------------------------------------

    def _end(
        self,
        end: RoundEnd,
        model: ModelState | None = None,
        update_bytes: int | None = None,
        device_time: DeviceTime | None = None,
    ) -> SimulatedAttempt:
        if model is not None:
            self.model = model
        self.standing = self.standing.after(end, update_bytes)
        trained, self._trained = self._trained, {}
        declines, self._declines = self._declines, {}
        updates, self._updates = None if self._updates is None else self._updates.figures(), None
        spent = device_time or DeviceTime()
        return SimulatedAttempt(end.record, self.standing, self.model, spent, updates, trained, declines)


def _window(opened: Training, cohort: Cohort, uplink: Uplink) -> Window | SecureWindow:
    if isinstance(uplink, MaskedUplink):
        return SecureWindow(opened, cohort, uplink.composition)
    return Window(opened, cohort)
