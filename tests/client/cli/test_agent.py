"""`umbel agent`: what its flags and variables say, and what it refuses before it asks a coordinator anything."""

import sys
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


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site's folder. Its code says so if somebody runs it."""
    (folder := tmp_path / "code" / "wards").mkdir(parents=True)
    (folder.parent / "folders" / "only").mkdir(parents=True)
    for name in ("ward", "my_hospital", "my_eeg", "wards/__init__", "wards/north", "folders/only/here"):
        (folder.parent / f"{name}.py").write_text("raise RuntimeError('the agent runs the code of the site')")
    monkeypatch.chdir(folder.parent)
    return folder.parent


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


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("wrd", "no module 'wrd' here; run this in the folder that holds wrd.py"),
        ("wards.south", "no module 'wards.south' here; run this in the folder that holds wards/south.py"),
        ("ward.north", "no module 'ward.north' here"),
        ("folders.only.there", "no module 'folders.only.there' here"),
        ("ward.py", "--app names a module, not a file such as 'ward.py'"),
        ("code/ward", "--app names a module, not a file such as 'code/ward'"),
    ],
)
def test_code_that_is_not_there_is_refused_before_the_agent_enrols(tmp_path: Path, module: str, said: str) -> None:
    refused = started(tmp_path / "state", "--token", "x", "--app", "ward:client", "--app", f"zzz-*={module}:client")
    assert refused.exit_code == 1
    assert said in refused.stderr
    assert not (tmp_path / "state").exists(), "it has made no key"


def test_code_is_found_in_the_current_directory_and_not_run(tmp_path: Path) -> None:
    names = ("a=wards.north", "b=json.decoder", "c=folders.only.here", "ward")
    apps = [word for name in names for word in ("--app", f"{name}:client")]
    path, modules = [*sys.path], {*sys.modules}
    assert "this client is not enrolled yet" in started(tmp_path / "state", *apps).stderr
    assert sys.path == path
    assert not {"wards", "wards.north", "ward"} & ({*sys.modules} - modules)
