"""A whole client against a coordinator in memory, with everything going wrong that can."""

import json
import logging
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from tests.client.doubles.double import TOKEN, URL, Double, Handler, answer, kind_of, problem, stream
from tests.client.doubles.dripping import dripping
from tests.servers.waits import wait_until
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.plans.assignment import assignment_id
from umbel.aggregation.plans.round import Task
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.client import (
    Client,
    CoordinatorRefused,
    Evaluation,
    LocalPlan,
    RunEnd,
    SitePolicy,
    TrainResult,
    loop,
    run_client,
)
from umbel.client.errors import (
    AccessRefused,
    CoordinatorGone,
    CoordinatorMisbehaved,
    StateError,
    TooLittleDone,
    TrainingFailed,
    WorkRefused,
    refusal_of,
)
from umbel.client.rounds.delivery import decline
from umbel.client.rounds.shutdown import Shutdown
from umbel.client.rounds.worker import RoundWorker
from umbel.client.state.state_dir import locked
from umbel.client.state.store import Store
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.http_deadline import bound
from umbel.client.wire.transport import Patience


class AddOne(Client):
    """Adds one to every weight; the work itself is beside the point here."""

    def __init__(self, width: int = 3) -> None:
        self.model = nn.Linear(width, 2)
        self.sample_count = 5
        self.trained = 0

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.trained += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        return TrainResult(self.sample_count, 2, 4, {"loss": 0.5, "odd": float("nan")})

    def evaluate(self, model: nn.Module) -> Evaluation:
        return Evaluation(3, {"accuracy": 0.25})


class Crash(BaseException):
    """Stands for kill -9: nothing in the client may catch it."""


def take_part(
    tmp_path: Path,
    double: Double,
    app: Client | None = None,
    wrap: Callable[[Handler], Handler] = lambda handler: handler,
    shutdown: Shutdown | None = None,
    token: str | None = TOKEN,
    **terms: Any,
) -> RunEnd:
    terms |= {"transport": double.transport(wrap), "shutdown": shutdown}
    return run_client(app or AddOne(), URL, tmp_path, "demo", token, "ward-7", **terms)


def pending_files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("*/pending/*"))


def test_a_client_works_until_the_run_is_finished(tmp_path: Path) -> None:
    double = Double(AddOne().model, rounds=3)
    end = take_part(tmp_path, double)
    assert (end.status, end.reports, end.accepted, end.masked, end.opened) == ("finished", 3, 3, 0, 0)
    assert end.reports_in_words == "reports: 3 sent, 3 accepted on arrival"
    assert all(torch.allclose(update, torch.ones(8)) for update in double.updates)
    assert pending_files(tmp_path) == []
    per_round = {"GET models": 3, "POST update": 3, "PUT report": 3}
    assert double.requests == {"POST enrolments": 1, "POST check-ins": 4, **per_round}


def test_requests_go_to_the_addresses_that_are_signed_for_auditors(tmp_path: Path) -> None:
    """A coordinator refuses a report to an address with a query: auditors could not spell it."""
    double, asked = Double(AddOne().model), list[str]()

    def wrap(handle: Handler) -> Handler:
        def noted(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.raw_path.decode())
            return handle(request)

        return noted

    take_part(tmp_path, double, wrap=wrap)
    work = "/v1/assignments/demo.1.1.ward-7"
    assert [path for path in asked if not path.startswith("/v1/models/")] == [
        "/v1/enrolments",
        "/v1/check-ins",
        f"{work}/update",
        f"{work}/report",
        "/v1/check-ins",
    ]


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    double = Double(AddOne().model, training=TrainingSection(evaluate=True))
    take_part(tmp_path, double)
    work = double.reports["demo.1.1.ward-7"]
    assert (work["sample_count"], work["steps_done"], work["steps_planned"]) == (5, 2, 4)
    assert work["metrics"] == {"loss": 0.5}  # what is not a number is left out
    assert (work["evaluation"], work["evaluation_sample_count"]) == ({"accuracy": 0.25}, 3)
    assert work["probe"] is None, "it is no canary"


def test_without_an_evaluation_none_is_reported(tmp_path: Path) -> None:
    double = Double(AddOne().model)
    take_part(tmp_path, double)
    work = double.reports["demo.1.1.ward-7"]
    assert (work["evaluation"], work["evaluation_sample_count"]) == ({}, 0)


def test_how_long_the_training_took_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((100.0, 142.0))
    monkeypatch.setattr("umbel.client.rounds.site_code.time", SimpleNamespace(perf_counter=lambda: next(times)))
    double = Double(AddOne().model)
    take_part(tmp_path, double)
    assert double.reports["demo.1.1.ward-7"]["train_s"] == 42.0


def test_an_evaluation_that_is_none_is_a_failure_of_the_sites_code(tmp_path: Path) -> None:
    class Wrong(AddOne):
        def evaluate(self, model: nn.Module) -> Evaluation:
            return {"accuracy": 0.25}  # type: ignore[return-value]  # a user's code

    double = Double(AddOne().model, training=TrainingSection(evaluate=True))
    with pytest.raises(TrainingFailed, match="failed with TypeError") as failure:
        take_part(tmp_path, double, Wrong())
    assert str(failure.value.__cause__) == "evaluate must return Evaluation, not dict"


def test_what_the_coordinator_refuses_is_said_with_its_kind_and_detail() -> None:
    assert str(refusal_of("unknown-run", "there is no run 'demo'", 404)) == (
        "the coordinator refused (unknown-run): there is no run 'demo'"
    )


def test_enrolment_is_remembered(tmp_path: Path) -> None:
    double = Double(AddOne().model)
    take_part(tmp_path, double)
    take_part(tmp_path, double, token=None)
    assert double.requests["POST enrolments"] == 1


def test_a_client_that_was_never_enrolled_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="--token"):
        take_part(tmp_path, Double(AddOne().model), token=None)


def test_a_directory_that_is_enrolled_at_another_address_names_it(tmp_path: Path) -> None:
    double = Double(AddOne().model)
    take_part(tmp_path, double)
    with pytest.raises(StateError, match=f"'ward-7' with {URL}, .*--server {URL},https://elsewhere.test. .*--token"):
        run_client(AddOne(), "https://elsewhere.test", tmp_path, "demo", transport=double.transport())


def test_a_state_directory_may_be_given_as_text(tmp_path: Path) -> None:
    double = Double(AddOne().model)
    end = run_client(AddOne(), URL, str(tmp_path / "state"), "demo", TOKEN, "ward-7", transport=double.transport())
    assert (end.status, end.accepted) == ("finished", 1)


def test_a_refused_token_ends_the_client_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(AccessRefused, match="unknown-token"):
        take_part(tmp_path, Double(AddOne().model), token="another")


def test_an_unknown_run_ends_the_client_with_the_reason(tmp_path: Path) -> None:
    double = Double(AddOne().model)
    with pytest.raises(CoordinatorRefused, match="unknown-run"):
        run_client(AddOne(), URL, tmp_path, "other", TOKEN, "ward-7", transport=double.transport())


def test_the_key_is_for_its_owner_alone_and_is_never_shown(tmp_path: Path) -> None:
    double = Double(AddOne().model)
    take_part(tmp_path, double)
    (key,) = tmp_path.glob("*/key.pem")
    assert key.stat().st_mode & 0o777 == 0o600
    assert "hidden" in repr(Store(tmp_path, URL).identity("ward-7"))
    key.chmod(0o644)
    with pytest.raises(StateError, match="chmod 600"):
        take_part(tmp_path, double)


def test_two_processes_do_not_share_a_state_directory(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(StateError, match="another client process"):
        take_part(tmp_path, Double(AddOne().model))


# --- a bad line ---


def lose_each_answer_once(kinds: Counter[str]) -> Callable[[Handler], Handler]:
    """Every kind of request is carried out and its first answer lost."""

    def wrap(handle: Handler) -> Handler:
        def lossy(request: httpx.Request) -> httpx.Response:
            response = handle(request)
            kinds[kind_of(request)] += 1
            if kinds[kind_of(request)] == 1:
                raise httpx.ReadError("the line was cut", request=request)
            return response

        return lossy

    return wrap


def test_a_lost_answer_at_every_step_is_harmless(tmp_path: Path) -> None:
    double, seen = Double(AddOne(width=1_200_000).model), Counter[str]()
    end = take_part(tmp_path, double, AddOne(width=1_200_000), lose_each_answer_once(seen))
    assert (end.status, end.accepted) == ("finished", 1)
    assert len(double.reports) == len(double.updates) == 1
    assert torch.allclose(double.updates[0], torch.ones(2_400_002))
    every = {"POST enrolments", "POST check-ins", "GET models", "POST update", "HEAD update", "PATCH update"}
    assert set(seen) == every | {"PUT report"}


def test_a_cut_upload_goes_on_at_the_offset(tmp_path: Path) -> None:
    double, cut = Double(AddOne(width=1_200_000).model), Counter[str]()

    def wrap(handle: Handler) -> Handler:
        def cuts_the_second_chunk(request: httpx.Request) -> httpx.Response:
            cut[kind_of(request)] += 1
            if kind_of(request) == "PATCH update" and cut["PATCH update"] == 1:
                raise httpx.WriteError("the line was cut", request=request)
            return handle(request)

        return cuts_the_second_chunk

    assert take_part(tmp_path, double, AddOne(width=1_200_000), wrap).accepted == 1
    uploads = [kind for kind in double.log if kind.endswith("update")]
    assert uploads[:3] == ["POST update", "HEAD update", "PATCH update"]
    assert uploads.count("POST update") == 1


def test_a_cut_download_goes_on_where_it_was(tmp_path: Path) -> None:
    double, ranges = Double(AddOne(width=100_000).model), list[str]()

    def wrap(handle: Handler) -> Handler:
        def cuts_the_model(request: httpx.Request) -> httpx.Response:
            response = handle(request)
            if kind_of(request) != "GET models":
                return response
            ranges.append(request.headers.get("range", ""))
            if len(ranges) > 1:
                return response

            def half() -> Any:
                yield b"".join(response.iter_raw())[:300_000]
                raise httpx.ReadError("the line was cut", request=request)

            return httpx.Response(200, content=half())

        return cuts_the_model

    assert take_part(tmp_path, double, AddOne(width=100_000), wrap).accepted == 1
    assert ranges[0] == ""
    assert ranges[1].startswith("bytes=300000")


@pytest.mark.parametrize("kind", ["POST check-ins", "GET models", "POST update", "PUT report"])
@pytest.mark.parametrize("trouble", [503, 500, "replayed-nonce"])
def test_a_coordinator_that_restarts_does_not_kill_a_client(tmp_path: Path, kind: str, trouble: int | str) -> None:
    double, n = Double(AddOne().model), Counter[str]()

    def wrap(handle: Handler) -> Handler:
        def busy(request: httpx.Request) -> httpx.Response:
            n[kind_of(request)] += 1
            if kind_of(request) == kind and n[kind] <= 2:
                return problem(trouble, "away") if isinstance(trouble, int) else problem(401, trouble)
            return handle(request)

        return busy

    assert take_part(tmp_path, double, wrap=wrap).accepted == 1


def silent_from(kind: str, n_before: int = 0) -> Callable[[Handler], Handler]:
    """After so many answers to this kind of request, the coordinator answers nothing any more."""
    n = Counter[str]()

    def wrap(handle: Handler) -> Handler:
        def silent(request: httpx.Request) -> httpx.Response:
            n[kind_of(request)] += 1
            if n[kind] > n_before:
                raise httpx.ConnectError("nobody listens")
            return handle(request)

        return silent

    return wrap


@pytest.mark.parametrize("kind", ["POST enrolments", "POST check-ins", "GET models", "PUT report"])
def test_a_client_that_was_told_to_give_up_ends_when_the_coordinator_is_silent(tmp_path: Path, kind: str) -> None:
    double = Double(AddOne().model)
    with pytest.raises(CoordinatorGone, match=re.escape("has given no usable answer for 0.2 s")):
        take_part(tmp_path, double, wrap=silent_from(kind), give_up_after_s=0.2)
    assert take_part(tmp_path, double).status == "finished"  # a later one goes on
    assert len(double.updates) == 1


HTML = {"Content-Type": "text/html; charset=utf-8"}
PORTAL = {"Location": "https://login.hospital.example/?to=coordinator"}
KINDS = ["POST enrolments", "POST check-ins", "GET models", "POST update", "PUT report"]


def from_a_proxy(kind: str, status: int, headers: dict[str, str], n_times: float) -> Callable[[Handler], Handler]:
    """A proxy answers so, in place of the coordinator, to `n_times` requests from the first of this kind on."""
    n = 0

    def wrap(handle: Handler) -> Handler:
        def proxied(request: httpx.Request) -> httpx.Response:
            nonlocal n
            is_away = (kind_of(request) == kind or n > 0) and n < n_times
            n += is_away
            return stream(status, b"<html>Sign in", headers) if is_away else handle(request)

        return proxied

    return wrap


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (200, HTML, "the answer from coordinator.test is not from an umbel coordinator (a text/html page, which a "),
        (429, HTML, "the coordinator cannot answer now (http-429)"),
        (511, HTML, "the coordinator cannot answer now (http-511)"),
    ],
)
def test_a_login_page_of_the_network_is_waited_out_or_ends_a_client_that_was_told_to_give_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, status: int, headers: dict[str, str], words: str
) -> None:
    double = Double(AddOne().model)
    with pytest.raises(CoordinatorGone, match=re.escape(f"The last request failed: {words}")):
        take_part(tmp_path, double, wrap=from_a_proxy(kind, status, headers, math.inf), give_up_after_s=0.2)
    caplog.clear()
    assert take_part(tmp_path, double, wrap=from_a_proxy(kind, status, headers, 2)).status == "finished"
    assert len(double.updates) == 1
    if kind in ("POST check-ins", "GET models", "PUT report"):  # of these the first start has answered none
        assert caplog.text.count(words) == 1


@pytest.mark.parametrize("kind", ["GET models", "POST update", "PUT report"])
@pytest.mark.parametrize(("status", "headers"), [(302, PORTAL), (307, PORTAL | HTML)])
def test_a_redirect_to_a_login_page_is_waited_out_once_the_coordinator_has_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, status: int, headers: dict[str, str]
) -> None:
    assert take_part(tmp_path, Double(AddOne().model), wrap=from_a_proxy(kind, status, headers, 2)).accepted == 1
    assert f"(HTTP {status} to 'https://login.hospital.example/?to=coordinator', which a proxy or a" in caplog.text


def test_a_redirect_is_a_wrong_address_if_no_coordinator_has_answered_there(tmp_path: Path) -> None:
    with pytest.raises(CoordinatorRefused, match="redirects to 'https://login"):
        take_part(tmp_path, Double(AddOne().model), wrap=from_a_proxy("POST enrolments", 302, PORTAL, 2))


def test_json_that_is_no_message_ends_the_client_at_once(tmp_path: Path) -> None:
    def wrap(handle: Handler) -> Handler:
        return lambda request: answer({"sign": "in"}) if kind_of(request) == "POST check-ins" else handle(request)

    with pytest.raises(CoordinatorMisbehaved, match="the coordinator's answer does not parse: run_status"):
        take_part(tmp_path, Double(AddOne().model), wrap=wrap, give_up_after_s=60)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_never_ends_ends_a_client_that_was_told_to_give_up(tmp_path: Path, kind: str) -> None:
    """Over real sockets. The first request after the trouble begins is cut, so that the test need not wait a minute."""
    double, n = Double(AddOne().model), 0

    with dripping(b" ") as elsewhere, bound(httpx.Client(base_url=elsewhere)) as proxy:

        def wrap(handle: Handler) -> Handler:
            def through(request: httpx.Request) -> httpx.Response:
                nonlocal n
                n += kind_of(request) == kind or n > 0
                if n == 1:
                    raise httpx.ReadError("cut")
                return proxy.send(proxy.build_request("GET", "/"), stream=True) if n else handle(request)

            return through

        with pytest.raises(CoordinatorGone, match=re.escape("no usable answer for 0.8 s")):
            take_part(tmp_path, double, wrap=wrap, give_up_after_s=0.8)
    assert n > 1


def test_a_training_ends_when_the_coordinator_is_silent_and_its_work_is_kept(tmp_path: Path) -> None:
    double, app = Double(AddOne().model), Patient()
    with pytest.raises(CoordinatorGone):
        take_part(tmp_path, double, app, silent_from("GET assignments", n_before=1), give_up_after_s=0.2)
    assert app.reason == "the coordinator does not answer"
    assert pending_files(tmp_path) == ["report.json", "update.bin"]
    assert take_part(tmp_path, double).accepted == 1
    assert app.trained == 1


# --- killed and restarted ---


def killed_at(kind: str, was_carried_out: bool = False) -> Callable[[Handler], Handler]:
    """The client dies with this kind of request: before the coordinator hears it, or before its answer comes."""

    def wrap(handle: Handler) -> Handler:
        def killed(request: httpx.Request) -> httpx.Response:
            if kind_of(request) == kind:
                if was_carried_out:
                    handle(request)
                raise Crash
            return handle(request)

        return killed

    return wrap


@pytest.mark.parametrize("kind", ["POST update", "PUT report"])
@pytest.mark.parametrize("was_carried_out", [False, True])
def test_a_client_killed_after_training_sends_what_it_had(tmp_path: Path, kind: str, was_carried_out: bool) -> None:
    double = Double(AddOne().model)
    with pytest.raises(Crash):
        take_part(tmp_path, double, wrap=killed_at(kind, was_carried_out))
    assert pending_files(tmp_path) == ["report.json", "update.bin"]
    app = AddOne()
    assert take_part(tmp_path, double, app).status == "finished"
    assert app.trained == 0
    assert len(double.updates) == 1
    assert pending_files(tmp_path) == []


def test_work_for_a_round_that_has_closed_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = Double(AddOne().model, rounds=2)
    with pytest.raises(Crash):
        take_part(tmp_path, double, wrap=killed_at("POST update"))
    double.close_round("the target was in")
    caplog.set_level(logging.INFO, "umbel.client")
    assert take_part(tmp_path, double).accepted == 1
    assert list(double.reports) == ["demo.2.1.ward-7"]
    (told,) = [message for message in caplog.messages if "is not sent (again)" in message]
    assert "the target was in" in told


def test_a_damaged_unsent_update_is_dropped(tmp_path: Path) -> None:
    double = Double(AddOne().model)
    with pytest.raises(Crash):
        take_part(tmp_path, double, wrap=killed_at("POST update"))
    (update,) = tmp_path.glob("*/pending/update.bin")
    update.write_bytes(update.read_bytes()[:-1] + b"x")
    assert take_part(tmp_path, double).accepted == 1
    assert torch.allclose(double.updates[0], torch.ones(8))


def test_what_the_policy_forbids_by_now_is_not_sent_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    double = Double(AddOne().model)
    with pytest.raises(Crash):
        take_part(tmp_path, double, wrap=killed_at("POST update"))
    policy = SitePolicy(share_sample_count=False)
    with pytest.raises(WorkRefused, match="forbids sending its sample count"):
        run_client(AddOne(), URL, tmp_path, "demo", policy=policy, transport=double.transport())
    assert pending_files(tmp_path) == []
    assert not double.reports
    assert not double.updates
    (dropped,) = [message for message in caplog.messages if "is dropped" in message]
    assert dropped.startswith("demo.1.1.ward-7")
    assert "forbids sending its sample count" in dropped


class Stepwise(AddOne):
    """A training of the site's own that keeps itself: one added in each of four steps; killed after so many."""

    def __init__(self, dies_after: int = 9) -> None:
        super().__init__()
        self.dies_after = dies_after
        self.first_steps: list[int] = []

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        kept = plan.checkpoint.load()
        if kept is not None:
            model.load_state_dict(kept["model"])
        self.first_steps.append(kept["done"] if kept else 0)
        for step in range(self.first_steps[-1], 4):
            if step == self.dies_after:
                raise Crash
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            plan.checkpoint.save({"done": step + 1, "model": model.state_dict()})
        return TrainResult(self.sample_count, 4, 4)


def test_a_training_of_the_sites_own_goes_on_from_what_it_kept(tmp_path: Path) -> None:
    double = Double(AddOne().model, rounds=2)
    with pytest.raises(Crash):
        take_part(tmp_path, double, Stepwise(dies_after=3))
    app = Stepwise()
    assert take_part(tmp_path, double, app).accepted == 2
    assert app.first_steps == [3, 0]  # what was kept was of the first round
    assert all(torch.allclose(update, torch.full((8,), 4.0)) for update in double.updates)
    assert list(tmp_path.glob("*/training/*")) == []


def test_what_was_kept_of_a_round_that_has_closed_is_not_taken_up(tmp_path: Path) -> None:
    double = Double(AddOne().model, rounds=2)
    with pytest.raises(Crash):
        take_part(tmp_path, double, Stepwise(dies_after=3))
    double.close_round("the target was in")
    app = Stepwise()
    assert take_part(tmp_path, double, app).accepted == 1
    assert app.first_steps == [0]


# --- a coordinator that is away for longer than a window ---


def test_what_missed_its_window_is_sent_when_the_coordinator_is_back(tmp_path: Path) -> None:
    """Away from the upload on, until its window is over by the client's clock; the round, though, is still open."""
    double, lost = Double(AddOne().model, window_s=0.3), Counter[str]()

    def wrap(handle: Handler) -> Handler:
        def away(request: httpx.Request) -> httpx.Response:
            lost[kind_of(request)] += 1
            if kind_of(request).endswith("update") and "GET assignments" not in lost:
                raise httpx.ConnectError("nobody there", request=request)
            if kind_of(request) == "GET assignments" and lost["GET assignments"] <= 2:
                raise httpx.ConnectError("nobody there", request=request)
            return handle(request)

        return away

    assert take_part(tmp_path, double, wrap=wrap).accepted == 1
    assert len(double.updates) == 1


def test_what_came_back_too_late_is_dropped_and_the_next_round_done(tmp_path: Path) -> None:
    double, closed = Double(AddOne().model, rounds=2, window_s=0.3), list[bool]()

    def wrap(handle: Handler) -> Handler:
        def away(request: httpx.Request) -> httpx.Response:
            if kind_of(request).endswith("update") and not closed:
                raise httpx.ConnectError("nobody there", request=request)
            if kind_of(request) == "GET assignments" and not closed:
                closed.append(True)
                double.close_round("the window is over")
            return handle(request)

        return away

    assert take_part(tmp_path, double, wrap=wrap).accepted == 1
    assert list(double.reports) == ["demo.2.1.ward-7"]
    assert pending_files(tmp_path) == []


def test_a_run_that_a_restored_coordinator_has_forgotten_is_asked_for_again(tmp_path: Path) -> None:
    double, asked = Double(AddOne().model, rounds=2), Counter[str]()

    def wrap(handle: Handler) -> Handler:
        def forgets(request: httpx.Request) -> httpx.Response:
            asked[kind_of(request)] += 1
            if kind_of(request) == "POST check-ins" and asked["POST check-ins"] in (2, 3):
                return problem(404, "unknown-run")
            return handle(request)

        return forgets

    assert take_part(tmp_path, double, wrap=wrap).accepted == 2


@pytest.mark.parametrize("busy", [False, True])
def test_a_client_that_is_told_to_come_back_in_hours_still_leaves_at_once(tmp_path: Path, busy: bool) -> None:
    hours = 6 * 3600

    class Leaving(Shutdown):
        """Is asked to leave while the client waits for hours."""

        def wait(self, seconds: float) -> None:
            assert self.reason is None, "it was asked to leave before"
            if seconds >= hours:
                self.request("the ward closes")
            super().wait(seconds)

    def wrap(handle: Handler) -> Handler:
        def later(request: httpx.Request) -> httpx.Response:
            if kind_of(request) != "POST check-ins":
                return handle(request)
            if busy:
                return problem(503, "shutting-down", {"Retry-After": str(hours)})
            return answer({"run_status": "running", "reason": "", "retry_after_s": hours, "assignment": None})

        return later

    end = take_part(tmp_path, Double(AddOne().model), wrap=wrap, shutdown=Leaving())
    assert (end.status, end.reason) == ("interrupted", "the ward closes")


# --- told to stop ---


class Patient(AddOne):
    """Trains until told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None
        self.is_training = threading.Event()

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.is_training.set()
        while self.reason is None:
            time.sleep(0.01)
            self.reason = plan.should_stop()
        return super().train(model, plan)


def test_a_client_whose_round_has_closed_stops_and_uploads_nothing(tmp_path: Path) -> None:
    double, app, statuses = Double(AddOne().model, rounds=1), Patient(), Counter[str]()

    def wrap(handle: Handler) -> Handler:
        def closes_at_the_second_poll(request: httpx.Request) -> httpx.Response:
            statuses[kind_of(request)] += 1
            if statuses["GET assignments"] == 2:
                double.close_round("the target was in")
            return handle(request)

        return closes_at_the_second_poll

    end = take_part(tmp_path, double, app, wrap)
    assert (app.reason, end.status, end.reports) == ("the target was in", "finished", 0)
    assert "POST update" not in double.requests


def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the client pauses; it does not wait."""
    found = list[float]()
    monkeypatch.setattr(RoundWorker, "pause_for", lambda _, seconds: found.append(seconds))
    return found


def test_a_slow_client_that_every_round_stops_comes_to_the_next_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small run waits for it, so it must not come later from round to round."""

    class Slow(AddOne):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            double.close_round("the target was in")
            wait_until("the end of the watch", plan.should_stop)
            return super().train(model, plan)

    double, found = Double(AddOne().model, rounds=6), pauses(monkeypatch)
    assert take_part(tmp_path, double, Slow()).reports == 0
    assert found == [0.1] * 6


def test_a_coordinator_that_closes_assignments_before_any_training_is_asked_ever_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double, found = Double(AddOne().model, rounds=1), pauses(monkeypatch)

    def wrap(handle: Handler) -> Handler:
        def closes_eight_times(request: httpx.Request) -> httpx.Response:
            if kind_of(request) == "GET models" and len(found) < 8:
                return problem(409, "assignment-closed")
            return handle(request)

        return closes_eight_times

    assert take_part(tmp_path, double, wrap=wrap).reports == 1
    assert found == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0])


class InOneCall(AddOne):
    """Cannot stop between two steps, as an app that trains in one call."""

    trains_in_one_call = True

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__()
        self.told = told

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.trained += 1
        if self.trained > 1:
            return super().train(model, plan)
        self.told()
        reason = wait_until("a reason to stop", plan.should_stop)
        raise TooLittleDone(f"{reason}, and its work is lost", "it was ended in the middle of its work")


def test_work_that_was_ended_with_its_round_is_not_declined(tmp_path: Path) -> None:
    double = Double(AddOne().model, rounds=2)
    end = take_part(tmp_path, double, InOneCall(lambda: double.close_round("the target was in")))
    assert (end.status, end.reports, double.declined) == ("finished", 1, {})


def test_work_that_its_deadline_ended_is_declined_and_the_next_round_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double, _ = Double(AddOne().model, rounds=2, window_s=2.0), pauses(monkeypatch)
    end = take_part(tmp_path, double, InOneCall(lambda: None))
    assert (end.status, end.reports) == ("finished", 2)
    assert [*double.declined.values()] == ["it was ended in the middle of its work"]


def test_near_the_deadline_partial_work_is_sent(tmp_path: Path) -> None:
    double, app = Double(AddOne().model, window_s=1.5), Patient()
    assert take_part(tmp_path, double, app).accepted == 1
    assert app.reason == "the deadline is near"


def test_a_client_that_is_told_to_leave_sends_its_partial_work_first(tmp_path: Path) -> None:
    double, app, shutdown = Double(AddOne().model, rounds=9), Patient(), Shutdown()

    def leave() -> None:
        app.is_training.wait()
        shutdown.request("the ward closes")

    thread = threading.Thread(target=leave)
    thread.start()
    end = take_part(tmp_path, double, app, shutdown=shutdown)
    thread.join()
    assert (end.status, end.reason, end.accepted) == ("interrupted", "the ward closes", 1)


@pytest.mark.parametrize("swallows", [False, True])
def test_a_client_that_is_withdrawn_sends_nothing_and_declines(tmp_path: Path, *, swallows: bool) -> None:
    double, shutdown = Double(AddOne().model, rounds=9), Shutdown()

    class Withdrawn(AddOne):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            thread = threading.Thread(target=shutdown.withdraw, args=("a person denied the run",))
            thread.start()
            try:
                while not plan.should_stop():
                    time.sleep(0.01)
                thread.join()
            except BaseException:
                if not swallows:
                    raise
            return super().train(model, plan)

    end = take_part(tmp_path, double, Withdrawn(), shutdown=shutdown)
    assert (end.status, end.reason, end.reports) == ("interrupted", "a person denied the run", 0)
    assert (double.reports, list(double.declined.values())) == ({}, ["this site no longer takes part in the run"])
    assert "POST update" not in double.requests
    assert not [path for path in tmp_path.rglob("*update*") if path.is_file()]


# --- a model that is only to be measured ---


class Measuring(Double):
    """Asks for no training, but how the model does on the site's held-out data."""

    def _route(self, request: httpx.Request, body: bytes) -> httpx.Response:
        if not request.url.path.endswith("/evaluation"):
            return super()._route(request, body)
        self.reports[request.url.path.split("/")[3]] = json.loads(body)
        self.round += 1
        return answer({"outcome": "accepted", "reason": "counted"})

    def _assignment_id(self, client: str) -> str:
        return assignment_id(RunId("demo"), self.round, self.attempt, ClientId(client), Task.EVALUATION)

    def _assignment(self, client: str) -> dict[str, Any]:
        return {**super()._assignment(client), "task": "evaluation"}


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_a_client_that_is_asked_to_measure_the_model_trains_nothing(tmp_path: Path) -> None:
    double, app = Measuring(AddOne().model, rounds=2), AddOne()
    assert take_part(tmp_path, double, app).status == "finished"
    assert app.trained == 0
    assert "POST update" not in double.requests
    measured = [(one["sample_count"], one["evaluation"]) for one in double.reports.values()]
    assert measured == [(3, {"accuracy": 0.25})] * 2


def test_a_client_that_measures_knows_the_round_and_what_it_keeps(tmp_path: Path) -> None:
    class Prepared(AddOne):
        def prepare(self, plan: LocalPlan) -> None:
            plans.append(plan)

    plans = list[LocalPlan]()
    take_part(tmp_path, Measuring(AddOne().model, rounds=2), Prepared())
    assert [(plan.run, plan.round, plan.client) for plan in plans] == [("demo", number, "ward-7") for number in (1, 2)]
    assert all(plan.seconds_left > 0 and plan.should_stop() is None for plan in plans)


def test_what_was_measured_for_a_round_that_has_closed_is_not_sent(tmp_path: Path) -> None:
    class Slow(AddOne):
        def evaluate(self, model: nn.Module) -> Evaluation:
            double.close_round("the target was in")
            wait_until("the end of the watch", lambda: "watch demo.1.e1.ward-7" not in names_of_threads())
            return super().evaluate(model)

    double = Measuring(AddOne().model)
    end = take_part(tmp_path, double, Slow())
    assert (end.status, end.reports, double.reports, double.declined) == ("finished", 0, {}, {})


# --- work that is not sent ---


class Diverging(AddOne):
    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        with torch.no_grad():
            next(model.parameters()).fill_(self.bad)
        return TrainResult(5, 1, 1)

    bad = float("nan")


class Huge(Diverging):
    bad = 1e9


class Failing(AddOne):
    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        raise KeyError("patient 4711")


@pytest.mark.parametrize(("app", "reason"), [(Diverging(), "not finite"), (Huge(), "max_abs")])
def test_an_update_that_cannot_be_folded_is_declined_before_it_is_sent(
    tmp_path: Path, app: Client, reason: str
) -> None:
    double = Double(AddOne().model)
    with pytest.raises(WorkRefused, match=reason):
        take_part(tmp_path, double, app)
    assert len(double.declined) == 3
    assert all(reason in text for text in double.declined.values())
    assert "POST update" not in double.requests


def test_an_error_in_the_sites_code_is_declined_without_its_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    double = Double(AddOne().model)
    with pytest.raises(TrainingFailed, match="KeyError"):
        take_part(tmp_path, double, Failing())
    assert set(double.declined.values()) == {"the client's own code failed with KeyError; see the client's log"}
    assert "Traceback" in caplog.text
    assert re.search(r"own code failed with KeyError: 'patient 4711' \(test_loop.py, line \d+\)", caplog.text)


def test_a_refusal_is_tried_until_the_rounds_window_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a word of this client any longer: only secure rounds have phases after it."""
    until = list[float]()

    def noted(coordinator: CoordinatorClient, assignment: AssignmentId, reason: str, patience: Patience) -> None:
        until.append(patience.until)
        decline(coordinator, assignment, reason, patience)

    monkeypatch.setattr(loop, "decline", noted)
    double, began = Double(AddOne().model), time.monotonic()
    with pytest.raises(TrainingFailed):
        take_part(tmp_path, double, Failing())
    window_s = double.run_file.rounds.window_s
    assert len(until) == 3
    assert all(began + window_s - 1 < one <= time.monotonic() + window_s for one in until)


def test_what_was_kept_of_a_training_that_failed_is_removed(tmp_path: Path) -> None:
    class Stumbling(AddOne):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            plan.checkpoint.save({"model": model.state_dict()})
            raise KeyError("label")

    with pytest.raises(TrainingFailed, match="KeyError"):
        take_part(tmp_path, Double(AddOne().model), Stumbling())
    assert list(tmp_path.glob("*/training/*")) == []


@pytest.mark.parametrize(
    ("app", "sentence"),
    [(Diverging(), "the data hold a NaN or infinity; check the data"), (Huge(), "max_abs"), (Failing(), "KeyError")],
)
def test_a_failure_is_one_error_in_the_log_and_the_end_of_the_client_another(
    tmp_path: Path, app: Client, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises((WorkRefused, TrainingFailed)):
        take_part(tmp_path, Double(AddOne().model), app)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 3 + 1
    assert all(sentence in record.getMessage() for record in errors)
    assert ("patient 4711" in caplog.text) == isinstance(app, Failing)


class Slow(AddOne):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        time.sleep(0.3)
        return TrainResult(5, self.steps, 9)


@pytest.mark.parametrize(("steps", "sentence"), [(1, "window_s of at least"), (9, "plan.should_stop()")])
def test_a_window_that_is_too_short_for_a_site_is_said_with_by_how_much(
    tmp_path: Path, steps: int, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    double = Double(AddOne().model, window_s=0.2)
    shutdown = Shutdown()

    def wrap(handle: Handler) -> Handler:
        def closing(request: httpx.Request) -> httpx.Response:
            if kind_of(request) == "POST update":
                double.close_round("the window is over")
                shutdown.request("enough seen")
            return handle(request)

        return closing

    take_part(tmp_path, double, Slow(steps), wrap, shutdown)
    (warning,) = [message for message in caplog.messages if "window of 0.2 s" in message]
    assert f"with {steps} of 9 steps done" in warning
    assert sentence in warning


def test_another_model_than_the_runs_is_declined_in_words(tmp_path: Path) -> None:
    double = Double(AddOne().model)
    with pytest.raises(WorkRefused, match="same version of the model's code"):
        take_part(tmp_path, double, AddOne(width=4))
    assert "GET models" not in double.requests


# --- a hostile coordinator ---


def test_a_model_with_another_digest_is_refused(tmp_path: Path) -> None:
    double, app = Double(AddOne().model), AddOne()

    def wrap(handle: Handler) -> Handler:
        def other_bytes(request: httpx.Request) -> httpx.Response:
            response = handle(request)
            if kind_of(request) == "GET models":
                body = b"".join(response.iter_raw())
                return stream(200, body[:-1] + bytes([body[-1] ^ 1]))
            return response

        return other_bytes

    with pytest.raises(CoordinatorMisbehaved, match="SHA-256"):
        take_part(tmp_path, double, app, wrap)
    assert app.trained == 0


def endless() -> Any:
    while True:
        yield bytes(1 << 16)


@pytest.mark.parametrize("kind", ["POST enrolments", "POST check-ins", "GET models", "PUT report"])
@pytest.mark.parametrize("status", [200, 418])
def test_an_answer_without_an_end_is_refused(tmp_path: Path, kind: str, status: int) -> None:
    def wrap(handle: Handler) -> Handler:
        def babble(request: httpx.Request) -> httpx.Response:
            return httpx.Response(status, content=endless()) if kind_of(request) == kind else handle(request)

        return babble

    with pytest.raises(CoordinatorMisbehaved, match="longer than"):
        take_part(tmp_path, Double(AddOne().model), wrap=wrap)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../../etc/passwd"},
        {"id": "demo.1.1.ward-8"},
        {"run": "other"},
        {"window_s": float("inf")},
        {"window_s": -1.0},
        {"round": 10**300, "id": f"demo.{10**300}.1.ward-7"},
        {"seed": -1},
        {"model": {"version": 0, "sha256": "../../x", "size_bytes": 1, "layout_digest": "0" * 64}},
        {"model": {"version": 0, "sha256": "0" * 64, "size_bytes": 1, "layout_digest": "\n\x1b[2Jok"}},
        {"grid": {"step": 0.3, "max_abs": 1.0, "total_weight_max": 1}},
        {"training": {"local_epochs": 1, "surprise": 1}},
        {"training": {"local_epochs": 1, "\n\x1b[2Jok": 1}},
    ],
)
def test_a_malformed_assignment_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    double = Double(AddOne().model)

    def wrap(handle: Handler) -> Handler:
        def changed(request: httpx.Request) -> httpx.Response:
            response = handle(request)
            if kind_of(request) != "POST check-ins":
                return response
            message = json.loads(b"".join(response.iter_raw()))
            return answer({**message, "assignment": {**message["assignment"], **change}})

        return changed

    with pytest.raises(CoordinatorMisbehaved) as caught:
        take_part(tmp_path, double, wrap=wrap)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()
    assert "GET models" not in double.requests


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -5.0])
def test_a_wait_that_nobody_can_wait_is_refused(tmp_path: Path, wait_s: float) -> None:
    def wrap(handle: Handler) -> Handler:
        def odd(request: httpx.Request) -> httpx.Response:
            if kind_of(request) != "POST check-ins":
                return handle(request)
            return answer({"run_status": "running", "reason": "", "retry_after_s": wait_s, "assignment": None})

        return odd

    with pytest.raises(CoordinatorMisbehaved, match="retry_after_s"):
        take_part(tmp_path, Double(AddOne().model), wrap=wrap)


@pytest.mark.parametrize("window_s", [float("nan"), float("inf"), -5.0])
def test_unsent_work_whose_window_makes_no_sense_is_dropped(tmp_path: Path, window_s: float) -> None:
    double = Double(AddOne().model)
    with pytest.raises(Crash):
        take_part(tmp_path, double, wrap=killed_at("POST update"))
    assert pending_files(tmp_path) != []

    def wrap(handle: Handler) -> Handler:
        def odd(request: httpx.Request) -> httpx.Response:
            if kind_of(request) != "GET assignments":
                return handle(request)
            return answer({"state": "open", "reason": "", "window_s": window_s})

        return odd

    assert take_part(tmp_path, double, wrap=wrap).accepted == 1
    assert pending_files(tmp_path) == []


class Boaster(AddOne):
    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return TrainResult(self.sample_count + 1, 2, 4)


def test_no_more_samples_are_reported_than_were_announced(tmp_path: Path) -> None:
    double = Double(AddOne().model)
    with pytest.raises(WorkRefused, match="returned a sample_count of 6, but this client has 5 samples"):
        take_part(tmp_path, double, Boaster())
    assert "POST update" not in double.requests


@pytest.mark.parametrize(("most", "is_taken"), [(5, True), (4, False)])
def test_a_site_may_have_as_many_samples_as_a_run_accepts_and_no_more(
    tmp_path: Path, most: int, is_taken: bool
) -> None:
    double = Double(AddOne().model)
    double.run_file = replace(double.run_file, aggregation=AggregationSection(sample_count_max=most))
    if is_taken:
        assert take_part(tmp_path, double).accepted == 1
        return
    with pytest.raises(WorkRefused, match="has 5 samples, but the run accepts at most 4"):
        take_part(tmp_path, double)
    assert "POST update" not in double.requests


class Grown(AddOne):
    """Its data grow while it trains."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.sample_count += 1
        return super().train(model, plan)


@pytest.mark.parametrize(("most", "is_taken"), [(6, True), (5, False)])
def test_what_it_trained_on_is_held_against_the_runs_bound_too(tmp_path: Path, most: int, is_taken: bool) -> None:
    double = Double(AddOne().model)
    double.run_file = replace(double.run_file, aggregation=AggregationSection(sample_count_max=most))
    if is_taken:
        assert take_part(tmp_path, double, Grown()).accepted == 1
        return
    with pytest.raises(WorkRefused):
        take_part(tmp_path, double, Grown())
    assert "returned a sample_count of 6, but the run accepts at most 5" in double.declined["demo.1.1.ward-7"]
    assert "POST update" not in double.requests


def test_an_update_without_its_report_is_removed(tmp_path: Path) -> None:
    """A process that was killed between the two has left it: nobody will send it, and it may tell of the data."""
    store = Store(tmp_path, URL)
    store.save_update([b"weights"])
    assert pending_files(tmp_path) == ["update.bin"]
    assert Store(tmp_path, URL).pending() is None
    assert pending_files(tmp_path) == []


def test_a_model_larger_than_this_clients_own_is_not_fetched(tmp_path: Path) -> None:
    double = Double(AddOne().model)

    def wrap(handle: Handler) -> Handler:
        def large(request: httpx.Request) -> httpx.Response:
            response = handle(request)
            if kind_of(request) != "POST check-ins":
                return response
            text = b"".join(response.iter_raw()).decode()
            return stream(
                200, text.replace(f'"size_bytes": {len(double.model_bytes)}', '"size_bytes": 99999999').encode()
            )

        return large

    with pytest.raises(CoordinatorMisbehaved, match="99999999"):
        take_part(tmp_path, double, wrap=wrap)
    assert "GET models" not in double.requests


@pytest.mark.parametrize("offset", ["-1", "99999999", "1e3", "+1", ""])
def test_an_impossible_upload_offset_is_refused(tmp_path: Path, offset: str) -> None:
    def wrap(handle: Handler) -> Handler:
        def lies(request: httpx.Request) -> httpx.Response:
            if kind_of(request) == "POST update":
                return stream(201, b"", {"Upload-Offset": offset, "Upload-Complete": "?0"})
            return handle(request)

        return lies

    with pytest.raises(CoordinatorMisbehaved, match="Offset"):
        take_part(tmp_path, Double(AddOne().model), wrap=wrap)


def test_an_upload_that_never_moves_is_given_up(tmp_path: Path) -> None:
    def wrap(handle: Handler) -> Handler:
        def stuck(request: httpx.Request) -> httpx.Response:
            if kind_of(request) in ("POST update", "PATCH update"):
                return stream(201, b"", {"Upload-Offset": "0", "Upload-Complete": "?0"})
            return handle(request)

        return stuck

    with pytest.raises(CoordinatorMisbehaved, match="contradicts itself"):
        take_part(tmp_path, Double(AddOne().model), wrap=wrap)


def test_old_models_are_removed(tmp_path: Path) -> None:
    take_part(tmp_path, Double(AddOne().model, rounds=3))
    assert len(os.listdir(next(tmp_path.glob("*/models")))) == 1


def test_no_escape_sequence_of_the_coordinator_reaches_a_terminal(tmp_path: Path) -> None:
    def wrap(handle: Handler) -> Handler:
        def colourful(request: httpx.Request) -> httpx.Response:
            if kind_of(request) == "POST check-ins":
                return answer({"run_status": "stopped", "reason": "over\x1b[2J\x07", "retry_after_s": 0})
            return handle(request)

        return colourful

    end = take_part(tmp_path, Double(AddOne().model), wrap=wrap)
    assert (end.status, end.reason) == ("stopped", "over\ufffd[2J\ufffd")


def with_detail(response: httpx.Response, detail: str) -> httpx.Response:
    return httpx.Response(response.status_code, content=iter([response.read().replace(b"because of", detail.encode())]))


def test_a_client_whose_model_is_refused_shows_its_layout_once_and_says_what_differs(tmp_path: Path) -> None:
    double, shown = Double(AddOne().model), list[str]()

    def refusing(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if kind_of(request) != "POST check-ins":
                return handler(request)
            shown.append(json.loads(request.read())["layout"])
            refusal = problem(422, "wrong-layout")
            return with_detail(refusal, "tensor 'weight' is float32[2, 4]") if shown[-1] else refusal

        return handle

    with pytest.raises(CoordinatorRefused, match="tensor 'weight'"):
        take_part(tmp_path, double, wrap=refusing)
    assert shown == ["", double.layout.to_json()]


def test_a_coordinator_that_does_not_take_layouts_still_says_why_the_model_is_refused(tmp_path: Path) -> None:
    def refusing(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if kind_of(request) != "POST check-ins":
                return handler(request)
            has_layout = bool(json.loads(request.read())["layout"])
            return problem(413, "body-too-large") if has_layout else problem(422, "wrong-layout")

        return handle

    with pytest.raises(CoordinatorRefused, match="because of wrong-layout"):
        take_part(tmp_path, Double(AddOne().model), wrap=refusing)


def test_who_is_to_leave_while_the_coordinator_is_away_leaves_at_once_and_keeps_the_update(tmp_path: Path) -> None:
    double = Double(AddOne().model, window_s=600.0)

    class Impatient(Shutdown):
        """Waits for nothing any more, once it is asked to leave."""

        def wait(self, seconds: float) -> None:
            assert self.reason is None or seconds == 0.0
            super().wait(seconds)

    shutdown = Impatient()

    def away(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if kind_of(request) != "POST update":
                return handler(request)
            shutdown.request("SIGTERM received")
            raise httpx.ConnectError("Connection refused")

        return handle

    end = take_part(tmp_path, double, wrap=away, shutdown=shutdown)
    assert (end.status, end.reason) == ("interrupted", "SIGTERM received")
    assert pending_files(tmp_path) == ["report.json", "update.bin"]
    assert take_part(tmp_path, double).accepted == 1


def told_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, answers: list[httpx.Response | Exception]
) -> list[str]:
    """The log of a client whose first check-ins are answered so, from its first one on."""

    def wrap(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if kind_of(request) != "POST check-ins" or not answers:
                return handler(request)
            found = answers.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        return handle

    caplog.set_level(logging.INFO, logger="umbel.client")
    take_part(tmp_path, Double(AddOne().model), wrap=wrap)
    told = [record.getMessage() for record in caplog.records]
    return told[told.index("ward-7: asking for work in run demo") + 1 :]


def test_a_coordinator_that_went_away_and_is_back_is_told_of_once_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = told_while(tmp_path, caplog, [httpx.ConnectError("Connection refused")] * 3)
    assert told[0].startswith("no answer from the coordinator at coordinator.test: Connection refused; trying again")
    assert told[1] == "the coordinator answers again, at try 4"
    assert told[2].startswith("round 1: training")


def test_a_client_that_waits_says_so_once_and_again_when_a_run_is_paused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing(status: str, reason: str) -> httpx.Response:
        return answer({"run_status": status, "reason": reason, "retry_after_s": 0})

    waits, paused = ("1 of 2 clients waits", "nobody waits"), "the run is paused: night shift"
    answers = [*(nothing("running", reason) for reason in waits), nothing("paused", paused), nothing("paused", paused)]
    told = told_while(tmp_path, caplog, list(answers))
    assert told[:2] == [f"no work yet, {waits[0]}; waiting", f"no work yet, {paused}; waiting"]
    assert told[2].startswith("round 1: training")


def test_a_coordinator_that_closes_whatever_it_gives_is_asked_ever_more_seldom(tmp_path: Path) -> None:
    class Waiting(Shutdown):
        def __init__(self) -> None:
            super().__init__()
            self.waits = list[float]()

        def wait(self, seconds: float) -> None:
            self.waits.append(seconds)
            if len(self.waits) == 9:
                self.request("the test has seen enough")
            super().wait(0.0)

    def wrap(handle: Handler) -> Handler:
        def closed(request: httpx.Request) -> httpx.Response:
            if kind_of(request) != "GET models":
                return handle(request)
            return problem(409, "assignment-closed")

        return closed

    double, app, shutdown = Double(AddOne().model, rounds=99), AddOne(), Waiting()
    assert take_part(tmp_path, double, app, wrap, shutdown=shutdown).status == "interrupted"
    assert shutdown.waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])


def test_one_that_ends_after_several_failures_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = Double(AddOne().model, rounds=99)
    with pytest.raises(WorkRefused):
        run_client(
            AddOne(),
            URL,
            tmp_path,
            "demo",
            TOKEN,
            "ward-7",
            policy=SitePolicy(max_parameters=1),
            transport=double.transport(),
        )
    last = caplog.messages[-1]
    assert last.startswith("this client stops, because 3 assignments of run demo failed in a row. The last error: ")
    assert "max_parameters = 1" in last
