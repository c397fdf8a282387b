"""A test that is not marked slow fails when it takes too long and time is measured, and says by how much."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

SLEEPING = """
import time, pytest

def test_unmarked():
    time.sleep(0.3)

@pytest.mark.slow
def test_marked():
    time.sleep(0.3)
"""


def told(directory: Path, *options: str) -> list[str]:
    (directory / "test_sleeping.py").write_text(SLEEPING)
    common = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(directory), "-p", "no:cacheprovider", "-rfp"]
    plugins = ["-p", "tests.suite.pace", "-p", "pytest_timeout"]  # pyproject.toml has a key of pytest-timeout's
    return subprocess.run(
        [sys.executable, "-m", "pytest", *common, *plugins, *options, str(directory)],
        # Other plugins take seconds to load. A narrow terminal has the reasons cut.
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "400"},
        cwd=directory,  # names of tests are said relative to it
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout.splitlines()


@pytest.mark.slow
def test_what_is_too_long_fails_unless_it_is_marked_slow(tmp_path: Path) -> None:
    lines = told(tmp_path, "--seconds-max", "0.2")
    reason = "".join(line for line in lines if line.startswith("FAILED test_sleeping.py::test_unmarked "))
    assert "s, and the limit is 0.2 s: mark it slow" in reason, lines
    assert "PASSED test_sleeping.py::test_marked" in lines, lines


@pytest.mark.slow
def test_no_run_fails_for_its_time_that_does_not_measure_it(tmp_path: Path) -> None:
    lines = told(tmp_path)
    assert {"PASSED test_sleeping.py::test_unmarked", "PASSED test_sleeping.py::test_marked"} <= {*lines}, lines
