"""The coordinator hears once why the site does not come to a run, and trouble with that ends nothing."""

import itertools
import json
from collections.abc import Callable

import httpx
import pytest

from tests.servers.waits import wait_until
from umbel.aggregation.messages import REASON_CHARS_MAX
from umbel.aggregation.types import RunId
from umbel.client.agent import absences
from umbel.client.agent.absences import Absence, AbsenceTeller
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.transport import Transport, connect
from umbel.server.devices.turned_away import KEPT_S

HEART, MRI, EEG = map(RunId, ("heart-1", "mri", "eeg"))
DENIED, ASKED = Absence("a person at the site denied it", False), Absence("a person must decide", True)
Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absences, "PAUSE_S", 0.0)
    monkeypatch.setattr(absences, "AGAIN_S", 0.0)


class Told:
    """What a coordinator was told, in order. `answer`: of its next requests."""

    def __init__(self) -> None:
        self.words = list[tuple[str, str, bool]]()
        self.status = 204
        requests = CoordinatorClient(
            Transport(connect("http://fl.example.org", httpx.MockTransport(self._take)), lambda *_: {})
        )
        self.teller = AbsenceTeller(requests)
        self.teller.start()

    def _take(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.words.append((request.url.path, body["reason"], body["may_come"]))
        return httpx.Response(self.status, stream=httpx.ByteStream(b""))

    def after(self, n_words: int) -> list[tuple[str, str, bool]]:
        wait_until(f"{n_words} words", lambda: len(self.words) >= n_words)
        return self.words


def test_each_absence_is_told_once_until_it_changes_or_comes_back() -> None:
    told = Told()
    told.teller.take({HEART: ASKED, MRI: DENIED})
    expected = [
        ("/v1/runs/heart-1/not-coming", "a person must decide", True),
        ("/v1/runs/mri/not-coming", "a person at the site denied it", False),
    ]
    assert told.after(2) == expected
    told.teller.take({HEART: DENIED, MRI: DENIED})
    expected.append(("/v1/runs/heart-1/not-coming", "a person at the site denied it", False))
    assert told.after(3) == expected
    told.teller.take({EEG: ASKED, MRI: DENIED})  # the site comes to heart-1
    told.after(4)
    told.teller.take({HEART: DENIED, MRI: DENIED})
    assert told.after(5)[4] == expected[2]
    told.teller.stop()


@pytest.mark.parametrize("status", [404, 403, 400, 200])
def test_a_coordinator_that_will_not_hear_it_is_not_asked_again(status: int) -> None:
    """Such as one whose version of umbel does not know this request, or whose run is just over."""
    told = Told()
    told.status = status
    told.teller.take({HEART: ASKED})
    told.after(1)
    told.status = 204
    told.teller.take({HEART: ASKED, MRI: DENIED})
    assert [path for path, _, _ in told.after(2)] == ["/v1/runs/heart-1/not-coming", "/v1/runs/mri/not-coming"]
    told.teller.stop()


def test_a_coordinator_that_is_busy_is_told_later() -> None:
    told = Told()
    told.status = 503
    told.teller.take({HEART: ASKED})
    told.after(1)
    told.status = 204
    assert set(told.after(2)) == {("/v1/runs/heart-1/not-coming", "a person must decide", True)}
    told.teller.stop()


def test_a_coordinator_that_was_away_hears_what_is_true_now() -> None:
    told = Told()
    told.status = 503
    told.teller.take({HEART: DENIED, MRI: ASKED})
    told.after(1)
    told.teller.take({HEART: ASKED})  # meanwhile
    told.status = 204
    wait_until("the news", lambda: told.words[-1] == ("/v1/runs/heart-1/not-coming", "a person must decide", True))
    n_words = len(told.words)
    told.teller.take({HEART: ASKED, EEG: DENIED})
    assert told.after(n_words + 1)[n_words:] == [("/v1/runs/eeg/not-coming", "a person at the site denied it", False)]
    told.teller.stop()


def test_an_absence_is_told_again_before_the_coordinator_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert absences.REPEAT_S < KEPT_S
    monkeypatch.setattr(absences, "REPEAT_S", 0.01)
    told = Told()
    told.teller.take({HEART: DENIED})
    assert set(told.after(3)) == {("/v1/runs/heart-1/not-coming", "a person at the site denied it", False)}
    told.teller.stop()


def test_the_news_of_one_run_does_not_keep_another_from_being_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absences, "REPEAT_S", 0.5)
    told, reasons = Told(), itertools.count()

    def is_told_again() -> bool:
        told.teller.take({HEART: DENIED, EEG: Absence(f"reason {next(reasons)}", True)})
        return [path for path, _, _ in told.words].count("/v1/runs/heart-1/not-coming") >= 2

    wait_until("a second word on heart-1", is_told_again)
    told.teller.stop()


def test_a_reason_of_any_length_can_be_told() -> None:
    told = Told()
    told.teller.take({HEART: Absence("x\0" * REASON_CHARS_MAX, False)})
    [(_, reason, _)] = told.after(1)
    assert reason == "x " * (REASON_CHARS_MAX // 2)
    told.teller.stop()
