"""The state of a simulated run between two attempts, and whether it can begin with these clients."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.privacy.section import require_private_model
from umbel.aggregation.round.states import Recruiting
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import Fate, VersionRecord
from umbel.aggregation.run.report_times import Observation, observed
from umbel.aggregation.run.run_end import KeptVersion, RoundEnd, versions_after
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.run.tuning import OBSERVATIONS_MAX
from umbel.sim.data.population import Population
from umbel.sim.federation.versions import ModelState


class SimulationError(Exception):
    """A simulation cannot continue: one sentence that says what to do."""


def require_possible(file: RunFile, layout: Layout, population: Population) -> None:
    """Raise `SimulationError`, or `ValueError` for a model that cannot be private."""
    if file.privacy is not None:
        require_private_model(layout)
    measures = file.evaluation is not None or file.training.evaluate or any(one.evaluate for one in file.override)
    if measures and population.holdout_of(np.zeros(1, dtype=np.int64)) is None:
        raise SimulationError(
            "clients hold nothing back to measure the model on, as this run asks them to: set holdout = 0.1 in "
            "[partition], or leave [evaluation] and training.evaluate out (the model is scored in one place anyway)"
        )
    for rounds in _rounds_sections(file):
        counts_clients = rounds.weighting is Weighting.SAMPLES  # else the target counts draws
        for name, wanted in (("target", rounds.target if counts_clients else 1), ("minimum", rounds.minimum)):
            if wanted > population.n_clients:
                raise SimulationError(
                    f"rounds.{name} is {wanted:,}, and there are {counted(population.n_clients, 'client')}: no round "
                    f"would have so many reports; set it to {population.n_clients} at most, or simulate more clients"
                )


def _rounds_sections(file: RunFile) -> Iterator[RoundsSection]:
    """The sections from the beginning of each override, and after its end."""
    starts = {1, *(one.first_round for one in file.override), *((one.last_round or 0) + 1 for one in file.override)}
    return (file.rounds_of(number) for number in sorted(starts) if number <= file.rounds.count)


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a run between two attempts (`aggregation.run_end.Run`): all that determines its future but the
    model.
    """

    file: RunFile
    model: ModelRef
    state: Recruiting
    status: RunStatus = RunStatus.RUNNING
    reason: str = ""
    now: float = 0.0  # virtual seconds
    observations: tuple[Observation, ...] = ()  # the newest report times
    history: tuple[KeptVersion, ...] = ()  # of a run that looks back at versions
    update_bytes: int | None = None  # the length of updates in the last round; None before the first

    def after(self, end: RoundEnd, update_bytes: int | None) -> "Standing":
        """The state after this ending. `update_bytes`: the mean length of updates in it; None without any."""
        seen: deque[Observation] = deque(self.observations, maxlen=OBSERVATIONS_MAX)
        if self.file.rounds.self_tuning:
            seen.extend(observed(end.record))
        return replace(
            self,
            model=self.model if end.model is None else end.model.ref,
            state=self.state if end.next_state is None else end.next_state,
            status=end.status,
            reason=f"{end.reason}{_said(end)}" if end.status is RunStatus.FAILED else end.reason,
            now=end.record.opened_at + end.record.wall_s,
            observations=tuple(seen),
            history=versions_after(self.history, end, 0.0),
            update_bytes=update_bytes or self.update_bytes,
        )


def beginning(file: RunFile, model: ModelState) -> Standing:
    """The state before the first attempt."""
    ref = model.ref(0)
    first = VersionRecord(0, ref.sha256, ref.size_bytes, 0.0)
    history = (KeptVersion(first, ref.sha256),) if file.stop is not None else ()
    return Standing(file, ref, Recruiting(file.first_plan(model.layout.n_values), since=0.0), history=history)


def _said(end: RoundEnd) -> str:
    """Why clients declined in the last attempt."""
    declined = [one.reason for one in end.record.clients if one.fate is Fate.DECLINED]
    if not declined:
        return ""
    return (
        f"; {len(declined)} of {len(end.record.clients)} have declined the last time, such as for this: {declined[0]}"
    )
