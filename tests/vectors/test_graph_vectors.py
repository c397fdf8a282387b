"""The frozen rings of secure aggregation: who stands where, and is whose neighbour, of a seed."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from umbel.aggregation.secagg.graph import graph_of

pytestmark = pytest.mark.bits

FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "graph.json").read_text())


@pytest.mark.parametrize("case", FROZEN["graphs"], ids=lambda case: f"{case['n']}-{case['k']}-{case['seed_hex'][:8]}")
def test_the_graph_of_a_seed(case: dict[str, Any]) -> None:
    graph = graph_of(case["n"], case["k"], bytes.fromhex(case["seed_hex"]))
    assert list(graph.ring[: len(case["ring_starts"])]) == case["ring_starts"]
    assert hashlib.sha256(struct.pack(f"<{graph.n}I", *graph.ring)).hexdigest() == case["ring_sha256"]
    for index, neighbours in case["neighbours"].items():
        assert list(graph.neighbours(int(index))) == neighbours
