"""A test that is not marked slow fails when it takes too long, and says by how much."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import PROCESSOR_SECONDS_MAX, too_long

ROOT = Path(__file__).parent.parent
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
        "this test took 5.1 s of processor time, and the limit is 5 s: "
        "mark it slow, or make it as fast as one that is done in 1 s"
    )
    assert too_long(took=1.0, spent=1.0, wall_max=1.0) is None
    assert "1.1 s, and the limit is 1 s" in str(too_long(took=1.1, spent=0.0, wall_max=1.0))


@pytest.mark.slow
def test_what_is_too_long_fails_unless_it_is_marked_slow(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_busy.py").write_text(BUSY.format(seconds=0.3))
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "--seconds-max", "0.2", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert "2 failed, 1 passed" in told, told
    assert "test_busy.py::test_unmarked" in told
    assert "test_busy.py::test_that_sleeps" in told
    assert told.count("s, and the limit is 0.2 s: mark it slow") == 2, told
