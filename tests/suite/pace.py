"""How long a test may take that is not marked `slow`: a second, on a quiet machine.

A machine that others share says more about its neighbours than about a test. So only `make test-marks` measures, and
no other run fails because of it. Wall time also finds tests that sleep or wait. `tests/conftest.py` has the hooks from
here.
"""

import time
from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds-max", type=float, help="fail a test that takes longer and is not marked slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a test that passes, is not marked slow and takes too long."""
    began = time.monotonic()
    yield
    took, limit = time.monotonic() - began, item.config.getoption("--seconds-max")
    if limit is not None and took > limit and item.get_closest_marker("slow") is None:
        pytest.fail(
            f"this test took {took:.1f} s, and the limit is {limit:g} s: mark it slow, or make it faster", pytrace=False
        )
