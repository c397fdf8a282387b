"""Hypothesis profiles (HYPOTHESIS_PROFILE), workers, the databases to test over, and how long a test may take."""

import gc
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

# Workers and the processes of tests share few cores: threads that wait for each other would only cost time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests of two threads would spend several times the processor time on waiting busily. It changes no bits.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")

import pytest
from hypothesis import HealthCheck, settings

from tests.federations.server_device import houses_over
from tests.servers.postgres import Cluster, binaries, cluster
from tests.suite.dealing import dealt
from tests.suite.pace import pytest_addoption as pytest_addoption
from tests.suite.pace import pytest_runtest_call as pytest_runtest_call

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # shared machines stall
settings.register_profile("fast", calm, max_examples=5)
settings.register_profile("dev", calm, max_examples=50)
settings.register_profile("ci", calm, max_examples=200, derandomize=True, print_blob=True)
settings.register_profile("mutants", calm, max_examples=50, derandomize=True)
settings.register_profile("hour", calm, max_examples=1000)
settings.register_profile("nightly", calm, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

_WORKERS_MAX = 4
_SLOW_TOO = ("nightly", "realtime")


@pytest.hookimpl(optionalhook=True)  # xdist may be off
def pytest_xdist_auto_num_workers() -> int:
    """Return a worker for each processor that this process may use, and one more, because tests wait for processes.

    xdist would count cores, which may be half as many.
    """
    return min(_WORKERS_MAX, len(os.sched_getaffinity(0)) + 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the markers that follow from others, before `-m` selects."""
    for item in items:
        if any(item.get_closest_marker(name) for name in _SLOW_TOO):
            item.add_marker("slow")
        if "postgresql" in getattr(item, "fixturenames", ()):
            item.add_marker("postgresql")


class _Dealing:
    """A plugin, because a module has one hook of a name. `n_workers`: of this run."""

    def __init__(self, n_workers: int) -> None:
        self._n_workers = n_workers

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deal out the slow tests among the workers, after `-m` has selected."""
        is_slow = [item.get_closest_marker("slow") is not None for item in items]
        items[:] = [items[place] for place in dealt(is_slow, [item.path for item in items], self._n_workers)]


def pytest_configure(config: pytest.Config) -> None:
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)  # xdist's, in its workers
    if worker is not None:
        config.pluginmanager.register(_Dealing(worker["workercount"]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collect no garbage while a failure is being written up, which parses sources.

    A future whose error nobody asked for logs its traceback when it is collected. That parses sources, too, and up to
    Python 3.11.7 one parse within another is a `SystemError`, instead of the failure (python/cpython#106905).
    """
    if call.excinfo is None:
        return (yield)
    gc.collect()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def postgresql() -> Generator[Cluster]:
    """A PostgreSQL server for this process's tests."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with cluster() as running:
        yield running


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def any_database(request: pytest.FixtureRequest) -> Generator[None]:
    """The test runs over SQLite and over PostgreSQL: every `house` of it takes that database."""
    yield from _any_database(request)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgresql, pytest.mark.nightly])])
def any_database_in_time(request: pytest.FixtureRequest) -> Generator[None]:
    """`any_database` for modules of very many tests, of which SQL decides few: PostgreSQL's turn comes at night."""
    yield from _any_database(request)


def _any_database(request: pytest.FixtureRequest) -> Generator[None]:
    if request.param == "sqlite":
        yield
        return
    running: Cluster = request.getfixturevalue("postgresql")
    databases: defaultdict[Path, str] = defaultdict(running.new_database)
    with houses_over(lambda data: databases[data]):
        yield
    for url in databases.values():
        running.drop(url)
