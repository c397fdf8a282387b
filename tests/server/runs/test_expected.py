"""For how long a first round waits for a client that never comes."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from umbel.aggregation.round.states import Recruiting
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.aggregation.types import ClientId
from umbel.server.runs.expected import ExpectedClients

WAIT_S = 300.0
FILE = RunFile("demo", RoundsSection(3, target=4, minimum=3), secure_aggregation=SecureAggregationSection())


async def answer(found: Any) -> Any:
    return found


class Stored:
    """What the coordinator has stored: three sites, and one that never comes."""

    def unused_tokens(self, *_of: Any) -> Any:
        return answer(())

    def fleet(self, *_of: Any) -> Any:
        return answer(())

    def newcomers(self, *_of: Any) -> Any:
        return answer(("a", "b", "c", "never"))


def expected() -> ExpectedClients:
    services = SimpleNamespace(
        waiters=Stored(),
        agents=SimpleNamespace(clients_since=lambda _since: set[str]()),
        turned_away=SimpleNamespace(newest=lambda _run: answer(())),
        replicas=SimpleNamespace(is_alone=True),
    )
    members = SimpleNamespace(list=lambda: answer(None))
    return ExpectedClients(cast(Any, services), FILE, cast(Any, members), cast(Any, None), cast(Any, None))


def begins_at(here: Any) -> float:
    """When the round begins, in seconds. `here`: the names of the clients that wait at a time."""

    async def looks() -> float:
        of, state = expected(), Recruiting(FILE.round_plan(1, 1), since=0.0)
        for now in map(float, range(0, 10_000, 2)):
            able = [Candidate(ClientId(name), 5, "") for name in here(now)]
            found = await of.of(1, state, able, now)
            assert found is not None
            if len(able) >= 3 and found.ends_at({one.client for one in able}) <= now:
                return now
        raise AssertionError("the round never begins")

    return asyncio.run(looks())


def test_a_site_that_is_away_for_moments_does_not_begin_the_wait_anew() -> None:
    blinks = begins_at(lambda now: "ab" if now % 290 == 288 else "abc")
    assert WAIT_S <= blinks <= WAIT_S + 10


@pytest.mark.parametrize("late_s", [0.0, 4000.0])
def test_the_wait_begins_when_enough_sites_are_there(late_s: float) -> None:
    assert begins_at(lambda now: "abc" if now >= late_s else "a") == late_s + WAIT_S


def test_time_in_which_too_few_wait_does_not_count() -> None:
    assert begins_at(lambda now: "ab" if 100 <= now < 5000 else "abc") == pytest.approx(5000 + WAIT_S - 98, abs=4)
