"""Hypothesis profiles (`dev`, the default, `ci`, `nightly`: HYPOTHESIS_PROFILE), and the databases to test over."""

import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.postgres import Cluster, binaries, cluster
from tests.server_device import houses_over

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # shared machines stall
settings.register_profile("dev", calm, max_examples=50)
settings.register_profile("ci", calm, max_examples=200, derandomize=True, print_blob=True)
settings.register_profile("mutants", calm, max_examples=50, derandomize=True)
settings.register_profile("nightly", calm, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: of several workers, all wait for whoever is at the last file."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def postgresql() -> Generator[Cluster]:
    """A PostgreSQL server for this process's tests."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with cluster() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def any_database(request: pytest.FixtureRequest) -> Generator[None]:
    """The test runs over SQLite and over PostgreSQL: every `house` of it takes that database."""
    yield from _any_database(request)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def any_database_in_time(request: pytest.FixtureRequest) -> Generator[None]:
    """`any_database` for modules of very many tests: those over PostgreSQL count as slow."""
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
