"""Where a run that is held in memory stands between two attempts: all that determines its future but the model."""

from collections import deque
from dataclasses import dataclass, replace

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.round.states import Recruiting
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.run.records import Fate, VersionRecord
from umbel.aggregation.run.report_times import Observation, observed
from umbel.aggregation.run.run_end import KeptVersion, RoundEnd, versions_after
from umbel.aggregation.run.tuning import OBSERVATIONS_MAX


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a run between two attempts (`run_end.Run`)."""

    file: RunFile
    model: ModelRef
    state: Recruiting
    status: RunStatus = RunStatus.RUNNING
    reason: str = ""
    now: float = 0.0  # seconds since its start; in a simulation virtual ones
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
    return Standing(file, ref, Recruiting(file.first_plan(model.layout.update.n_values), since=0.0), history=history)


def _said(end: RoundEnd) -> str:
    """Why clients declined in the last attempt."""
    declined = [one.reason for one in end.record.clients if one.fate is Fate.DECLINED]
    if not declined:
        return ""
    return (
        f"; {len(declined)} of {len(end.record.clients)} have declined the last time, such as for this: {declined[0]}"
    )
