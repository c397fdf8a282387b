"""Open runs for the tests of agents."""

import resource
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from umbel.aggregation.messages import OpenRun, RunStatus
from umbel.aggregation.types import RunId

ONE = OpenRun(RunId("heart-1"), RunStatus.RUNNING, 1e9, 10, 3, 100, "a" * 64, "b" * 64, is_secure=True)
CHANGED = {
    "run_file_sha256": replace(ONE, run_file_sha256="c" * 64),
    "model_sha256": replace(ONE, model_sha256="c" * 64),
    "members_sha256": replace(ONE, members_sha256="c" * 64),
    "is_secure": replace(ONE, is_secure=False),
    "minimum": replace(ONE, minimum=2),
    "is_private": replace(ONE, is_private=True),
}
"""`ONE` under the same name, with one change of what a person decides about, by the changed field."""


def run_named(name: str) -> OpenRun:
    return replace(ONE, name=RunId(name))


@contextmanager
def full_disk() -> Generator[None]:
    """No file of this process can grow, as on a full disk: the kernel refuses each write. It needs no privileges."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
