"""`umbel client check` as a person or a program calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from umbel.__main__ import app, mount
from umbel.client.cli.check import show_findings
from umbel.client.findings import ClientCheck, ClientFinding

pytestmark = pytest.mark.slow  # each check has some fifteen trainings
RUN_FILE = """
name = "wards"
rounds = { count = 3, target = 2 }
[training]
local_epochs = 2
proximal_mu = 0.01
options = { stage = "head" }
"""


def call(*words: str) -> tuple[int, str]:
    mount()
    done = CliRunner().invoke(app, ["client", "check", *words])
    return done.exit_code, done.output


def test_a_good_client_ends_with_status_0_and_a_row_for_each_check() -> None:
    status, text = call("--app", "tests.client.check.clients:Ward", "--steps", "4")
    assert status == 0, text
    assert "determinism" in text
    assert "wrong" not in text


def test_a_broken_client_ends_with_status_1_and_one_json_object(tmp_path: Path) -> None:
    file = tmp_path / "wards.toml"
    file.write_text(RUN_FILE)
    broken = "tests.client.check.test_check:IgnoresGradientRules"
    status, text = call("--app", broken, "--steps", "4", "--json", "--run-file", str(file))
    found = {one["check"]: one for one in json.loads(text)["findings"]}
    assert status == 1
    assert found["proximal_mu"]["verdict"] == "wrong"
    assert "plan.adjust_gradients" in found["proximal_mu"]["advice"]
    assert found["clip_norm"]["verdict"] == "skipped"


def test_what_was_found_fits_the_columns_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = ClientFinding("certificate", "warning", "the certificate " * 9, "ask the operator " * 9)
    show_findings(ClientCheck((found,)), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("operator") for line in lines) == 9, "it is wrapped, and not cut"


def test_what_cannot_be_checked_is_one_sentence(tmp_path: Path) -> None:
    status, text = call("--app", "tests.client.check.clients:N")
    assert status == 1
    assert text.startswith("umbel: tests.client.check.clients:N is a int")
