"""What the reckoning of `parameters.py` says of a coordinator that chooses the dead, against the attack itself."""

import random
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.secagg.attacks.adaptive_cut import dead_for_a_cut, exposed
from tests.aggregation.secagg.soundness import UnsoundParameters, require_sound
from tests.suite.nights import at_night
from umbel.aggregation.secagg.graph import Graph, graph_of
from umbel.aggregation.secagg.parameters import (
    Adversary,
    Parameters,
    Rule,
    parameters_for,
)

N, N_CORRUPT, N_DROPOUTS, N_TRIALS = 1000, 100, 100, 60
CURIOUS, SPLIT_VIEW, ADAPTIVE = Parameters(52, 28), Parameters(114, 78), Parameters(126, 88)


def trials(parameters: Parameters) -> Iterator[tuple[int, bool]]:
    """For each of sixty rings: how many honest clients were named dead, and whether a group's sum then showed."""
    for trial in range(N_TRIALS):
        graph = graph_of(N, parameters.k, trial.to_bytes(32, "big"))
        corrupt = frozenset(random.Random(trial).sample(range(N), N_CORRUPT))
        dead = dead_for_a_cut(graph, corrupt)
        yield len(dead), bool(exposed(graph, parameters.t, corrupt, dead))


def test_parameters_against_curiosity_fall_to_it_always_and_no_count_of_drop_outs_tells() -> None:
    assert all(n_dead <= N_DROPOUTS / 2 and cut for n_dead, cut in trials(CURIOUS))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("parameters", [SPLIT_VIEW, *at_night(ADAPTIVE)], ids=["split-view", "adaptive"])
def test_parameters_against_a_malicious_coordinator_hold(parameters: Parameters) -> None:
    assert not any(cut for _, cut in trials(parameters))


@pytest.mark.parametrize("parameters", [CURIOUS, SPLIT_VIEW, ADAPTIVE], ids=["curious", "split-view", "adaptive"])
def test_it_takes_so_many_corrupt_clients_in_both_runs(parameters: Parameters) -> None:
    """As many as the reckoning says cut the ring; with one fewer in one of the runs it stays whole."""
    run = parameters.k // 2
    least = parameters.t - 1 - run
    graph = Graph(N, parameters.k, tuple(range(N)))
    runs = (range(100, 100 + run), range(500, 500 + run))
    for missing, cut in ((0, True), (1, False)):
        corrupt = frozenset([*runs[0][:least], *runs[1][: least - missing]])
        dead = frozenset([*runs[0], *runs[1]]) - corrupt
        assert bool(exposed(graph, parameters.t, corrupt, dead)) is cut


def shows_as_reckoned(graph: Graph, t: int, corrupt: frozenset[int], dead: frozenset[int]) -> bool:
    """Whether a sum shows; fails unless two disjoint runs then hold as many corrupt clients as they must."""
    if not exposed(graph, t, corrupt, dead):
        return False
    n, run = graph.n, graph.k // 2
    inside = [sum(graph.ring[(start + step) % n] in corrupt for step in range(run)) for start in range(n)]
    enough = [start for start in range(n) if inside[start] >= t - 1 - run]
    assert any(run < (other - one) % n < n - run for one in enough for other in enough)
    return True


@pytest.mark.parametrize("t", [3, 4, 5])
def test_no_sum_shows_where_the_reckoning_says_none_can(t: int) -> None:
    """Every choice of corrupt and dead clients, of nine with four neighbours."""
    graph, n_shown = Graph(9, 4, tuple(range(9))), 0
    for roles in product(["honest", "corrupt", "dead"], repeat=9):
        corrupt = frozenset(index for index, role in enumerate(roles) if role == "corrupt")
        dead = frozenset(index for index, role in enumerate(roles) if role == "dead")
        n_shown += shows_as_reckoned(graph, t, corrupt, dead)
    assert n_shown > 0  # else this would prove nothing


@given(st.data())
def test_nor_in_larger_graphs(data: st.DataObject) -> None:
    n = data.draw(st.integers(10, 24), "n")
    k = data.draw(st.sampled_from([k for k in (4, 6, 8) if k < n - 1]), "k")
    graph = graph_of(n, k, data.draw(st.binary(min_size=32, max_size=32), "seed"))
    corrupt = data.draw(st.frozensets(st.integers(0, n - 1), max_size=n // 2), "corrupt")
    start, other = data.draw(st.integers(0, n - 1), "start"), data.draw(st.integers(0, n - 1), "other")
    near = {graph.ring[(place + step) % n] for place in (start, other) for step in range(k // 2)}
    more = data.draw(st.frozensets(st.integers(0, n - 1), max_size=3), "more dead")
    t = data.draw(st.integers(k // 2, k), "t")
    shows_as_reckoned(graph, t, corrupt, frozenset(near | more) - corrupt)


def test_a_client_refuses_what_falls_to_it() -> None:
    for parameters in (CURIOUS, SPLIT_VIEW):
        with pytest.raises(UnsoundParameters):
            require_sound(N, parameters)
    require_sound(N, ADAPTIVE, Rule())
    require_sound(N, parameters_for(N))
    require_sound(N, SPLIT_VIEW, Rule(adversary=Adversary.SPLIT_VIEW))
