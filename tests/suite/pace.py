"""How long a test may take that is not marked `slow`: a second.

Wall time on a shared machine says more about the neighbours than about the test. So every run measures processor time,
of the test's process and of the children that it has waited for, and fails at five seconds. On a slower machine the
limit is longer by as much as the machine is slower (`how_slow`), so that a test passes or fails everywhere alike.
`make test-marks` measures wall time on a quiet machine and fails at one second. That also finds tests that sleep or
wait. `tests/conftest.py` has the hooks from here.
"""

import os
import time
from collections.abc import Generator
from functools import cache

import pytest
from hypothesis import settings

SECONDS_MAX = 1.0
PROCESSOR_SECONDS_MAX = 5.0
_EXAMPLES_MAX = 50  # profiles with more examples take as long as they take
_CALIBRATION_STEPS, _CALIBRATION_RUNS = 200_000, 5
# An estimate of the processor time of those steps on a common desktop with CPython 3.11: 0.4 s for ten million. Two
# cores of a shared server took 0.6 s, with few neighbours. If the estimate is too low, the limit is merely more
# generous, and `make test-marks` is strict.
COMMON_SECONDS = 0.008


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds-max", type=float, help="fail a test that takes longer and is not marked slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a test that passes, is not marked slow and takes too long."""
    began, spent = time.monotonic(), _processor_seconds()
    yield
    took, spent = time.monotonic() - began, _processor_seconds() - spent
    if item.get_closest_marker("slow") is None and settings().max_examples <= _EXAMPLES_MAX:
        wall_max: float | None = item.config.getoption("--seconds-max")
        # No machine counts as faster than a common one. So most runs need no calibration.
        slowness = how_slow() if spent > PROCESSOR_SECONDS_MAX else 1.0
        if complaint := too_long(took, spent, wall_max, slowness):
            pytest.fail(complaint, pytrace=False)


def too_long(took: float, spent: float, wall_max: float | None, slowness: float = 1.0) -> str | None:
    """Return the complaint about a test that took and spent this many seconds, or None if it kept to the limits.

    `slowness`: of this machine, from `how_slow`.
    """
    limit = PROCESSOR_SECONDS_MAX * slowness
    if wall_max is not None and took > wall_max:
        found = f"{took:.1f} s, and the limit is {wall_max:g} s"
    elif spent > limit:
        found = f"{spent:.1f} s of processor time, and the limit is {limit:.3g} s on this machine"
    else:
        return None
    return f"this test took {found}: mark it slow, or make it as fast as one that is done in {SECONDS_MAX:g} s"


@cache
def how_slow() -> float:
    """Return how many times slower this machine is than a common one, and 1.0 if it is faster.

    Takes the fastest of a few short runs, so that a moment in which the machine stalls does not count.
    """
    return slowness_of(min(_calibration_seconds() for _ in range(_CALIBRATION_RUNS)))


def slowness_of(seconds: float) -> float:
    """Return the slowness of a machine that needs this much processor time for one calibration run."""
    return max(1.0, seconds / COMMON_SECONDS)


def _calibration_seconds() -> float:
    """Measure a loop of plain Python, because the interpreter is where most tests spend their time."""
    began, value = time.process_time(), 0
    for i in range(_CALIBRATION_STEPS):
        value = (value * 31 + i) % 1_000_003
    return time.process_time() - began


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
