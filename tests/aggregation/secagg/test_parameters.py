"""The numbers of neighbours and shares: published ones come out again, and a client takes none that are weaker."""

import random
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.secagg.graph import graph_of
from umbel.aggregation.secagg.parameters import (
    COMPLETE_MAX,
    Adversary,
    Parameters,
    Rule,
    UnsoundParameters,
    parameters_for,
    require_sound,
    sparse_parameters,
    threshold_complete,
)

CURIOUS, SPLIT_VIEW = Adversary.CURIOUS, Adversary.SPLIT_VIEW

# n, corrupt, then for 5, 10 and 30 % of drop-outs: curious and split view, k/t.
SIGMA_40_ETA_30 = """
10    .05   2/2    2/2    4/2     4/3      6/2     8/5
10    .10   2/2    2/2    4/2     4/3      6/2     8/5
10    .20   4/3    4/4    4/3     6/5      6/3     none
100   .05   12/6   16/11  16/6    26/16    28/6    66/36
100   .10   16/11  22/17  22/11   32/22    36/11   72/42
100   .20   26/20  32/27  32/21   42/32    50/21   82/52
1000  .05   34/18  62/43  40/19   90/58    76/25   362/204
1000  .10   42/25  76/55  52/28   114/78   102/39  462/273
1000  .20   60/40  104/80 76/47   162/118  160/73  682/432
1000  .33   86/64  152/124 114/78 244/189  276/146 932/632
10000 .05   38/21  74/51  46/22   114/74   92/30   630/357
10000 .10   48/29  94/68  60/32   144/98   126/48  936/555
10000 .20   68/46  132/101 90/55  216/157  206/94  2082/1319
"""
# n, corrupt, drop-outs, adversary, k, t: what the tests of google-parfait/federated-compute expect, sigma 40, eta 20.
# For ten clients, .05 and .33, they expect 4/2, though three drop-outs among four neighbours leave one share: we give
# 6/2.
SIGMA_40_ETA_20 = [
    (100, 0.45, 0.45, CURIOUS, 92, 46),
    (1000, 0.45, 0.45, CURIOUS, 822, 417),
    (10000, 0.45, 0.45, CURIOUS, 3494, 1771),
    (10, 0.33, 0.33, CURIOUS, 8, 4),
    (100, 0.33, 0.33, CURIOUS, 68, 34),
    (1000, 0.33, 0.33, CURIOUS, 286, 150),
    (10000, 0.33, 0.33, CURIOUS, 422, 221),
    (100000, 0.33, 0.33, CURIOUS, 480, 251),
    (100, 0.3, 0.3, SPLIT_VIEW, 92, 62),
    (1000, 0.3, 0.3, SPLIT_VIEW, 872, 584),
    (10000, 0.3, 0.3, SPLIT_VIEW, 4822, 3230),
    (1000, 0.05, 0.33, CURIOUS, 72, 24),
    (10000, 0.05, 0.33, SPLIT_VIEW, 746, 420),
    (1000000, 0.05, 0.33, SPLIT_VIEW, 970, 545),
    (1000, 0.33, 0.05, CURIOUS, 78, 60),
    (100000, 0.33, 0.05, CURIOUS, 102, 77),
    (10, 0.33, 0.05, SPLIT_VIEW, 4, 4),
    (1000, 0.33, 0.05, SPLIT_VIEW, 132, 109),
    (100000, 0.33, 0.05, SPLIT_VIEW, 196, 160),
]
# The rule of this platform, frozen: n, corrupt, drop-outs, k, t.
ADAPTIVE = [
    (301, 0.1, 0.1, 90, 64),
    (500, 0.1, 0.1, 108, 76),
    (1000, 0.05, 0.1, 102, 68),
    (1000, 0.1, 0.05, 86, 64),
    (1000, 0.1, 0.1, 126, 88),
    (1000, 0.1, 0.3, 520, 314),
    (1000, 0.2, 0.1, 178, 132),
    (10000, 0.1, 0.1, 160, 111),
    (10000, 0.2, 0.3, 2280, 1453),
    (100000, 0.1, 0.1, 176, 122),
]


def rows_of_the_table() -> list[tuple[int, float, float, Adversary, Parameters | None]]:
    rows: list[tuple[int, float, float, Adversary, Parameters | None]] = []
    for line in SIGMA_40_ETA_30.split("\n")[1:-1]:
        n, corrupt, *cells = line.split()
        columns = [(dropouts, adversary) for dropouts in (0.05, 0.1, 0.3) for adversary in (CURIOUS, SPLIT_VIEW)]
        for (dropouts, adversary), cell in zip(columns, cells, strict=True):
            found = None if cell == "none" else Parameters(*map(int, cell.split("/")))
            rows.append((int(n), float(corrupt), dropouts, adversary, found))
    return rows


@pytest.mark.parametrize(("n", "corrupt", "dropouts", "adversary", "found"), rows_of_the_table())
def test_the_table_of_our_reckoning(
    n: int, corrupt: float, dropouts: float, adversary: Adversary, found: Parameters | None
) -> None:
    assert sparse_parameters(n, Rule(corrupt, dropouts, adversary)) == found


@pytest.mark.parametrize(("n", "corrupt", "dropouts", "adversary", "k", "t"), SIGMA_40_ETA_20)
def test_what_another_implementation_expects(
    n: int, corrupt: float, dropouts: float, adversary: Adversary, k: int, t: int
) -> None:
    assert sparse_parameters(n, Rule(corrupt, dropouts, adversary, correctness_bits=20)) == Parameters(k, t)


@pytest.mark.parametrize(("n", "corrupt", "dropouts", "k", "t"), ADAPTIVE)
def test_what_we_ask(n: int, corrupt: float, dropouts: float, k: int, t: int) -> None:
    rule = Rule(corrupt, dropouts)
    assert parameters_for(n, rule) == Parameters(k, t)
    require_sound(n, Parameters(k, t), rule)


def exact_chance(n: int, marked: int, drawn: int, least: int) -> float:
    """P(least or more of those drawn are marked), in exact integers."""
    ways = sum(comb(marked, x) * comb(n - marked, drawn - x) for x in range(least, min(marked, drawn) + 1))
    return ways / comb(n, drawn)


@pytest.mark.parametrize(("n", "k", "t"), [(1000, 126, 88), (10000, 160, 111)])
def test_the_bounds_of_what_we_ask_in_exact_integers(n: int, k: int, t: int) -> None:
    corrupt = dead = n // 10
    run = k // 2
    assert n * exact_chance(n, corrupt, k, least=2 * t - k - 1) <= 2**-41  # 2t > k + 1 + c fails
    assert n * (n - k - 1) / 2 * exact_chance(n, corrupt, run, least=t - 1 - run) ** 2 <= 2**-41
    assert n * exact_chance(n, dead, k, least=k - t + 1) <= 2**-30  # fewer than t of k are left
    assert n * (n - k - 1) / 2 * exact_chance(n, corrupt, run, least=t - 2 - run) ** 2 > 2**-41


@pytest.mark.parametrize(("n", "k", "t", "bits"), [(1000, 114, 78, 28), (10000, 144, 98, 27)])
def test_how_often_the_split_view_numbers_fall_to_an_adaptive_cut(n: int, k: int, t: int, bits: int) -> None:
    chance = n * (n - k - 1) / 2 * exact_chance(n, n // 10, k // 2, least=t - 1 - k // 2) ** 2
    assert 2.0 ** -(bits + 1) < chance < 2.0**-bits


@pytest.mark.parametrize("what", ["corrupt", "drop-outs"])
def test_the_union_bound_is_not_below_what_is_seen(what: str) -> None:
    """Of 100 clients, 16 neighbours each, that some client has too many corrupt or dead ones among them."""
    marked, above = {"corrupt": (10, 6), "drop-outs": (20, 8)}[what]
    n, k, n_rings = 100, 16, 400
    bad = 0
    for number in range(n_rings):
        graph = graph_of(n, k, number.to_bytes(32, "big"))
        chosen = set(random.Random(number).sample(range(n), marked))
        bad += any(len(chosen.intersection(graph.neighbours(index))) > above for index in range(n))
    assert 0 < bad / n_rings <= n * exact_chance(n, marked, k, least=above + 1)


@pytest.mark.parametrize(("n", "t"), [(2, 2), (3, 3), (4, 3), (5, 4), (6, 5), (10, 7), (99, 67), (100, 67), (300, 201)])
def test_up_to_300_everyone_is_a_neighbour(n: int, t: int) -> None:
    assert threshold_complete(n) == t
    assert parameters_for(n) == Parameters(n - 1, t)
    require_sound(n, Parameters(n - 1, t))


@given(st.integers(2, COMPLETE_MAX), st.sampled_from([0.05, 0.1, 0.2, 1 / 3, 0.4, 0.6]))
def test_both_secrets_of_one_never_come_out_of_a_complete_graph(n: int, corrupt: float) -> None:
    rule = Rule(corrupt)
    assert 2 * parameters_for(n, rule).t > n + rule.n_corrupt(n)


# `least`: the threshold from which on a complete graph lets nothing out.
@pytest.mark.parametrize(
    ("n", "corrupt", "least"),
    [
        (10, 0.1, 6),
        (10, 0.2, 7),
        (100, 0.05, 53),
        (100, 0.1, 56),
        (100, 0.2, 61),
        (1000, 0.33, 666),
        (10000, 0.2, 6001),
    ],
)
def test_two_thirds_are_no_fewer_than_a_complete_graph_takes(n: int, corrupt: float, least: int) -> None:
    rule = Rule(corrupt)
    assert (n + rule.n_corrupt(n)) // 2 + 1 == least <= threshold_complete(n)


@given(st.integers(COMPLETE_MAX + 1, 20_000))
def test_a_client_takes_what_the_rule_gives_and_more_but_not_less(n: int) -> None:
    given_ = parameters_for(n)
    require_sound(n, given_)
    require_sound(n, Parameters(given_.k, given_.t + 1))
    require_sound(n, Parameters(n - 1, threshold_complete(n)))
    for weaker in (
        Parameters(given_.k, given_.t - 1),
        Parameters(given_.k + 2, given_.t - 1),
        Parameters(n - 1, threshold_complete(n) - 1),
        Parameters(n - 1, given_.t),
        sparse_parameters(n, Rule(adversary=SPLIT_VIEW)),
        sparse_parameters(n, Rule(adversary=CURIOUS)),
    ):
        assert weaker is not None
        with pytest.raises(UnsoundParameters):
            require_sound(n, weaker)


@pytest.mark.parametrize(
    ("n", "k", "t", "says"),
    [
        (1000, 52, 28, "could reveal secrets"),
        (1000, 114, 78, "could reveal secrets"),
        (1000, 126, 91, "two groups"),
        (1000, 127, 88, "even"),
        (1000, 126, 127, "can never be met"),
        (1000, 126, 1, "could reveal secrets"),
        (1000, 1000, 700, "cannot have"),
        (1000, 2**60, 2**60, "cannot have"),
        (1000, 0, 1, "cannot have"),
        (1000, -2, 88, "cannot have"),
        (1000, 126, -88, "could reveal secrets"),
        (300, 126, 88, "all neighbours"),
        (10, 9, 6, "could reveal secrets"),
        (10, 9, 11, "can never be met"),
        (1, 0, 1, "cannot have"),
    ],
)
def test_a_client_says_why_it_refuses(n: int, k: int, t: int, says: str) -> None:
    with pytest.raises(UnsoundParameters, match=says):
        require_sound(n, Parameters(k, t))


@given(st.integers(301, 5000), st.integers(45, 120).map(lambda half: 2 * half), st.floats(0.6, 0.8))
def test_nothing_a_client_takes_lets_the_secrets_of_one_out_by_a_split_view(n: int, k: int, share: float) -> None:
    """Over every way to tell honest neighbours apart, with as many corrupt ones as 2^-41 has."""
    t = round(share * k)
    try:
        require_sound(n, Parameters(k, t))
    except UnsoundParameters:
        return
    corrupt = next(c for c in range(k + 1) if n * exact_chance(n, n // 10, k, least=c + 1) <= 2**-41)
    for n_told_alive in range(k - corrupt + 1):
        self_mask = corrupt + n_told_alive + 1  # its own share, too
        mask_key = corrupt + (k - corrupt - n_told_alive)
        assert min(self_mask, mask_key) < t


def test_where_no_sparse_graph_does_it_is_complete() -> None:
    rule = Rule(0.33, 0.33)
    assert sparse_parameters(400, rule) is None
    assert parameters_for(400, rule) == Parameters(399, 267)


@pytest.mark.parametrize(
    ("corrupt", "dropouts"), [(-0.1, 0.1), (0.1, -0.1), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (float("nan"), 0.1)]
)
def test_shares_that_are_none_are_refused(corrupt: float, dropouts: float) -> None:
    with pytest.raises(ValueError, match="shares of the clients"):
        Rule(corrupt, dropouts)


@pytest.mark.parametrize(("security", "correctness"), [(0, 30), (40, 0), (-40, 30)])
def test_no_bits_of_security_are_refused(security: int, correctness: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        Rule(security_bits=security, correctness_bits=correctness)


@pytest.mark.parametrize("n", [1, 0, -5])
def test_nobody_sums_alone(n: int) -> None:
    with pytest.raises(ValueError, match="two clients"):
        parameters_for(n)


@pytest.mark.parametrize(
    ("n", "share", "fewest"), [(1000, 0.1, 900), (1001, 0.1, 901), (100, 0.29, 71), (100, 0.07, 93)]
)
def test_the_fewest_that_a_sparse_round_may_sum(n: int, share: float, fewest: int) -> None:
    assert Rule(dropouts=share).survivors_min(n) == fewest
