"""What a coordinator says is shown as it is, and an unencrypted way to it is named."""

from dataclasses import replace

import pytest
from rich.console import Console

from tests.client.cli.answers import operator_that_hears
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.run.records import ClientRecord, Fate, LiveRound, RunView
from umbel.client import Operator
from umbel.client.cli.clients import create_tokens
from umbel.client.cli.runs import list_runs, stop_run
from umbel.client.cli.view import RunPicture

NAME = "[bold red]demo[/]\x1b]0;owned\x07"
SHOWN = "[bold red]demo[/]\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}"
RUN = RunView(NAME, RunStatus.RUNNING, "", 0, 1, 0.0, ModelRef(0, NAME, 1, "0" * 64))


def test_a_run_is_listed_by_its_name_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    list_runs(operator_that_hears({"GET /runs": [[RUN]]}), as_json=False)
    told = capsys.readouterr().out
    assert SHOWN in told
    assert "\x1b" not in told


def test_a_stopped_run_is_told_by_its_name_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    stopped = replace(RUN, status=RunStatus.STOPPED)
    answers = {"GET /runs/demo": RUN, "POST /runs/demo/stop": stopped}
    stop_run(operator_that_hears(answers), "demo", "enough", yes=True, as_json=False)
    assert capsys.readouterr().out.startswith(SHOWN)


def test_tokens_are_told_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    create_tokens(operator_that_hears({"POST /tokens": {"tokens": [NAME]}}), 1, 1.0, None, None, as_json=False)
    assert capsys.readouterr().out == SHOWN + "\n"


def test_a_run_and_its_clients_are_shown_by_their_names_as_they_are() -> None:
    clients = (ClientRecord(NAME, Fate.TRAINING, NAME, 1),)
    page = Console(width=200)
    with page.capture() as capture:
        page.print(RunPicture(RUN, (), LiveRound(1, 1, NAME, NAME, 0, 1, None, clients)))
    assert capture.get().count(SHOWN) == 5
    assert "\x1b]" not in capture.get()


@pytest.mark.parametrize(("url", "is_told"), [("http://10.0.0.7:8000", True), ("http://127.0.0.1:8000", False)])
def test_an_operator_is_told_that_others_can_read_the_key(
    url: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Operator(url, "secret").close()
    assert ("can read the admin key" in caplog.text) == is_told
    assert "secret" not in caplog.text
