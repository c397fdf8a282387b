"""Verbs that neither train nor read a model answer without torch, which takes longer to import than they to run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from umbel.client.cli.output import FINAL_STATUS

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from umbel.__main__ import main; main()"
NOBODY = "http://127.0.0.1:9"


def umbel(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    """`umbel WORDS` where torch cannot be imported."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, words)]
    env = {**os.environ, "UMBEL_ADMIN_KEY": "key"}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def told(*words: str | Path) -> Any:
    done = umbel(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_an_agent_and_what_a_person_asks_of_it_need_no_torch(tmp_path: Path) -> None:
    """The processes of its runs do; the agent itself stays small."""
    refused = umbel("agent", "--server", NOBODY, "--app", "json:client", "--state", tmp_path)
    assert refused.returncode == FINAL_STATUS
    assert "this client is not enrolled yet" in refused.stderr
    assert "no agent has run" in umbel("site", "runs", "--state", tmp_path).stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_a_list_is_made_signed_and_trusted_without_torch(tmp_path: Path) -> None:
    file, key_file, state = tmp_path / "1.json", tmp_path / "anna.pem", tmp_path / "north"
    told("members", "new", "--name", "pilot", "--quorum", "1", "--out", file)
    officer = told("members", "officer-key", "--out", key_file)
    (client,) = told("fingerprint", "--state", state, "--server", NOBODY)
    told("members", "add-officer", file, "anna", officer["public_key"])
    told("members", "add", file, "north", client["public_key"])
    assert told("members", "sign", file, "--key", key_file)["signed_by"] == ["anna"]
    assert told("members", "trust", file, "--state", state, "--yes")[0]["name"] == "pilot"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "client list",
        "client remove ward-7 --yes",
        "token create",
        "run list",
        "run watch demo",
        "run pause demo",
        "run audit demo",
        "run export demo --out model.safetensors",
        "run export-trace demo --out trace.json",
    ],
)
def test_an_operators_verb_gets_as_far_as_the_network_without_torch(words: str) -> None:
    done = umbel(*words.split(), "--server", NOBODY)
    assert done.returncode == 1
    assert done.stderr.startswith("umbel: no answer from the coordinator at 127.0.0.1:9"), done.stderr


@pytest.mark.slow
def test_what_needs_torch_is_seen_to_need_it(tmp_path: Path) -> None:
    done = umbel("model", "init", "--app", "json:client", "--out", tmp_path / "model.safetensors")
    assert "import of torch halted" in done.stderr
