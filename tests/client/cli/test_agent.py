"""`umbel agent`: what its flags and variables say, and what it refuses before it asks a coordinator anything."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from umbel.client.cli.agent import agent
from umbel.client.cli.output import FINAL_STATUS

SERVER = "http://127.0.0.1:9"


def started(state: Path, *words: str, **variables: str) -> Result:
    verb = typer.Typer()
    verb.command()(agent)
    arguments = ["--server", SERVER, "--state", str(state), *words]
    return CliRunner(env=variables).invoke(verb, arguments)


def test_a_unit_names_the_code_of_several_runs_in_one_variable(tmp_path: Path) -> None:
    refused = started(tmp_path, UMBEL_APP="ward-*=my_hospital:client eeg-*=my_eeg")
    assert refused.exit_code == 1
    assert "not 'eeg-*=my_eeg'" in refused.stderr
    enough = started(tmp_path, UMBEL_APP="ward-*=my_hospital:client eeg-*=my_eeg:client")
    assert "this client is not enrolled yet" in enough.stderr
    assert enough.exit_code == FINAL_STATUS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing option '--app'"),
        (("--app", "ward"), "--app must look like"),
        (("--app", "ward:client", "--at-once", "0"), "--at-once must lie between 1 and 256, not 0"),
        (("--app", "ward:client", "--policy", "nowhere.toml"), "this client is not enrolled yet"),
        (("--app", "ward:client", "--token", "x", "--policy", "nowhere.toml"), "nowhere.toml cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    refused = started(tmp_path, *words)
    assert refused.exit_code != 0
    assert said in refused.output
    assert "Traceback" not in refused.output


def test_a_policy_that_is_not_valid_keeps_an_agent_from_starting(tmp_path: Path) -> None:
    policy = tmp_path / "site.toml"
    policy.write_text("allowed = []\n")
    refused = started(tmp_path / "state", "--app", "ward:client", "--token", "x", "--policy", str(policy))
    assert refused.exit_code == 1
    assert "unknown key 'allowed'" in refused.stderr
    assert not list((tmp_path / "state").glob("*/agent.json")), "no agent has run"
