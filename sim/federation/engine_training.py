"""Train clients of an attempt with the simulator's engine, and hand on their updates, reports and what they keep."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import Tensor

from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.reports import Probe, WorkDone
from umbel.aggregation.round.states import Abandoned, Closing
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.types import ClientId
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.model import start_vector
from umbel.sim.engines.work import Changes, CohortWork
from umbel.sim.federation.evaluating import evaluations, meter_of
from umbel.sim.federation.kept import Keeping, one_step_over_all
from umbel.sim.federation.local_work import Reports, as_taught, client_seeds, steps_asked
from umbel.sim.federation.uplink import Uplink, divide_by_steps, probe_of, sent_part, weigh
from umbel.sim.federation.window import Cohort
from umbel.sim.federation.world import World
from umbel.sim.fleet.faults import Fault

Note: TypeAlias = Callable[
    [Sequence[ClientId], Tensor, Sequence[WorkDone], Sequence[int], Mapping[ClientId, str]], None
]
"""Notes clients that have trained: their names, updates, reports and weights; and the refused ones, with the reason."""


@dataclass(slots=True)
class EngineTraining:
    """The training of one attempt's clients. `training`: of its round.

    `kept`: what the run's algorithm has had clients keep until now, by client. `left`: gets what each that has trained
    keeps if its update counts.
    """

    world: World
    model: ModelState
    training: TrainingPlan
    uplink: Uplink
    cohort: Cohort
    reports: Reports
    note: Note
    kept: Mapping[ClientId, Tensor]
    left: dict[ClientId, Tensor]

    def of(self, ended: Closing | Abandoned, who: Indices) -> None:
        """Train these clients, by rank, note their reports, and take their updates. `ended`: the window's end."""
        world, plan, layout, cohort = self.world, ended.plan, self.model.layout, self.cohort
        numbers, training, reports = cohort.fates.devices, self.training, self.reports
        data = as_taught(world.population.data_of(numbers[who]), cohort.fates.fault[who])
        steps = np.maximum(cohort.fates.steps_done[who], 1)
        names = [cohort.names[i] for i in who.tolist()]
        if reports.held is not None:
            measured = (one.evaluation if one else {} for one in evaluations(world, self.model, reports.held.part(who)))
            reports.note_evaluations(who.tolist(), measured)
        terms, start_losses = training.fair_terms, list[float]()
        if terms is not None:
            start_losses = meter_of(world, self.model).training_losses(data)
        start = start_vector(layout.model, self.model.published)
        codec = CodecPlan() if plan.secure is not None else plan.codec  # masked updates carry the whole change
        keeping = Keeping.of(training, layout, self.model.published, [self.kept.get(name) for name in names])
        pulls = None if keeping is None else keeping.pulls
        work = CohortWork(data, client_seeds(plan, names), steps, training, codec, pulls)
        assert world.engine is not None, "clients of [clients] train themselves"
        if keeping is not None and keeping.needs_gradients:
            keeping.note_gradients(world.engine.train(start, one_step_over_all(work)))
        for changes in world.engine.train(start, work):
            chosen = who[changes.positions]
            control = None if keeping is None else keeping.sent(changes, steps)
            kinds = cohort.fates.fault[chosen]
            if (kinds != Fault.NONE).any():
                world.fleet.faults.spoil(changes.values, kinds, numbers[chosen], plan.number, plan.attempt)
            ranks = chosen.tolist()
            reports.note(ranks, changes.loss.tolist())
            names = [cohort.names[rank] for rank in ranks]
            works, weights = [reports.works[i] for i in ranks], [ended.accepted[name].weight for name in names]
            if training.is_normalised:
                divide_by_steps(layout, changes.values, [one.steps_done for one in works])
            if terms is not None:
                losses = [start_losses[position] for position in changes.positions.tolist()]
                reports.note_fair(ranks, losses, weigh(layout, changes.values, losses, terms))
            sent = sent_part(layout, changes.values, control)
            self.uplink.add(names, sent, works, weights)
            if keeping is not None:
                after = keeping.kept(changes, [self.uplink.read.pop(name, None) for name in names])
                self.left.update((name, one) for name, one in zip(names, after, strict=True) if one is not None)
            self.note(names, sent, works, weights, self.uplink.refused)
            if plan.task.tries_clients:
                reports.note_probes(ranks, self._probes(chosen, changes))

    def _probes(self, who: Indices, changes: Changes) -> list[Probe]:
        """The probes of these clients."""
        fates = self.cohort.fates
        steps_full = steps_asked(self.training, self.world.population.sizes(fates.devices[who]), 1.0)
        losses = zip(changes.first_loss.tolist(), changes.last_loss.tolist(), changes.loss.tolist(), strict=True)
        facts = zip(
            steps_full.tolist(), fates.step_s[who].tolist(), fates.lines.down[who].tolist(), losses, strict=True
        )
        return [probe_of(*fact) for fact in facts]
