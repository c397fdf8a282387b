"""`umbel site`: a person at the site sees the runs and decides, without a network, whether the agent runs or not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.client.agent.runs import ONE, run_named
from umbel.client.agent.board import BoardFile, RunsBoard, SiteRun
from umbel.client.agent.decisions import DecisionStore
from umbel.client.agent.verdict import Stand
from umbel.client.cli.site_runs import seen_of, site_app

PLAIN = replace(run_named("eeg"), is_secure=False)
BOARD = RunsBoard(
    "ward",
    "http://fl.example.org",
    2,
    (
        SiteRun(ONE, "waiting for a person", Stand.ASKED, "decide: umbel site allow heart-1", "heart:client"),
        SiteRun(PLAIN, "refused", Stand.REFUSED, "this site's policy requires secure aggregation"),
        SiteRun(run_named("mri"), "no code", Stand.NO_APP, "no --app of this agent names it"),
    ),
)
Umbel = Callable[..., Result]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "state" / "fl-example-org-443-12345678"
    home.mkdir(parents=True)
    BoardFile(home).show(BOARD)
    return home


@pytest.fixture
def umbel(tmp_path: Path) -> Umbel:
    return lambda *words: CliRunner().invoke(site_app, [*words, "--state", str(tmp_path / "state")])


@pytest.mark.usefixtures("home")
def test_the_table_says_what_each_run_would_get_and_what_to_do(umbel: Umbel) -> None:
    first, heads, heart, eeg, mri = umbel("runs").stdout.splitlines()
    assert first == "ward at http://fl.example.org: the agent runs; at most 2 runs train at once"
    assert heads.split() == ["run", "state", "model", "coordinator", "sees", "code", "what", "to", "do"]
    for words in (
        "heart-1",
        "waiting for a person",
        "100 values (aaaaaaaa)",
        "sums of 3 or more sites",
        "heart:client",
    ):
        assert words in heart
    assert "this site's update" in eeg
    assert "no --app of this agent names it" in mri


@pytest.mark.usefixtures("home")
def test_the_table_for_programs_is_json(umbel: Umbel) -> None:
    [shown] = json.loads(umbel("runs", "--json").stdout)
    assert (shown["is_alive"], shown["board"]["runs"][0]["run"]["name"]) == (True, "heart-1")


def test_a_decision_is_about_this_very_run(home: Path, umbel: Umbel) -> None:
    said = umbel("allow", "heart-1").stdout
    assert said == "allowed heart-1: 100 values (aaaaaaaa); the coordinator sees sums of 3 or more sites\n"
    decision = DecisionStore(home).of(ONE.name)
    assert decision is not None
    assert (decision.identity, decision.is_allowed) == (ONE.identity, True)
    assert umbel("deny", "heart-1").stdout.startswith("denied heart-1")
    denied = DecisionStore(home).of(ONE.name)
    assert denied is not None
    assert not denied.is_allowed


def test_nobody_allows_what_the_policy_refuses(home: Path, umbel: Umbel) -> None:
    refused = umbel("allow", "eeg")
    assert refused.exit_code == 1
    assert refused.stderr == ("umbel: no person can allow run 'eeg': this site's policy requires secure aggregation\n")
    assert DecisionStore(home).of(PLAIN.name) is None
    assert umbel("deny", "eeg").exit_code == 0


def test_what_else_is_missing_is_said(home: Path, umbel: Umbel) -> None:
    BoardFile(home).show(BOARD)
    file = BoardFile(home)
    file.show(replace(BOARD, trouble="the coordinator has not answered yet"))
    file.hide()
    said = umbel("allow", "mri").stdout
    assert "but this agent has no code for it" in said
    assert "the agent does not run now" in said
    shown = umbel("runs").stdout
    assert "the agent does not run; this is what it saw last" in shown
    assert "the coordinator has not answered yet" in shown


@pytest.mark.usefixtures("home")
def test_a_run_that_is_not_known_is_refused(umbel: Umbel) -> None:
    refused = umbel("allow", "other")
    assert refused.exit_code == 1
    assert "the agent knows no open run named 'other'" in refused.stderr


def test_a_name_at_two_coordinators_needs_the_coordinator(home: Path, umbel: Umbel) -> None:
    other = home.parent / "other"
    other.mkdir()
    BoardFile(other).show(replace(BOARD, server="http://other.example.org"))
    assert "name one with --server" in umbel("allow", "heart-1").stderr
    assert umbel("allow", "heart-1", "--server", "http://other.example.org").exit_code == 0
    assert DecisionStore(home).of(ONE.name) is None
    assert DecisionStore(other).of(ONE.name) is not None


def test_where_no_agent_has_run_that_is_said(umbel: Umbel) -> None:
    refused = umbel("runs")
    assert refused.exit_code == 1
    assert "no agent has run with the state directory" in refused.stderr


def test_what_a_run_shows_of_a_site_is_in_words() -> None:
    assert seen_of(replace(ONE, is_private=True)) == "sums of 3 or more sites, with noise"
    assert seen_of(PLAIN) == "this site's update"
