"""What the ended attempts of a run have shown of report times: what a self-tuning run goes by. Held in memory."""

from collections import deque
from collections.abc import Mapping

from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.report_times import Observation, observed
from umbel.aggregation.run.tuning import OBSERVATIONS_MAX, TuningFacts


class Experience:
    """The newest `OBSERVATIONS_MAX` observations of one run, attempt by attempt."""

    def __init__(self) -> None:
        self._attempts: deque[tuple[Observation, ...]] = deque()
        self._count = 0

    def note(self, record: RoundRecord) -> None:
        """An attempt has ended. One that is larger than all that is kept is kept."""
        if not (shown := observed(record)):
            return
        self._attempts.append(shown)
        self._count += len(shown)
        while self._count > OBSERVATIONS_MAX and len(self._attempts) > 1:
            self._count -= len(self._attempts.popleft())

    def evidence(self, model_bytes: int, population: int | None, waiting: Mapping[str, int]) -> TuningFacts:
        """What is known now. `population`: distinct clients seen within a day; `waiting`: how many wait, by tier."""
        observations = tuple(one for shown in self._attempts for one in shown)
        return TuningFacts(observations, model_bytes, population, waiting)
