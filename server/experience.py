"""What the ended attempts of a run have shown of report times: what a self-tuning run goes by.

Held in memory, taken from the stored records; attempts that another replica ended are found at the next look.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from umbel.aggregation.records import RoundRecord
from umbel.aggregation.report_times import Observation, observed
from umbel.aggregation.tuning import OBSERVATIONS_MAX, Evidence
from umbel.aggregation.types import RunId, Task

Newest = Callable[[RunId, int], Awaitable[Sequence[RoundRecord]]]  # so many records, of those that ended last
_FIRST_LOOK, _NEXT_LOOK, _GROWTH, _ATTEMPTS_MAX = 4, 8, 4, 4096


class Experience:
    """The newest `OBSERVATIONS_MAX` observations of one run, attempt by attempt."""

    def __init__(self, run: RunId, newest: Newest) -> None:
        self._run = run
        self._newest = newest
        self._attempts: dict[tuple[int, int, Task, float], tuple[Observation, ...]] = {}
        self._count = 0

    async def start(self) -> None:
        """Take up what is stored: as many attempts as it takes, and no more, for they may be large."""
        n_wanted = _FIRST_LOOK
        while True:
            records = await self._newest(self._run, n_wanted)
            self._attempts, self._count = {}, 0
            for record in sorted(records, key=lambda record: record.opened_at):
                self.note(record)
            n_read = sum(len(record.clients) for record in records)
            if len(records) < n_wanted or n_read >= OBSERVATIONS_MAX or n_wanted >= _ATTEMPTS_MAX:
                return
            n_wanted *= _GROWTH

    async def look(self) -> None:
        """Take up what other replicas have ended lately."""
        for record in await self._newest(self._run, _NEXT_LOOK):
            self.note(record)

    def note(self, record: RoundRecord) -> None:
        """An attempt has ended; noted twice, it counts once."""
        key = (record.round, record.attempt, record.task, record.opened_at)
        if key in self._attempts:
            return
        self._attempts[key] = shown = observed(record)
        self._count += len(shown)
        while self._count > OBSERVATIONS_MAX and len(self._attempts) > 1:
            oldest = next(iter(self._attempts))
            self._count -= len(self._attempts.pop(oldest))

    def evidence(self, model_bytes: int, population: int | None, waiting: Mapping[str, int]) -> Evidence:
        """What is known now. `population`: distinct clients seen within a day; `waiting`: how many wait, by tier."""
        observations = tuple(one for shown in self._attempts.values() for one in shown)
        return Evidence(observations, model_bytes, population, waiting)
