"""The operator's calls: following a run over a restart, stopping one, downloading its model."""

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from pydantic import TypeAdapter

from tests.client.cli.answers import operator_that_hears
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.run.records import RunProgress, RunView
from umbel.client import Operator
from umbel.client.cli.runs import stop_run
from umbel.client.errors import CoordinatorUnreachable, OutOfTime

RUN = RunView("ward", RunStatus.RUNNING, "", 1, 5, 1.7e9, ModelRef(1, "a" * 64, 100, "b" * 64))
OVER = replace(RUN, status=RunStatus.FINISHED, reason="all 5 rounds are committed")
NEWS, END = RunProgress(RUN, (), 0, None), RunProgress(OVER, (), 0, None)
GONE = httpx.ConnectError("connection refused")
PROGRESS = "GET /runs/ward/progress"


def test_who_follows_a_run_survives_a_restart_and_hears_of_it_once(caplog: pytest.LogCaptureFixture) -> None:
    operator = operator_that_hears({PROGRESS: [NEWS, GONE, GONE, NEWS, END]})
    with caplog.at_level(logging.WARNING):
        assert list(operator.follow("ward", 0.0, patience_s=60.0)) == [NEWS, NEWS, END]
    assert [record.getMessage().count("trying again") for record in caplog.records] == [1]


def test_patience_ends_and_says_what_it_waited_for() -> None:
    news = operator_that_hears({PROGRESS: [NEWS, *[GONE] * 99]}).follow("ward", 0.0, patience_s=0.2)
    next(news)
    with pytest.raises(OutOfTime, match=r"no answer after 0\.2 s of retries: no answer from the coordinator"):
        next(news)


def test_an_address_where_nobody_answers_is_told_at_once() -> None:
    with pytest.raises(CoordinatorUnreachable):
        next(operator_that_hears({PROGRESS: [GONE]}).follow("ward", 0.0, patience_s=60.0))


def test_who_follows_gives_back_the_mark_of_the_last_answer() -> None:
    asked = list[httpx.URL]()

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url)
        told = END if len(asked) == 3 else replace(NEWS, mark="ab.1&after=9" if len(asked) == 1 else "")
        return httpx.Response(200, content=iter([TypeAdapter(RunProgress).dump_json(told)]))

    with Operator("https://coordinator.test", "secret", httpx.MockTransport(handle)) as operator:
        assert len(list(operator.follow("ward", 1.0))) == 3
    assert [url.params.get("mark") for url in asked] == [None, "ab.1&after=9", None]
    assert [url.params["after"] for url in asked] == ["0"] * 3


def test_without_patience_following_is_one_try() -> None:
    news = operator_that_hears({PROGRESS: [NEWS, GONE]}).follow("ward", 0.0)
    next(news)
    with pytest.raises(CoordinatorUnreachable):
        next(news)


def test_a_run_that_is_over_is_not_stopped_again(capsys: pytest.CaptureFixture[str]) -> None:
    stop_run(operator_that_hears({"GET /runs/ward": OVER}), "ward", "enough", yes=False, as_json=False)
    told = capsys.readouterr()
    assert told.err == "ward is over already; nothing was stopped\n"
    assert "finished" in told.out


def test_a_model_lands_where_a_path_or_its_text_says_and_a_missing_folder_is_named(tmp_path: Path) -> None:
    model = b"weights"
    answer = httpx.MockTransport(lambda _: httpx.Response(200, content=iter([model])))
    with Operator("https://coordinator.test", "secret", answer) as operator:
        operator.download_model(hashlib.sha256(model).hexdigest(), str(tmp_path / "out.safetensors"))
        with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere to write out\.safetensors to"):
            operator.download_model("0" * 64, tmp_path / "nowhere" / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == model


def test_a_run_goes_as_its_file_alone_or_with_the_list_beside_it() -> None:
    came = list[tuple[str, bytes]]()

    def handle(request: httpx.Request) -> httpx.Response:
        came.append((request.headers["content-type"], request.read()))
        return httpx.Response(200, content=iter([TypeAdapter(RunView).dump_json(RUN)]))

    with Operator("https://coordinator.test", "secret", httpx.MockTransport(handle)) as operator:
        assert operator.create_run("ward", "name = 1", "a" * 64) == RUN
        assert operator.create_run("ward", "name = 1", "a" * 64, members='{"list": {}}') == RUN
    (plain, text), (with_list, message) = came
    assert (plain, text) == ("application/toml", b"name = 1")
    assert (with_list, json.loads(message)) == ("application/json", {"run_file": "name = 1", "members": '{"list": {}}'})
