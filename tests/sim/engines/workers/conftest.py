"""A Ray cluster of this machine, where Ray is installed."""

import os
from collections.abc import Generator
from typing import Any

import pytest


@pytest.fixture(scope="package")
def ray() -> Generator[Any]:
    found = pytest.importorskip("ray", reason="Ray is not installed")
    os.environ["RAY_USAGE_STATS_ENABLED"] = os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    found.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield found
    found.shutdown()
