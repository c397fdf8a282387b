"""For how long a first round waits for a client that never comes."""

import asyncio
from collections.abc import Sequence
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
from umbel.server.store.waiters import FleetMember

WAIT_S = 300.0
FILE = RunFile("demo", RoundsSection(3, target=4, minimum=3), secure_aggregation=SecureAggregationSection())


async def answer(found: Any) -> Any:
    return found


class Stored:
    """What the coordinator has stored: three sites, and one that never comes."""

    def unused_tokens(self, *_of: Any) -> Any:
        return answer(())

    def __init__(self, fleet: Sequence[FleetMember] = ()) -> None:
        self._fleet = fleet

    def fleet(self, *_of: Any) -> Any:
        return answer(self._fleet)

    def newcomers(self, *_of: Any) -> Any:
        return answer(("a", "b", "c", "never"))


def expected(stored: Stored | None = None) -> ExpectedClients:
    services = SimpleNamespace(
        waiters=stored or Stored(),
        agents=SimpleNamespace(clients_since=lambda _since: set[str]()),
        turned_away=SimpleNamespace(staying_away=lambda _run, _now: answer(frozenset())),
        replicas=SimpleNamespace(is_alone=True),
    )
    members = SimpleNamespace(list=lambda: answer(None))
    bells = SimpleNamespace(is_heard=lambda _client: False)
    heard = SimpleNamespace(at=lambda _client: 0.0)
    return ExpectedClients(cast(Any, services), FILE, cast(Any, members), cast(Any, bells), cast(Any, heard))


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


@pytest.mark.parametrize(("here", "ends_at"), [("abcd", 0.0), ("abc", 1030.0)])
def test_an_evaluation_waits_for_sites_that_are_up_and_for_no_others(here: str, ends_at: float) -> None:
    """Over-selection would ask a fifth; `d` was up at 1000."""
    fleet = [FleetMember(ClientId(name), 5, 1000.0, 0.0, 1000.0) for name in "abcd"]
    state = Recruiting(FILE.evaluation_plan(1), since=1005.0)
    able = [Candidate(ClientId(name), 5, "") for name in here]
    found = asyncio.run(expected(Stored(fleet)).of(9, state, able, 1005.0))
    assert found is not None
    assert found.ends_at({one.client for one in able}) == ends_at


def test_an_evaluation_waits_no_longer_than_until_it_would_be_abandoned() -> None:
    fleet = [FleetMember(ClientId(name), 5, 1040.0, 0.0, 1040.0) for name in "abcd"]
    plan = FILE.evaluation_plan(1)
    able = [Candidate(ClientId(name), 5, "") for name in "abc"]
    found = asyncio.run(expected(Stored(fleet)).of(9, Recruiting(plan, since=1000.0), able, 1050.0))
    assert found is not None
    assert found.ends_at({one.client for one in able}) == 1000.0 + plan.patience_s
