"""The runs that a client may take part in, for agents: one process of a site that takes part in many runs.

Nothing here grows with the number of runs that are over, and nothing but the caller's enrolment is looked up. A request
that names the mark of the last answer is held open until a run is added, changes its status, or ends. So an agent
learns of it at once, and asks about twice a minute.
"""

import hashlib
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import TypeAdapter

from umbel.aggregation.messages import OPEN_RUNS_PAGE_MAX, OpenRun, OpenRuns
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.types import ClientId
from umbel.server.devices.fitness import stranger
from umbel.server.devices.waiting import FLEET_HELD_MAX, HeldRequest
from umbel.server.runs.coordinator import RUNS_BELL, Coordinator
from umbel.server.runs.driver import RunDriver

AGENTS_HELD_MAX = FLEET_HELD_MAX
AWAY_S = 30.0  # until the next request of an agent that found too many others waiting
_RUNS = TypeAdapter(tuple[OpenRun, ...])


@dataclass(frozen=True, slots=True)
class RunsQuery:
    """What an agent asks. `after`: the last name of the page before; `mark`: of its last answer."""

    after: str = ""
    mark: str = ""
    wait_s: float = 0.0


class OpenRunsList:
    """Answers agents, and holds their requests open. `held_max`: at most so many; others come back in `AWAY_S`."""

    def __init__(self, coordinator: Coordinator, held_max: int = AGENTS_HELD_MAX) -> None:
        self._coordinator = coordinator
        self._clock = coordinator.services.clock
        self._held_max = held_max
        self._n_held = 0

    async def page(self, client: ClientId, query: RunsQuery, line: HeldRequest) -> OpenRuns:
        """The runs after `query.after`. Held while the mark is the caller's. Raises `Refused` at a shutdown."""
        ends_at = self._clock.now() + query.wait_s
        self._coordinator.services.agents.note(client)
        while True:
            with self._coordinator.bells.listen(RUNS_BELL) as bell:  # from before the look, so that no change is missed
                found = _page([one async for one in self._open_to(client)], query.after)
                left_s = ends_at - self._clock.now()
                if found.mark != query.mark or left_s <= 0 or line.is_gone:
                    return found
                if self._n_held >= self._held_max:
                    return OpenRuns(found.runs, found.mark, found.next, AWAY_S)
                self._coordinator.refuse_if_closing()
                with self._holding():
                    await line.hold(self._clock, bell, left_s)
            self._coordinator.services.registry.refuse_revoked(client)

    async def _open_to(self, client: ClientId) -> AsyncGenerator[OpenRun]:
        """The runs that are not over, and whose member list has this client or is not given; sorted by name."""
        registry = self._coordinator.services.registry
        for driver in sorted(self._coordinator.drivers.values(), key=lambda one: one.name):
            if not driver.is_over and await stranger(registry, await driver.members.list(), client) is None:
                yield _open_run(driver)

    @contextmanager
    def _holding(self) -> Generator[None]:
        self._n_held += 1
        try:
            yield
        finally:
            self._n_held -= 1


def _open_run(driver: RunDriver) -> OpenRun:
    run, file = driver.run, driver.run.file
    return OpenRun(
        name=driver.name,
        status=run.status,
        created_at=run.created_at,
        rounds=file.rounds.count,
        minimum=fewest_clients(file),
        n_values=driver.layout.update.n_values,
        model_sha256=run.first_model_sha256,
        run_file_sha256=run.file_sha256,
        members_sha256=file.members_sha256,
        is_secure=file.secure is not None,
        is_private=file.privacy is not None,
    )


def fewest_clients(file: RunFile) -> int:
    """The fewest clients whose updates make a model of the run or, if they are masked, that any of its sums has."""
    minimum = min(file.rounds_of(number).minimum for number in file.rounds_of_change())
    if not file.secure or file.evaluation is None:
        return minimum
    return min(minimum, *(file.evaluation_plan(number).minimum for number in file.rounds_of_change()))


def _page(runs: list[OpenRun], after: str) -> OpenRuns:
    """The runs after this name, and the mark of all."""
    mark = hashlib.sha256(_RUNS.dump_json(tuple(runs))).hexdigest()[:32]
    left = [one for one in runs if one.name > after]
    page = tuple(left[:OPEN_RUNS_PAGE_MAX])
    return OpenRuns(page, mark, page[-1].name if len(left) > len(page) else "")
