"""A test that is not marked slow fails when it takes too long, and says by how much."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT
from tests.suite.pace import COMMON_SECONDS, PROCESSOR_SECONDS_MAX, how_slow, slowness_of, too_long

FEW_EXAMPLES = """
from hypothesis import settings

settings.register_profile("few", max_examples=10)
settings.load_profile("few")
"""
BUSY = """
import time, pytest

def busy():
    until = time.process_time() + {seconds}
    while time.process_time() < until:
        pass

def test_unmarked():
    busy()

@pytest.mark.slow
def test_marked():
    busy()

def test_that_sleeps():
    time.sleep({seconds})
"""


def test_a_run_counts_processor_time_and_test_marks_counts_wall_time() -> None:
    assert too_long(took=100.0, spent=PROCESSOR_SECONDS_MAX, wall_max=None) is None, "the machine may be busy"
    assert too_long(took=6.0, spent=5.1, wall_max=None) == (
        "this test took 5.1 s of processor time, and the limit is 5 s on this machine: "
        "mark it slow, or make it as fast as one that is done in 1 s"
    )
    assert too_long(took=1.0, spent=1.0, wall_max=1.0) is None
    assert "1.1 s, and the limit is 1 s" in str(too_long(took=1.1, spent=0.0, wall_max=1.0))


def test_a_slow_machine_has_a_longer_limit_and_no_machine_a_shorter_one() -> None:
    assert too_long(took=8.0, spent=8.0, wall_max=None, slowness=2.0) is None
    assert "11.0 s of processor time, and the limit is 10 s" in str(too_long(11.0, 11.0, None, slowness=2.0))
    assert slowness_of(0.1 * COMMON_SECONDS) == slowness_of(COMMON_SECONDS) == 1.0
    assert slowness_of(3 * COMMON_SECONDS) == 3.0


def test_a_process_finds_out_once_how_slow_its_machine_is() -> None:
    found = how_slow()
    assert found >= 1.0
    assert how_slow() == found


@pytest.mark.slow
def test_what_is_too_long_fails_unless_it_is_marked_slow(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(FEW_EXAMPLES)
    (tmp_path / "test_busy.py").write_text(BUSY.format(seconds=0.3))
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-rfp"]
    plugins = ["-p", "tests.suite.pace", "-p", "pytest_timeout"]  # pyproject.toml has a key of pytest-timeout's
    told = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *plugins, "--seconds-max", "0.2", str(tmp_path)],
        # Other plugins take seconds to load. A narrow terminal has the reasons cut.
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "400"},
        cwd=tmp_path,  # names of tests are said relative to it
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout
    lines = told.splitlines()
    for name in ("test_unmarked", "test_that_sleeps"):
        reason = "".join(line for line in lines if line.startswith(f"FAILED test_busy.py::{name} "))
        assert "s, and the limit is 0.2 s: mark it slow" in reason, told
    assert "PASSED test_busy.py::test_marked" in lines, told
