"""Open runs for the tests of agents."""

from dataclasses import replace

from umbel.aggregation.messages import OpenRun, RunStatus
from umbel.aggregation.types import RunId

ONE = OpenRun(RunId("heart-1"), RunStatus.RUNNING, 1e9, 10, 3, 100, "a" * 64, "b" * 64, is_secure=True)


def run_named(name: str) -> OpenRun:
    return replace(ONE, name=RunId(name))
