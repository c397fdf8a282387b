"""What `make test-fast` leaves out: what runs a whole party, and nothing else."""

from pathlib import Path

import pytest

from tests.repository import ROOT
from tests.suite.parties import PARTIES, runs_a_party

TESTS = ROOT / "tests"
FAST = {path for path in TESTS.rglob("test_*.py") if not runs_a_party(path)}


@pytest.mark.parametrize(
    "module",
    [
        "aggregation/codec/test_integer.py",
        "aggregation/secagg/numbers/test_contribution.py",
        "aggregation/round/test_machine.py",
        "aggregation/round/test_round_machine.py",
        "aggregation/run/test_file.py",
        "client/policy/test_policy.py",
        "vectors/test_vectors.py",
    ],
)
def test_arithmetic_protocols_and_rules_are_fast(module: str) -> None:
    assert TESTS / module in FAST


@pytest.mark.parametrize(
    "module", ["server/http/test_refusals.py", "client/test_loop.py", "sim/results/test_results.py"]
)
def test_what_runs_a_coordinator_a_client_or_a_simulation_is_not(module: str) -> None:
    assert TESTS / module not in FAST


def test_a_helper_that_runs_one_counts_for_whoever_imports_it(tmp_path: Path) -> None:
    module = tmp_path / "test_by_a_helper.py"
    module.write_text("from tests.federations.server_device import House\n")
    assert runs_a_party(module)


@pytest.mark.parametrize("party", PARTIES)
@pytest.mark.parametrize("line", ["import {}", "from {} import something"])
def test_each_party_is_noticed(tmp_path: Path, party: str, line: str) -> None:
    module = tmp_path / "test_party.py"
    module.write_text(f"def test() -> None:\n    {line.format(party)}\n")
    assert runs_a_party(module)
    module = tmp_path / "test_none.py"
    module.write_text(line.format(f"{party}less") + "\n")
    assert not runs_a_party(module)
