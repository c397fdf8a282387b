"""What the operator's verbs print, and with which status they end: for answers of a coordinator made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import typer
from pydantic import TypeAdapter
from typer.testing import CliRunner

from tests.client.cli.answers import operator_that_hears
from tests.client.cli.test_view import ROUND
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.run.records import RunProgress, RunView, VersionRecord
from umbel.client import Operator
from umbel.client.cli.models import export_model, list_versions
from umbel.client.cli.runs import pause_run, resume_run, roll_back, show_run, stop_run, watch_run

RUN = RunView("ward", RunStatus.RUNNING, "", 3, 5, 1.7e9, ModelRef(3, "c" * 64, 100, "b" * 64))
PAUSED = replace(RUN, status=RunStatus.PAUSED, reason="night shift")
VERSIONS = [
    VersionRecord(0, "a" * 64, 2_000_000, 1.7e9),
    VersionRecord(1, "b" * 64, 2_000_000, 1.7e9, round=1, sample_count=70, metrics={"loss": 0.5}, deleted_at=1.8e9),
    VersionRecord(2, "a" * 64, 2_000_000, 1.7e9, rolled_back_to=0, evaluation={"accuracy": 0.75}, is_best=True),
]


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(("status", "code"), [(RunStatus.FINISHED, 0), (RunStatus.STOPPED, 1), (RunStatus.FAILED, 1)])
def test_watching_goes_on_while_a_run_is_paused_and_ends_as_the_run_does(
    status: RunStatus, code: int, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    over = replace(RUN, status=status, reason="round 4 was abandoned 5 times, and the run file allows no more")
    news = [RunProgress(view, (), 0, None) for view in (RUN, PAUSED, RUN, over)]
    ended_with = 0
    try:
        watch_run(operator_that_hears({"GET /runs/ward/progress": list(news)}), "ward", as_json)
    except typer.Exit as exit_:
        ended_with = exit_.exit_code
    assert ended_with == code
    assert as_json or "the run file allows no more" in capsys.readouterr().out


def test_an_order_tells_how_the_run_stands_and_what_it_did_not_change(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"GET /runs/ward": [RUN], "POST /runs/ward/pause": [PAUSED]}
    pause_run(operator_that_hears(answers), "ward", "night shift", now=False, as_json=False)
    assert capsys.readouterr().out == "ward: paused, 3 of 5 rounds. night shift\n"
    answers = {"GET /runs/ward": [PAUSED], "POST /runs/ward/pause": [PAUSED]}
    pause_run(operator_that_hears(answers), "ward", "again", now=False, as_json=False)
    assert capsys.readouterr().err == "ward is paused already\n"
    answers = {"GET /runs/ward": [RUN], "POST /runs/ward/resume": [RUN]}
    resume_run(operator_that_hears(answers), "ward", as_json=False)
    assert capsys.readouterr().err == "ward is not paused\n"
    resume_run(operator_that_hears(answers), "ward", as_json=True)
    assert json.loads(capsys.readouterr().out)["status"] == "running"
    stop_run(
        operator_that_hears({"GET /runs/ward": [PAUSED], "POST /runs/ward/stop": [RUN]}),
        "ward",
        "enough",
        yes=True,
        as_json=True,
    )
    assert not capsys.readouterr().err


@pytest.mark.parametrize("to", ["newest", "-1", "1.0", ""])
def test_a_version_that_is_none_is_told_before_anything_is_sent(to: str) -> None:
    asked: list[str] = []
    operator = operator_that_hears({"GET /runs/ward": RUN}, asked)
    with pytest.raises(ValueError, match="must be a version's number, or best"):
        roll_back(operator, "ward", to, "why", as_json=False)
    assert "POST /runs/ward/rollback" not in asked


@pytest.mark.parametrize(("to", "body"), [("best", "best"), ("2", 2)])
def test_a_run_is_rolled_back_to_a_version_or_to_the_best(to: str, body: object) -> None:
    sent = list[object]()

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            sent.append(json.loads(request.content)["to"])
        return httpx.Response(200, content=iter([TypeAdapter(RunView).dump_json(RUN)]))

    operator = Operator("https://coordinator.test", "secret", httpx.MockTransport(handle))
    roll_back(operator, "ward", to, "why", as_json=False)
    assert sent == [body]


def test_versions_are_a_table_for_people_and_whole_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    pages = {"GET /runs/ward/versions": [VERSIONS, []]}
    list_versions(operator_that_hears(pages), "ward", shows_all=True)
    groups, header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["version", "sha256", "MB"]
    assert ["the start" in rows[0], "round 1" in rows[1], "rollback to 0" in rows[2]] == [True] * 3
    assert ["deleted 2027" in row for row in rows] == [False, True, False]
    assert rows[1].index("0.5000") == groups.index("training") == header.index("loss")
    assert rows[2].index("0.7500") == groups.index("held-out") == header.index("accuracy")
    assert [row.rstrip().endswith("best") for row in rows] == [False, False, True]
    assert rows[1].index("deleted 2027-01-15 08:00Z") == header.index("state")
    list_versions(operator_that_hears({"GET /runs/ward/versions": [VERSIONS, []]}), "ward", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert [one["rolled_back_to"] for one in told] == [None, None, 0]


def test_the_tables_of_a_pipe_are_at_most_100_columns_wide_unless_all_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    many = {f"a_metric_of_some_length_{number}": 0.5 for number in range(12)}
    page = RunProgress(RUN, (replace(ROUND, metrics=many, evaluation=many),), 1, None)
    for shows_all in (False, True):
        asked = operator_that_hears({"GET /runs/ward/progress": [page, replace(page, ended=())]})
        show_run(asked, "ward", shows_all=shows_all)
        lines = capsys.readouterr().out.splitlines()
        [heads] = [place for place, line in enumerate(lines) if line.startswith("round  ")]
        assert (max(map(len, lines[heads - 1 : heads + 2])) > 100) == shows_all
        assert any(line.startswith("no room for: ") for line in lines) != shows_all
        assert lines[heads].count("a_metric_of_some_length_11") == 2 * shows_all


def test_a_run_without_a_best_version_exports_none(tmp_path: Path) -> None:
    without = [replace(one, is_best=False) for one in VERSIONS]
    with pytest.raises(ValueError, match="run ward has no best version, because its run file has no"):
        export_model(operator_that_hears({"GET /runs/ward/versions": [without, []]}), "ward", tmp_path / "no", "best")
    assert list(tmp_path.iterdir()) == []


def test_a_version_that_is_gone_is_not_exported(tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    for found, sentence in (([VERSIONS[1]], "version 1 was deleted"), ([], "no version 1, only 0 to 3")):
        operator = operator_that_hears({"GET /runs/ward": [RUN], "GET /runs/ward/versions": [found, []]})
        with pytest.raises(ValueError, match=sentence):
            export_model(operator, "ward", out, "1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "rounds_done", "done"),
    [("n\n", 3, "3 of 5 rounds are done"), ("", 3, "3 of 5 rounds are done"), ("n\n", 1, "1 of 5 rounds is done")],
)
def test_no_run_is_stopped_for_good_without_a_yes(answer: str, rounds_done: int, done: str) -> None:
    verb, asked = typer.Typer(), list[str]()
    operator = operator_that_hears({"GET /runs/ward": [replace(RUN, rounds_done=rounds_done)]}, asked)
    verb.command()(lambda: stop_run(operator, "ward", "enough", yes=False, as_json=False))
    outcome = CliRunner().invoke(verb, [], input=answer)
    assert (outcome.exit_code, asked) == (1, ["GET /runs/ward"])
    assert f"ward: {done}. Stop the run for good?" in outcome.stderr
