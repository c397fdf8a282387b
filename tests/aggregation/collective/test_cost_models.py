"""Cost models of sums: as the literature has them, and where they must agree; and links as they are fitted."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from umbel.aggregation.collective.cost_models import (
    COST_MODELS,
    PIECES_MAX,
    CostModel,
    LinkModel,
    MessageTiming,
    binomial_tree,
    double_binary_tree,
    double_tree_pieces,
    fitted,
    halving_and_doubling,
    parameter_server,
    recursive_doubling,
    ring,
    ring_timing,
    two_level,
    two_port_double_tree,
)

SECONDS = st.floats(1e-7, 1.0)
RATES = st.floats(1e3, 1e12)
LINKS = st.builds(LinkModel, SECONDS, RATES, RATES | st.just(math.inf))
BYTES = st.floats(1.0, 1e12)
MODELS = st.sampled_from(list(COST_MODELS.values()))
# A link on which only bytes, only messages, or only additions take time.
BYTES_ONLY, MESSAGES_ONLY, ADDITIONS_ONLY = LinkModel(0.0, 1.0), LinkModel(1.0, math.inf), LinkModel(0.0, math.inf, 1.0)


@pytest.mark.parametrize(
    ("model", "messages", "bytes_", "additions"),
    [  # of a sum of 8 bytes over 8 ranks
        (parameter_server, 14, 112, 56),
        (ring, 14, 14, 7),
        (binomial_tree, 6, 48, 24),
        (recursive_doubling, 3, 24, 24),
        (halving_and_doubling, 6, 14, 7),
        (double_binary_tree, 12, 16, 8),
    ],
)
def test_models_are_those_of_the_literature(model: CostModel, messages: int, bytes_: int, additions: int) -> None:
    assert model(8, 8, MESSAGES_ONLY) == pytest.approx(messages)
    assert model(8, 8, BYTES_ONLY) == pytest.approx(bytes_)
    assert model(8, 8, ADDITIONS_ONLY) == pytest.approx(additions)


def test_a_double_tree_sends_the_best_number_of_pieces() -> None:
    n_bytes, link, height = 1e6, LinkModel(1e-4, 1e8), 3
    by_pieces = [2 * (2 * height + k) * (link.latency_s + n_bytes / k / link.bytes_per_s) for k in range(1, 1000)]
    assert double_binary_tree(n_bytes, 8, link) == pytest.approx(min(by_pieces), rel=1e-3)


def two_port_s(n_bytes: float, n_ranks: int, link: LinkModel, n_pieces: int) -> float:
    """The rounds of a double tree one by one: those of all pieces, and those in which the last one is on its way."""
    sent = n_bytes / 2 / n_pieces * (1 if n_ranks == 2 else 2)
    rounds = n_pieces + int(math.log2(n_ranks)) - 1
    return sum(2 * link.message_s(sent) + link.add_s(sent) for _ in range(rounds))


@given(BYTES, st.integers(2, 64), LINKS)
def test_a_double_tree_of_two_ports_has_the_number_of_pieces_that_takes_least(
    n_bytes: float, n_ranks: int, link: LinkModel
) -> None:
    n_pieces = double_tree_pieces(n_bytes, n_ranks, link)
    took = two_port_double_tree(n_bytes, n_ranks, link)
    assert took == pytest.approx(two_port_s(n_bytes, n_ranks, link, n_pieces))
    tried = {1, 2, 3, n_pieces - 1, n_pieces + 1, PIECES_MAX // 2, PIECES_MAX} & {*range(1, PIECES_MAX + 1)}
    assert took <= min(two_port_s(n_bytes, n_ranks, link, one) for one in tried) * (1 + 1e-9)


@given(BYTES, st.integers(2, 4096), st.builds(LinkModel, SECONDS, RATES))
def test_two_ports_are_as_fast_as_one(n_bytes: float, n_ranks: int, link: LinkModel) -> None:
    rounding = 1 + math.log2(n_ranks) / PIECES_MAX  # no more pieces than that are sent
    assert two_port_double_tree(n_bytes, n_ranks, link) <= rounding * double_binary_tree(n_bytes, n_ranks, link)


def test_two_ranks_send_each_half_of_a_double_tree_whole() -> None:
    assert double_tree_pieces(8, 2, LinkModel(1.0, 1.0)) == double_tree_pieces(8, 3, LinkModel(0.0, 1.0)) == 1
    assert two_port_double_tree(8, 2, BYTES_ONLY) == 8
    assert two_port_double_tree(8, 3, BYTES_ONLY) == 16
    assert two_port_double_tree(8, 8, MESSAGES_ONLY) == 6, "three levels, up and down"


@given(BYTES, LINKS)
def test_two_ranks_need_the_same_by_ring_and_halving_and_by_tree_and_server(n_bytes: float, link: LinkModel) -> None:
    assert ring(n_bytes, 2, link) == pytest.approx(halving_and_doubling(n_bytes, 2, link))
    assert binomial_tree(n_bytes, 2, link) == pytest.approx(parameter_server(n_bytes, 2, link))


@given(MODELS, BYTES, LINKS)
def test_one_rank_needs_no_time(model: CostModel, n_bytes: float, link: LinkModel) -> None:
    assert model(n_bytes, 1, link) == 0


@given(BYTES, st.integers(2, 4096))
def test_a_ring_sends_the_least_bytes_of_all(n_bytes: float, n_ranks: int) -> None:
    sent = ring(n_bytes, n_ranks, BYTES_ONLY)
    assert sent == pytest.approx(2 * (n_ranks - 1) / n_ranks * n_bytes)
    others = [
        model(n_bytes, n_ranks, BYTES_ONLY) for name, model in COST_MODELS.items() if n_ranks > 2 or "doub" not in name
    ]
    assert min(others) >= sent * (1 - 1e-9)


@given(MODELS, BYTES, st.integers(1, 4096), LINKS, st.floats(1.0, 100.0))
def test_more_bytes_and_worse_links_take_longer(
    model: CostModel, n_bytes: float, n_ranks: int, link: LinkModel, factor: float
) -> None:
    base = model(n_bytes, n_ranks, link) * (1 - 1e-9)
    assert model(n_bytes * factor, n_ranks, link) >= base
    assert model(n_bytes, n_ranks, LinkModel(link.latency_s * factor, link.bytes_per_s, link.adds_bytes_per_s)) >= base
    assert model(n_bytes, n_ranks, LinkModel(link.latency_s, link.bytes_per_s / factor, link.adds_bytes_per_s)) >= base


@given(st.sampled_from([ring, parameter_server, binomial_tree, double_binary_tree]), BYTES, st.integers(1, 4095), LINKS)
def test_more_ranks_take_longer(model: CostModel, n_bytes: float, n_ranks: int, link: LinkModel) -> None:
    assert model(n_bytes, n_ranks + 1, link) >= model(n_bytes, n_ranks, link) * (1 - 1e-9)


@given(BYTES, st.integers(1, 64), LINKS, LINKS)
def test_two_levels_of_one_host_or_one_rank_each_are_one_level(
    n_bytes: float, n_ranks: int, inside: LinkModel, between: LinkModel
) -> None:
    assert two_level(n_bytes, 1, n_ranks, inside, between) == binomial_tree(n_bytes, n_ranks, inside)
    assert two_level(n_bytes, n_ranks, 1, inside, between) == ring(n_bytes, n_ranks, between)


@given(SECONDS, RATES, st.integers(2, 64))
def test_a_link_is_found_again_from_the_times_of_its_rings(latency_s: float, bytes_per_s: float, n_ranks: int) -> None:
    link = LinkModel(latency_s, bytes_per_s)
    assume(1e-2 < latency_s * bytes_per_s < 1e8)  # else one of the two is no part of any of these times
    times = [ring_timing(4**k, n_ranks, ring(4**k, n_ranks, link)) for k in range(2, 15)]
    found = fitted(times)
    assert found.latency_s == pytest.approx(latency_s, rel=1e-3)
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)


def test_neither_latency_nor_bandwidth_is_below_zero() -> None:
    assert fitted([MessageTiming(1, 100, 0.5), MessageTiming(1, 1000, 10.0)]).latency_s == 0
    assert fitted([MessageTiming(1, 100, 2.0), MessageTiming(1, 1000, 1.0)]).bytes_per_s == math.inf


def test_one_length_says_nothing_of_a_link() -> None:
    with pytest.raises(ValueError, match="at least two different lengths"):
        fitted([MessageTiming(1, 100, 1.0), MessageTiming(1, 100, 2.0)])
