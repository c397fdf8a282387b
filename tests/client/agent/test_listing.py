"""The thread that knows the open runs: what it asks, what it makes of the answers, and when it ends."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest
from pydantic import TypeAdapter

from tests.client.agent.runs import CHANGED, ONE, run_named
from tests.servers.waits import wait_until
from umbel.aggregation.messages import OpenRuns
from umbel.client.agent import listing
from umbel.client.agent.listing import RunsWatch
from umbel.client.errors import AccessRefused, CoordinatorMisbehaved
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.transport import Transport, connect

_PAGE = TypeAdapter(OpenRuns)
Answer = Callable[[Mapping[str, str]], httpx.Response]


def page(names: Sequence[str], mark: str = "m1", **more: Any) -> httpx.Response:
    return httpx.Response(200, content=_PAGE.dump_json(OpenRuns(tuple(map(run_named, names)), mark, **more)))


def problem(status: int, kind: str) -> httpx.Response:
    body = {"type": f"urn:umbel:problem:{kind}", "title": kind, "status": status, "detail": "no"}
    return httpx.Response(status, content=json.dumps(body))


class Coordinator:
    """Answers in turn; the last answer is given to all requests that follow."""

    def __init__(self, *answers: httpx.Response) -> None:
        self.asked = list[dict[str, str]]()
        self._answers = list(answers)
        self.client = CoordinatorClient(
            Transport(connect("http://fl.example.org", httpx.MockTransport(self._answer)), lambda *_: {})
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/runs"
        query = {key: values[0] for key, values in parse_qs(request.url.query.decode()).items()}
        self.asked.append(query)
        given = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return httpx.Response(given.status_code, stream=httpx.ByteStream(given.content))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAUSE_S", 0.001)
    monkeypatch.setattr(listing, "TROUBLE", replace(listing.TROUBLE, first_s=0.001, longest_s=0.001))


def known(watch: RunsWatch) -> list[str] | None:
    return None if watch.runs is None else list(watch.runs)


def test_it_waits_for_a_change_with_the_mark_of_the_last_answer() -> None:
    coordinator = Coordinator(page([]), page([]), page(["a", "b"], "m2"), page(["b"], "m3"))
    watch = RunsWatch(coordinator.client)
    assert watch.runs is None
    watch.start()
    wait_until("the last list", lambda: known(watch) == ["b"])
    watch.stop()
    assert [(one.get("mark", ""), float(one["wait_s"])) for one in coordinator.asked[:4]] == [
        ("", 0.0),
        ("m1", 30.0),
        ("m1", 30.0),
        ("m2", 30.0),
    ]


def test_all_pages_are_one_list() -> None:
    coordinator = Coordinator(page(["a", "b"], next="b"), page(["c"], next="c"), page(["d"]))
    watch = RunsWatch(coordinator.client)
    watch.start()
    wait_until("all pages", lambda: known(watch) == ["a", "b", "c", "d"])
    watch.stop()
    assert [one.get("after", "") for one in coordinator.asked[:3]] == ["", "b", "c"]


def test_a_coordinator_that_lists_runs_without_end_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "RUNS_MAX", 3)
    pages = [page([f"r{i:03}"], next=f"r{i:03}") for i in range(50)]
    coordinator = Coordinator(*pages)
    watch = RunsWatch(coordinator.client)
    watch.start()
    wait_until("a list", lambda: watch.runs is not None)
    watch.stop()
    assert known(watch) == ["r000", "r001", "r002"]


@pytest.mark.parametrize("names", [["b", "a"], ["a", "a"]])
def test_a_list_that_is_not_sorted_is_refused(names: list[str]) -> None:
    with pytest.raises(CoordinatorMisbehaved, match="not sorted"):
        Coordinator(page(names)).client.open_runs()


def test_a_page_that_goes_back_is_refused() -> None:
    with pytest.raises(CoordinatorMisbehaved, match="not sorted"):
        Coordinator(page(["a"])).client.open_runs(after="b")


@pytest.mark.parametrize(
    "change", [{"n_values": -1}, {"name": "../x"}, {"model_sha256": "x"}, {"rounds": 1 << 60}, {"created_at": -1.0}]
)
def test_a_run_that_no_coordinator_can_have_is_refused(change: dict[str, object]) -> None:
    body = json.loads(page(["a"]).content)
    body["runs"][0] |= change
    with pytest.raises(CoordinatorMisbehaved):
        Coordinator(httpx.Response(200, content=json.dumps(body))).client.open_runs()


def test_a_page_of_more_than_a_hundred_runs_is_refused() -> None:
    body = json.loads(page(["a"]).content)
    body["runs"] = [{**body["runs"][0], "name": f"r{i:03}"} for i in range(101)]
    with pytest.raises(CoordinatorMisbehaved, match="at most 100"):
        Coordinator(httpx.Response(200, content=json.dumps(body))).client.open_runs()


def test_it_asks_again_after_trouble_and_keeps_the_runs_that_it_knows(caplog: pytest.LogCaptureFixture) -> None:
    garbage = httpx.Response(200, content=b"[]")
    coordinator = Coordinator(page(["a"]), garbage, garbage, problem(404, "not-found"), page(["b"], "m2"))
    watch = RunsWatch(coordinator.client)
    watch.start()
    wait_until("the newest list", lambda: known(watch) == ["b"])
    watch.stop()
    assert watch.failed is None
    assert sum("cannot see the open runs" in record.message for record in caplog.records) == 1


def test_a_client_that_was_removed_ends_it() -> None:
    watch = RunsWatch(Coordinator(page(["a"]), problem(403, "client-removed")).client)
    watch.start()
    failed = wait_until("its end", lambda: watch.failed)
    assert isinstance(failed, AccessRefused)


def test_an_older_coordinator_ends_it_with_what_to_do() -> None:
    watch = RunsWatch(Coordinator(problem(404, "not-found")).client)
    watch.start()
    assert "umbel join" in str(wait_until("its end", lambda: watch.failed))


def test_an_identity_has_everything_that_a_person_decides_about() -> None:
    runs = [ONE, run_named("another"), *CHANGED.values()]
    assert len({one.identity for one in runs}) == len(runs)


def test_pages_that_go_round_in_a_circle_are_refused() -> None:
    coordinator = Coordinator(page(["b"], next="a"))
    with pytest.raises(CoordinatorMisbehaved, match="does not end where the next begins"):
        coordinator.client.open_runs()
