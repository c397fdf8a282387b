"""How long a test may take that is not marked `slow`: a second.

Wall time on a shared machine says more about the neighbours than about the test. So every run measures processor time,
of the test's process and of the children that it has waited for, and fails at five seconds: a machine that is five
times slower than a common one still passes. `make test-marks` measures wall time on a quiet machine and fails at one
second. That also finds tests that sleep or wait.
"""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from hypothesis import settings

SECONDS_MAX = 1.0
PROCESSOR_SECONDS_MAX = 5.0
_EXAMPLES_MAX = 50  # profiles with more examples take as long as they take


@contextmanager
def check_pace(item: pytest.Item) -> Generator[None]:
    """Fail a test that passes, is not marked slow and takes too long."""
    began, spent = time.monotonic(), _processor_seconds()
    yield
    took, spent = time.monotonic() - began, _processor_seconds() - spent
    if item.get_closest_marker("slow") is None and settings().max_examples <= _EXAMPLES_MAX:
        wall_max: float | None = item.config.getoption("--seconds-max")
        if complaint := too_long(took, spent, wall_max):
            pytest.fail(complaint, pytrace=False)


def too_long(took: float, spent: float, wall_max: float | None) -> str | None:
    """What to say of a test that took so many seconds and spent so many of the processor's, if it is too much."""
    if wall_max is not None and took > wall_max:
        found = f"{took:.1f} s, and the limit is {wall_max:g} s"
    elif spent > PROCESSOR_SECONDS_MAX:
        found = f"{spent:.1f} s of processor time, and the limit is {PROCESSOR_SECONDS_MAX:g} s"
    else:
        return None
    return f"this test took {found}: mark it slow, or make it as fast as one that is done in {SECONDS_MAX:g} s"


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
