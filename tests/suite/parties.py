"""A plugin for `make test-fast`: it leaves out every test module that runs a whole party, and does not even import it.

A whole party is a coordinator, a client's loop, a simulator that trains, or another process. Whether a module runs one
follows from what it imports, by itself or through the helpers of the tests, so there is no list of modules to keep.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.repository import ROOT

PARTIES = (
    "umbel.server.serve.app",
    "umbel.server.store.database",
    "umbel.client.loop",
    "umbel.client.run_client",
    "umbel.sim.bench",
    "umbel.sim.demo",
    "umbel.sim.engines",
    "umbel.sim.experiment",
    "umbel.sim.federation",
    "umbel.sim.recorded",
    "umbel.sim.results",
    "umbel.sim.simulation",
    "http.server",
    "subprocess",
    "matplotlib",
)
_TESTS = ROOT / "tests"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """None leaves the decision to others."""
    return True if collection_path.suffix == ".py" and runs_a_party(collection_path) else None


@cache
def runs_a_party(module: Path) -> bool:
    """Whether this file of the tests, or a helper that it imports, imports one of `PARTIES`."""
    names = list(_imported(module))
    if any(name == party or name.startswith(f"{party}.") for name in names for party in PARTIES):
        return True
    return any(runs_a_party(helper) for helper in set(map(_helper, names)) if helper is not None)


def _imported(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _helper(name: str) -> Path | None:
    package, *rest = name.split(".")
    path = _TESTS.joinpath(*rest).with_suffix(".py") if package == "tests" and rest else None
    return path if path is not None and path.exists() else None
