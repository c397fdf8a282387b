"""`umbel site`: a person at the site sees the runs and decides, without a network, whether the agent runs or not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.client.agent.runs import CHANGED, ONE, run_named
from umbel.aggregation.messages import OpenRun
from umbel.client.agent.board import BoardFile, RunsBoard, SiteRun
from umbel.client.agent.decisions import HASH_DIGITS, DecisionStore, SiteDecision
from umbel.client.agent.verdict import Stand
from umbel.client.cli import site_runs
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
    def invoke(*words: str, answer: str | None = None) -> Result:
        return CliRunner().invoke(site_app, [*words, "--state", str(tmp_path / "state")], input=answer)

    return invoke


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody is there to ask."""
    monkeypatch.setattr(site_runs, "has_terminal", lambda: True)


def hash_of(umbel: Umbel, name: str = "heart-1") -> str:
    """As `umbel site runs` shows it."""
    line = next(line for line in umbel("runs").stdout.splitlines() if line.split()[0] == name)
    found = line.split()[1]
    assert len(found) == HASH_DIGITS
    assert int(found, 16) >= 0
    return found


def offered(home: Path, run: OpenRun) -> OpenRun:
    """The coordinator changes its offer, and the agent shows that."""
    first, *rest = BOARD.runs
    BoardFile(home).show(replace(BOARD, runs=(replace(first, run=run), *rest)))
    return run


def decision(home: Path, run: OpenRun = ONE) -> SiteDecision | None:
    return DecisionStore(home).of(run.name)


@pytest.mark.usefixtures("home")
def test_the_table_says_what_each_run_would_get_and_below_it_what_to_do(umbel: Umbel) -> None:
    first, heads, heart, eeg, _, *reasons = umbel("runs", "--all").stdout.splitlines()
    assert first == "ward at http://fl.example.org: the agent runs; at most 2 runs train at once"
    assert heads.split() == ["run", "hash", "state", "model", "coordinator", "sees", "code"]
    for words in (
        "heart-1",
        "waiting for a person",
        "100 values (aaaaaaaa)",
        "sums of 3 or more sites",
        "heart:client",
    ):
        assert words in heart
    assert "this site's update" in eeg
    assert reasons == [
        "heart-1: decide: umbel site allow heart-1",
        "eeg: this site's policy requires secure aggregation",
        "mri: no --app of this agent names it",
    ]


@pytest.mark.usefixtures("home")
def test_the_table_fits_the_columns_that_there_are(umbel: Umbel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, heads, heart, _, _, left_out, *_ = umbel("runs").stdout.splitlines()
    assert max(len(heads), len(heart)) <= 80
    assert "sums of 3 or more sites" in heart
    assert left_out == "no room for: model (--all and --json show them)"


@pytest.mark.usefixtures("home")
def test_the_table_for_programs_is_json(umbel: Umbel) -> None:
    [shown] = json.loads(umbel("runs", "--json").stdout)
    assert (shown["is_alive"], shown["board"]["runs"][0]["run"]["name"]) == (True, "heart-1")
    assert shown["hashes"]["heart-1"] == hash_of(umbel)


def test_a_decision_is_about_this_very_run(home: Path, umbel: Umbel) -> None:
    said = umbel("allow", "heart-1", hash_of(umbel)).stdout
    assert said == "allowed heart-1: 100 values (aaaaaaaa); the coordinator sees sums of 3 or more sites\n"
    allowed = decision(home)
    assert allowed is not None
    assert (allowed.identity, allowed.is_allowed, allowed.is_outdated) == (ONE.identity, True, False)
    assert umbel("deny", "heart-1").stdout.startswith("denied heart-1")
    denied = decision(home)
    assert denied is not None
    assert not denied.is_allowed


@pytest.mark.parametrize("changed", CHANGED)
def test_an_offer_that_changed_after_a_person_saw_it_is_not_allowed(home: Path, umbel: Umbel, changed: str) -> None:
    seen = hash_of(umbel)
    offered(home, CHANGED[changed])
    refused = umbel("allow", "heart-1", seen)
    assert refused.exit_code == 1
    assert f"run 'heart-1' does not have the hash '{seen}' now" in refused.stderr
    assert decision(home) is None
    assert umbel("allow", "heart-1", hash_of(umbel)).exit_code == 0


def test_a_hash_is_known_to_this_site_only_so_that_no_coordinator_finds_two_offers_with_one_hash(
    home: Path, umbel: Umbel
) -> None:
    (other := home.parent / "other").mkdir()
    assert DecisionStore(other).hash_of(ONE) != DecisionStore(home).hash_of(ONE)
    assert not ONE.identity.startswith(hash_of(umbel))
    assert DecisionStore(home).hash_of(ONE) == hash_of(umbel), "it stays the same"
    assert (home / "decisions" / "secret").stat().st_mode & 0o077 == 0
    assert "secret" not in umbel("runs", "--json").stdout


def test_a_damaged_secret_makes_no_hash(home: Path, umbel: Umbel) -> None:
    hash_of(umbel)
    (home / "decisions" / "secret").write_bytes(b"")
    damaged = umbel("runs").stderr
    assert "is damaged; remove it, and look at the runs again" in damaged
    assert f"umbel site runs --state {home.parent}" in damaged
    assert "is damaged; remove it" in umbel("allow", "heart-1", "0" * 12).stderr
    assert decision(home) is None


def test_without_a_hash_and_without_a_terminal_nothing_is_allowed(home: Path, umbel: Umbel) -> None:
    refused = umbel("allow", "heart-1", answer="y\n")
    assert refused.exit_code == 1
    assert f"umbel site runs --state {home.parent} shows it" in refused.stderr
    assert f"umbel site allow heart-1 HASH --state {home.parent} allows exactly this run" in refused.stderr
    assert decision(home) is None


@pytest.mark.usefixtures("terminal")
def test_at_a_terminal_the_terms_are_shown_and_a_person_is_asked(home: Path, umbel: Umbel) -> None:
    offered(home, replace(ONE, is_private=True, members_sha256="d" * 64))
    for answer in ("n\n", ""):
        refused = umbel("allow", "heart-1", answer=answer)
        assert refused.exit_code == 1
        assert decision(home) is None
    said = umbel("allow", "heart-1", answer="y\n")
    for words in ("sums of 3 or more sites, with noise", "a" * 64, "b" * 64, "d" * 64):
        assert words in said.stderr
    assert said.stdout.endswith("with noise\n")
    assert "allowed heart-1: 100 values" in said.stdout


@pytest.mark.usefixtures("terminal")
def test_the_decision_is_about_the_terms_in_the_question_and_not_about_those_of_a_moment_later(
    home: Path, umbel: Umbel, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = list[OpenRun]()

    def confirm(_question: str, **_options: bool) -> bool:
        later.append(offered(home, CHANGED["minimum"]))  # while the person reads
        return True

    monkeypatch.setattr("typer.confirm", confirm)
    assert umbel("allow", "heart-1").exit_code == 0
    allowed = decision(home)
    assert allowed is not None
    assert allowed.identity == ONE.identity != later[0].identity


def test_who_has_allowed_exactly_this_run_is_not_asked_again(home: Path, umbel: Umbel) -> None:
    """As to try a failed run at once."""
    umbel("allow", "heart-1", hash_of(umbel))
    assert umbel("allow", "heart-1").exit_code == 0
    offered(home, CHANGED["minimum"])
    assert umbel("allow", "heart-1").exit_code == 1
    offered(home, ONE)
    umbel("deny", "heart-1")
    assert umbel("allow", "heart-1").exit_code == 1
    (home / "decisions" / "heart-1.json").write_text("{")
    assert umbel("allow", "heart-1").exit_code == 1
    assert umbel("allow", "heart-1", hash_of(umbel)).exit_code == 0, "it replaces a damaged file"


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
    said = umbel("allow", "mri", hash_of(umbel, "mri")).stdout
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
    hash_ = DecisionStore(other).hash_of(ONE)
    assert umbel("allow", "heart-1", hash_, "--server", "http://other.example.org").exit_code == 0
    assert DecisionStore(home).of(ONE.name) is None
    assert DecisionStore(other).of(ONE.name) is not None


def test_where_no_agent_has_run_that_is_said(umbel: Umbel) -> None:
    refused = umbel("runs")
    assert refused.exit_code == 1
    assert "no agent has run with the state directory" in refused.stderr


def test_what_a_run_shows_of_a_site_is_in_words() -> None:
    assert seen_of(replace(ONE, is_private=True)) == "sums of 3 or more sites, with noise"
    assert seen_of(PLAIN) == "this site's update"
