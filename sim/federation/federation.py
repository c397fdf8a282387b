"""A simulated run, round after round: the coordinator's own machine and endings, in virtual time.

```
   +--> who waits (fleet) -> recruit -> what becomes of each (fleet) -> the window -> who counts trains (engine)
   |                                                                                          |
   +------- the next attempt, round or evaluation (aggregation/run/endings.py) <--- write, read, sum, step (codec)
```

What is of the coordinator here is `umbel.aggregation`: `advance`, `choose`, the codecs and their sum, `finished` and
`abandoned`. What is of the simulation: when what happens, and how the clients' work is done.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from umbel.aggregation.audit.bundle import sum_sha256
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.layout import HasMean
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.round import RoundPlan, TrainingPlan, ranks_of
from umbel.aggregation.reports import EvaluationDone, Probe, Work
from umbel.aggregation.round.machine import advance, next_deadline
from umbel.aggregation.round.states import Abandoned, Closing, Gathered, Recruiting, Training
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.endings import EvaluationClosed, Known, abandoned, finished
from umbel.aggregation.run.ledger import client_records
from umbel.aggregation.run.records import ClientRecord, RoundRecord
from umbel.aggregation.run.run_end import RoundEnd
from umbel.aggregation.run.tuning import TuningFacts
from umbel.aggregation.secagg.numbers.totals import TotalsRefused
from umbel.aggregation.secagg.turns import RANDOM_BYTES
from umbel.aggregation.types import ClientId
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData, Population, client_name, client_number
from umbel.sim.engines.local.resident import start_vector
from umbel.sim.engines.work import Changes, CohortWork, Engine, LocalOptimizer
from umbel.sim.federation.canary_uplink import CanaryUplink, probe_of
from umbel.sim.federation.local_work import Meter, as_taught, client_seeds, steps_asked
from umbel.sim.federation.masked_uplink import MaskedUplink
from umbel.sim.federation.memory import Memory
from umbel.sim.federation.possible import SimulationError, require_possible
from umbel.sim.federation.reports import Reports
from umbel.sim.federation.secure_window import SecureWindow, seed_of, without_enough_work
from umbel.sim.federation.standing import Standing
from umbel.sim.federation.uplink import Uplink
from umbel.sim.federation.versions import ModelState, Summed
from umbel.sim.federation.window import Cohort, Toil, book_of, play, toil_of
from umbel.sim.fleet.fates import CohortAsk, Fates
from umbel.sim.fleet.faults import Fault
from umbel.sim.fleet.fleet import Devices
from umbel.sim.secure.exchange import seeded_bytes

_LOOK_AGAIN_S, _LOOK_AGAIN_S_MAX = 10.0, 3600.0  # in virtual time, where too few devices wait: ever more seldom
_NOBODY_COMES_S = 30 * 86_400.0
_EVALUATION_BATCH = 256


@dataclass(frozen=True, slots=True)
class World:
    """What a run meets: the clients with their data, their devices, and the machine that does their work here.

    `masks`: whether the clients of a secure round make keys and masks, which their sum does not hang on.
    """

    population: Population
    fleet: Devices
    engine: Engine
    meter: Meter
    optimizer: LocalOptimizer = field(default_factory=LocalOptimizer)
    masks: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """An ended attempt. `record`: as a coordinator would tell it, times in virtual seconds; `toil`: what it cost the
    devices, which a coordinator does not know.
    """

    record: RoundRecord
    standing: Standing
    model: ModelState
    toil: Toil


class _NobodyComes(Exception):
    """A round does not begin, however long one waits."""


class Federation:
    """One run in one world. The same file, world and beginning give the same records and the same models."""

    def __init__(self, world: World, standing: Standing, model: ModelState, memory: Memory | None = None) -> None:
        self.world, self.standing, self.model = world, standing, model
        self.memory = Memory() if memory is None else memory
        require_possible(standing.file, model.layout, world.population)

    def attempts(self) -> Iterator[Attempt]:
        """Every attempt until the run is over. It fails where nobody ever comes."""
        while not (self.standing.status.is_over or self.standing.status is RunStatus.PAUSED):
            try:
                attempt = self._attempt()
            except _NobodyComes as nobody:
                self.standing = replace(self.standing, status=RunStatus.FAILED, reason=str(nobody))
                return
            yield attempt

    # --- one attempt --------------------------------------------------------------------------------------------------

    def _attempt(self) -> Attempt:
        opened = self._recruit(self.standing.state)
        if isinstance(opened, Abandoned):
            return self._end(abandoned(self.standing, opened, self._known(opened, (), opened.opened_at)))
        if opened.plan.task.sends_updates:
            return self._train(opened)
        return self._evaluate(opened)

    def _recruit(self, state: Recruiting) -> Training | Abandoned:
        """Until a cohort is drawn: time goes on to the next moment at which that may be."""
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
                    f"round {state.plan.number} does not begin: for {_NOBODY_COMES_S / 86_400:.0f} days {state.why}; "
                    "simulate more clients, let more of them be there ([fleet]), or ask for fewer"
                )

    def _candidates(self, plan: RoundPlan, now: float) -> tuple[Candidate, ...]:
        population = self.world.population
        waiting = self.world.fleet.waiting(now, plan.number, plan.attempt, population.n_clients, plan.n_wanted)
        sizes = population.sizes(waiting)
        return tuple(
            Candidate(client_name(number), size) for number, size in zip(waiting.tolist(), sizes.tolist(), strict=True)
        )

    def _train(self, opened: Training) -> Attempt:
        """A round of training, or a canary. Whose report counts is played first; those train; and where that shows that
        one of them will not send its work, it is played again without it.
        """
        plan, ranks = opened.plan, ranks_of(opened.cohort)
        if plan.secure is not None:
            return self._train_masked(opened, MaskedUplink(plan, self.model.layout, ranks, keeps=self.world.masks))
        uplink = (
            CanaryUplink(plan, self.model.layout, ranks)
            if plan.task.tries_clients
            else Uplink(plan, self.model.layout, ranks, self.standing.model.version, self.memory)
        )
        (cohort, reports), trained = self._cohort(opened, uplink.update_bytes), set[ClientId]()
        declines = self._unreadable(cohort)
        while True:
            ended = play(opened, cohort, declines)
            new = [i for i, name in enumerate(cohort.names) if name in ended.accepted and name not in trained]
            if not new or isinstance(ended, Abandoned):
                break
            self._do(uplink, cohort, reports, ended, np.array(new))
            trained.update(cohort.names[i] for i in new)
            if not uplink.refused.keys() - declines.keys():
                break
            declines |= uplink.refused
        book = book_of(ended, cohort, uplink.sizes, declines)
        known = self._known(ended, client_records(ended, book), book.opened_at)
        toil = toil_of(ended, cohort)
        if isinstance(ended, Abandoned):
            return self._end(abandoned(self.standing, ended, known), toil=toil)
        if isinstance(uplink, CanaryUplink):
            trial = uplink.trial({name: reports.works[ranks[name]] for name in ended.accepted})
            return self._end(finished(self.standing, ended, trial, known), toil=toil)
        mean_bytes = sum(uplink.sizes.values()) // max(1, len(uplink.sizes))
        model = self._next_model(ended, uplink)
        self.memory.left = uplink.left
        self.memory.note(model.state)
        return self._end(finished(self.standing, ended, model, known), model.state, mean_bytes, toil)

    def _train_masked(self, opened: Training, uplink: MaskedUplink) -> Attempt:
        """The same under masks, until the sum is open. Who is in a sum that is not opened trains, too: it might have
        nothing to send.
        """
        (cohort, reports), trained = self._cohort(opened, uplink.update_bytes), set[ClientId]()
        window = SecureWindow(opened, cohort, uplink.composition)
        declines = self._unreadable(cohort) | without_enough_work(opened.plan, cohort)
        while True:
            played = window.play(declines)
            new = [i for i, name in enumerate(cohort.names) if name in played.ended.accepted and name not in trained]
            if not new:
                break
            self._do(uplink, cohort, reports, played.ended, np.array(new))
            trained.update(cohort.names[i] for i in new)
            if not uplink.refused.keys() - declines.keys():
                break
            declines |= uplink.refused
        if self.world.masks:
            played = window.play(declines, uplink.made)
        model = None
        if isinstance(played.ended, Closing):
            try:
                model = self._model_of(played.ended, uplink, played.sums)
            except TotalsRefused as error:
                played = played.spoiled(str(error))
        book = played.book(uplink.sizes, declines)
        known = self._known(played.ended, client_records(played.ended, book), book.opened_at, played.at)
        toil = toil_of(played.ended, played.cohort)
        if isinstance(played.ended, Abandoned):
            return self._end(abandoned(self.standing, played.ended, known), toil=toil)
        assert model is not None, "who has closed has a sum"
        self.memory.note(model.state)
        return self._end(finished(self.standing, played.ended, model, known), model.state, uplink.update_bytes, toil)

    def _cohort(self, opened: Training, update_bytes: int) -> tuple[Cohort, Reports]:
        """Who is asked to train, what becomes of each, and what each would say of it."""
        training = self.standing.file.training_plan(opened.plan.number)
        names = sorted(opened.cohort)
        numbers = np.array([client_number(name) for name in names], dtype=np.int64)
        sizes = self.world.population.sizes(numbers)
        steps = steps_asked(training, sizes, self.standing.file.share_of(opened.plan.task))
        fates = self._fates(opened, numbers, steps, training.batch_size, update_bytes)
        held = self.world.population.holdout_of(numbers) if training.evaluate else None
        reports = Reports.before(sizes, steps, fates, held)
        return Cohort(names, fates, reports.works), reports

    def _do(
        self,
        uplink: Uplink | MaskedUplink | CanaryUplink,
        cohort: Cohort,
        reports: Reports,
        ended: Closing | Abandoned,
        who: Indices,
    ) -> None:
        """Have these clients train, note what they tell of it, and take in what they send."""
        world, plan, numbers = self.world, ended.plan, cohort.fates.devices
        training = self.standing.file.training_plan(plan.number)
        data = as_taught(world.population.data_of(numbers[who]), cohort.fates.fault[who])
        steps = np.maximum(cohort.fates.steps_done[who], 1)
        seeds = client_seeds(plan, [cohort.names[i] for i in who.tolist()])
        if reports.held is not None:
            measured = (one.evaluation if one else {} for one in self._evaluations(reports.held.part(who)))
            reports.note_evaluations(who.tolist(), measured)
        start = start_vector(self.model.layout, self.model.published)
        codec = CodecPlan() if plan.secure is not None else plan.codec  # under masks all of a change can be sent
        work = CohortWork(data, seeds, steps, training, world.optimizer, codec, numbers[who])
        for changes in world.engine.train(start, work):
            chosen = who[changes.positions]
            kinds = cohort.fates.fault[chosen]
            if (kinds != Fault.NONE).any():
                world.fleet.faults.spoil(changes.values, kinds, numbers[chosen], plan.number, plan.attempt)
            ranks = chosen.tolist()
            reports.note(ranks, changes.loss.tolist())
            names = [cohort.names[rank] for rank in ranks]
            match uplink:
                case CanaryUplink():
                    uplink.add(names, changes.values)
                    reports.note_probes(ranks, self._probes(cohort.fates, chosen, changes, training))
                case MaskedUplink():
                    uplink.add(names, changes.values, [reports.works[rank] for rank in ranks])
                case _:
                    uplink.add(names, changes.values, [ended.accepted[name].weight for name in names])

    def _probes(self, fates: Fates, who: Indices, changes: Changes, training: TrainingPlan) -> list[Probe]:
        """What these have measured of themselves."""
        steps_full = steps_asked(training, self.world.population.sizes(fates.devices[who]), 1.0)
        losses = zip(changes.first_loss.tolist(), changes.last_loss.tolist(), changes.loss.tolist(), strict=True)
        facts = zip(
            steps_full.tolist(), fates.step_s[who].tolist(), fates.lines.down[who].tolist(), losses, strict=True
        )
        return [probe_of(*fact) for fact in facts]

    def _evaluate(self, opened: Training) -> Attempt:
        """An evaluation by clients that did not train: who counts measures the model."""
        names = sorted(opened.cohort)
        numbers = np.array([client_number(name) for name in names], dtype=np.int64)
        held = self.world.population.holdout_of(numbers)
        assert held is not None, "checked when the federation was made"
        steps = np.maximum(1, -(-held.sizes // _EVALUATION_BATCH))
        fates = self._fates(opened, numbers, steps, _EVALUATION_BATCH, 0)
        nothing = {name: "this client has no held-out data" for name, n in zip(names, held.sizes, strict=True) if not n}
        found = self._evaluations(held)
        works: list[Work] = [EvaluationDone(1, {}) if one is None else one for one in found]
        cohort = Cohort(names, fates, works)
        ended = play(opened, cohort, nothing)
        book = book_of(ended, cohort, dict.fromkeys(names, 0), nothing)
        known = self._known(ended, client_records(ended, book), book.opened_at)
        toil = toil_of(ended, cohort)
        if isinstance(ended, Abandoned):
            return self._end(abandoned(self.standing, ended, known), toil=toil)
        return self._end(finished(self.standing, ended, EvaluationClosed(), known), toil=toil)

    def _evaluations(self, held: CohortData) -> list[EvaluationDone | None]:
        """Of clients that hold this back; None of one that holds nothing back."""
        self.world.meter.load(self.model.layout.full_state(self.model.published))
        means = self.world.meter.of_each(held)
        return [
            EvaluationDone(n, {name: value for name, value in one.items() if math.isfinite(value)}) if n else None
            for n, one in zip(held.sizes.tolist(), means, strict=True)
        ]

    # --- what it goes by ----------------------------------------------------------------------------------------------

    def _fates(self, opened: Training, numbers: Indices, steps: Indices, batch_size: int, update_bytes: int) -> Fates:
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
        fates = self.world.fleet.fates(numbers, opened.plan.number, opened.plan.attempt, opened.opened_at, ask)
        in_time = fates.fetched_s < np.minimum(fates.lost_s, opened.plan.window_s)
        self.memory.fetched((name for name, has_it in zip(names, in_time.tolist(), strict=True) if has_it), version)
        return fates

    def _unreadable(self, cohort: Cohort) -> dict[ClientId, str]:
        """Whose bytes are no update: the coordinator refuses them, and the client gives up."""
        words = {Fault.GARBAGE: "the update is no update of this round", Fault.LENGTH: "the update has a wrong length"}
        kinds = zip(cohort.names, cohort.fates.fault.tolist(), strict=True)
        return {name: words[Fault(kind)] for name, kind in kinds if kind in words}

    def _next_model(self, closing: Closing, uplink: Uplink) -> Summed:
        if uplink.total.total_weight != closing.aggregate.total_weight:
            raise AssertionError("the sum is not that of the accepted reports")
        state = self._after(closing, uplink.codec.mean(uplink.total, uplink.parts))
        return Summed(state, sum_sha256(uplink.total), uplink.codec.update_rms(uplink.total))

    def _model_of(self, closing: Closing, uplink: MaskedUplink, sums: tuple[Tensor, Tensor] | None) -> Summed:
        """The next model, of an open sum. Raises `TotalsRefused`."""
        n_draws = sum(closing.cohort[client].draws for client in closing.accepted)
        found = uplink.totals(sorted(closing.accepted), n_draws, sums)
        return Summed(self._after(closing, found.mean), found.sum_sha256, None, found)

    def _after(self, closing: Closing, mean: HasMean) -> ModelState:
        file = self.standing.file
        rate, change_step = file.aggregation.server_learning_rate, file.downlink.change_step
        try:
            return self.model.after(mean, rate, change_step)
        except ValueError as error:
            raise SimulationError(f"no model can be made of round {closing.plan.number}: {error}") from error

    def _known(
        self,
        ended: Closing | Abandoned,
        clients: tuple[ClientRecord, ...],
        opened_at: float,
        now: float | None = None,
    ) -> Known:
        """`now`: when it was known; None: as it closed."""
        evidence = TuningFacts(self.standing.observations, self.model.file.size_bytes, self.world.population.n_clients)
        return Known(clients, opened_at, ended.closed_at if now is None else now, self.standing.history, evidence)

    # --- what it leaves -----------------------------------------------------------------------------------------------

    def _end(
        self,
        end: RoundEnd,
        model: ModelState | None = None,
        update_bytes: int | None = None,
        toil: Toil | None = None,
    ) -> Attempt:
        if model is not None:
            self.model = model
        self.standing = self.standing.after(end, update_bytes)
        return Attempt(end.record, self.standing, self.model, toil or Toil())
