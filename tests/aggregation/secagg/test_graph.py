"""The graph is regular, symmetric and hard to cut, and its ring is a fair permutation that the seed fixes."""

import hashlib
import struct
from collections import Counter
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.secagg.graph import SEED_BYTES, Graph, graph_of

seeds = st.binary(min_size=SEED_BYTES, max_size=SEED_BYTES)
sizes = st.integers(2, 60).flatmap(
    lambda n: st.tuples(st.just(n), st.sampled_from([*range(2, n - 1, 2), n - 1])),
)


def counted(number: int) -> bytes:
    return number.to_bytes(SEED_BYTES, "big")


def reached(graph: Graph, start: int, gone: frozenset[int]) -> set[int]:
    """Whom one reaches from `start` without passing through those gone."""
    seen, to_see = {start}, [start]
    while to_see:
        new = set(graph.neighbours(to_see.pop())) - seen - gone
        seen |= new
        to_see += new
    return seen


@given(sizes, seeds)
def test_each_has_k_neighbours_none_of_them_itself_and_is_a_neighbour_of_each(
    size: tuple[int, int], seed: bytes
) -> None:
    graph = graph_of(*size, seed)
    around = {index: graph.neighbours(index) for index in range(graph.n)}
    for index, neighbours in around.items():
        assert len(neighbours) == graph.k
        assert list(neighbours) == sorted(set(neighbours) - {index})
        assert all(index in around[other] for other in neighbours)
        assert graph.holders(index) == tuple(sorted((*neighbours, index)))


@given(sizes, seeds)
def test_everyone_is_reached_from_everyone(size: tuple[int, int], seed: bytes) -> None:
    assert reached(graph_of(*size, seed), 0, frozenset()) == set(range(size[0]))


@pytest.mark.parametrize(("n", "k"), [(9, 4), (10, 4), (9, 6)])
def test_no_fewer_than_k_must_go_before_it_falls_apart(n: int, k: int) -> None:
    graph = graph_of(n, k, counted(1))
    falls_apart = {
        n_gone: any(
            len(reached(graph, min(set(range(n)) - gone), gone)) < n - n_gone
            for gone in map(frozenset, combinations(range(n), n_gone))
        )
        for n_gone in (k - 1, k)
    }
    assert falls_apart == {k - 1: False, k: True}


@given(st.integers(2, 40), seeds)
def test_in_a_complete_graph_everyone_else_is_a_neighbour(n: int, seed: bytes) -> None:
    graph = graph_of(n, n - 1, seed)
    assert graph.complete
    for index in range(n):
        assert graph.neighbours(index) == tuple(other for other in range(n) if other != index)


@given(sizes.filter(lambda size: size[1] < size[0] - 1), seeds)
def test_neighbours_are_those_within_half_of_k_on_the_ring_of_ranks(size: tuple[int, int], seed: bytes) -> None:
    n, k = size
    ring = sorted(
        range(n), key=lambda i: hashlib.sha256(b"umbel-secagg/1 ring" + seed + struct.pack("<I", i)).hexdigest()
    )
    graph = graph_of(n, k, seed)
    assert not graph.complete
    for index in range(n):
        apart = {other: abs(ring.index(index) - ring.index(other)) for other in range(n)}
        near = {other for other, steps in apart.items() if 0 < min(steps, n - steps) <= k // 2}
        assert set(graph.neighbours(index)) == near


def test_another_seed_gives_other_neighbours() -> None:
    around = {graph_of(1000, 126, counted(number)).neighbours(0) for number in range(50)}
    assert len(around) == 50


def test_every_order_of_a_ring_is_as_likely() -> None:
    n_seeds = 2400
    seen = Counter(graph_of(5, 2, counted(number)).ring for number in range(n_seeds))
    expected = n_seeds / 120
    chi_square = sum((seen[order] - expected) ** 2 / expected for order in permutations(range(5)))
    assert 71 < chi_square < 182  # 119 degrees of freedom: outside with 1 in 10,000 on either side


@pytest.mark.parametrize(("n", "k"), [(1, 0), (0, -1), (10, 3), (10, 0), (10, -2), (10, 10), (10, 12), (2, 2)])
def test_a_graph_that_cannot_be_is_refused(n: int, k: int) -> None:
    with pytest.raises(ValueError, match="clients"):
        graph_of(n, k, counted(0))


@pytest.mark.parametrize("ring", [(0, 1, 2, 3), (0, 1, 2, 3, 3), (0, 1, 2, 3, 5), (0, 1, 2, 3, 4, 4)], ids=str)
def test_a_ring_that_leaves_one_out_is_refused(ring: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="each index"):
        Graph(5, 2, ring)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_seed_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        graph_of(10, 4, bytes(length))


@pytest.mark.parametrize("index", [-1, 10])
@pytest.mark.parametrize("k", [4, 9])
def test_there_are_no_neighbours_of_nobody(index: int, k: int) -> None:
    with pytest.raises(IndexError, match="no client"):
        graph_of(10, k, counted(0)).neighbours(index)
