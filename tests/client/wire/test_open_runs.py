"""A client that has declined stays away until its time is over, or its run is."""

import httpx
import pytest

from tests.client.agent.test_listing import Coordinator, page, problem
from umbel.aggregation.types import RunId
from umbel.client.rounds.shutdown import Interrupted
from umbel.client.wire.open_runs import PAUSE_S, pause_while_open

RUN = RunId("demo")
AWAY_S = 60.0


def waits(coordinator: Coordinator, seconds: float = AWAY_S) -> list[float]:
    waited = list[float]()
    pause_while_open(coordinator.client, RUN, seconds, waited.append)
    return waited


def test_the_pause_ends_when_the_run_is_no_longer_listed() -> None:
    coordinator = Coordinator(page(["demo"]), page(["demo"]), page(["other"], "m2"))
    assert waits(coordinator) == [PAUSE_S, PAUSE_S]
    assert [one["mark"] for one in coordinator.asked[1:]] == ["m1", "m1"]
    assert all(float(one["wait_s"]) > 20 for one in coordinator.asked[1:]), "the coordinator holds the request"


@pytest.mark.parametrize("answer", [page(["other"]), problem(404, "not-found"), problem(503, "closing")])
def test_without_the_run_in_the_list_the_whole_time_passes(answer: httpx.Response) -> None:
    [waited] = waits(Coordinator(answer))
    assert AWAY_S - 10 < waited <= AWAY_S


def test_a_short_pause_costs_no_request() -> None:
    coordinator = Coordinator(page(["demo"]))
    [waited] = waits(coordinator, 2.0)
    assert (coordinator.asked, round(waited)) == ([], 2)


def test_a_client_that_is_asked_to_leave_leaves() -> None:
    def leave(_seconds: float) -> None:
        raise Interrupted("SIGTERM received")

    with pytest.raises(Interrupted):
        pause_while_open(Coordinator(page(["demo"])).client, RUN, AWAY_S, leave)
