"""Sizes add up, honour the least, and follow the law that was asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.sim.data.partition.partition import SizesSection, drawn_sizes, iid_partition

laws = st.one_of(
    st.just(SizesSection()),
    st.floats(0, 10).map(lambda sigma: SizesSection("log-normal", sigma=sigma)),
    st.floats(0.1, 100).map(lambda exponent: SizesSection("power-law", exponent=exponent)),
    st.floats(1e-3, 1e3).map(lambda alpha: SizesSection("dirichlet", alpha=alpha)),
)


@given(laws, st.integers(1, 40), st.integers(0, 5), st.integers(0, 100_000), st.integers(0, 1 << 63))
def test_sizes_sum_to_all_there_is_and_none_is_below_the_least(
    law: SizesSection, n_clients: int, least: int, n_free: int, seed: int
) -> None:
    n_samples = n_clients * least + n_free
    sizes, again = (drawn_sizes(n_samples, n_clients, least, law, np.random.default_rng(seed)) for _ in range(2))
    assert len(sizes) == n_clients
    assert sizes.sum() == n_samples
    assert sizes.min() >= least
    assert np.array_equal(sizes, again)
    if law.law == "equal":
        assert np.ptp(sizes) <= 1


def test_the_logarithms_of_log_normal_sizes_have_the_deviation_asked_for() -> None:
    sizes = drawn_sizes(100_000_000, 20_000, 0, SizesSection("log-normal", sigma=0.8), np.random.default_rng(1))
    assert np.log(sizes).std() == pytest.approx(0.8, rel=0.02)


@pytest.mark.parametrize("exponent", [1.5, 3.0])
def test_the_tail_of_power_law_sizes_has_the_exponent_asked_for(exponent: float) -> None:
    sizes = drawn_sizes(10**9, 20_000, 0, SizesSection("power-law", exponent=exponent), np.random.default_rng(1))
    hill = 1 / np.log(sizes / sizes.min()).mean()  # the maximum likelihood of a Pareto law's exponent
    assert hill == pytest.approx(exponent, rel=0.03)


def test_dirichlet_sizes_vary_as_the_distribution_says() -> None:
    """The variance of a share of Dir_N(a) is (N - 1) / (N^2 (N a + 1))."""
    n_clients, alpha = 2000, 0.5
    sizes = drawn_sizes(10**8, n_clients, 0, SizesSection("dirichlet", alpha=alpha), np.random.default_rng(4))
    expected = np.sqrt((n_clients - 1) / (n_clients * alpha + 1))
    assert sizes.std() / sizes.mean() == pytest.approx(expected, rel=0.07)


def test_a_wide_law_makes_sizes_unequal_and_a_narrow_one_does_not() -> None:
    wide, narrow = (
        drawn_sizes(60_000, 100, 1, SizesSection("power-law", exponent=exponent), np.random.default_rng(0))
        for exponent in (0.5, 100.0)
    )
    assert wide.max() > 20_000
    assert narrow.max() < 700


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(0, 1 << 63))
def test_an_iid_partition_deals_every_sample_once(sizes: list[int], seed: int) -> None:
    shards = iid_partition(np.array(sizes), np.random.default_rng(seed))
    assert [len(shard) for shard in shards] == sizes
    assert sorted(np.concatenate(shards).tolist()) == list(range(sum(sizes)))


def test_an_iid_client_is_dealt_from_everywhere() -> None:
    [first, *_] = iid_partition(np.full(10, 1000), np.random.default_rng(0))
    assert np.bincount(first // 1000, minlength=10).min() > 60


def test_too_few_samples_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"9 samples are too few for 5 clients .* fewer clients"):
        drawn_sizes(9, 5, 2, SizesSection(), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ({"law": "log-normal"}, "needs sigma"),
        ({"law": "power-law", "sigma": 1.0}, 'sigma is for law = "log-normal"'),
        ({"sigma": 1.0}, "leave it out"),
        ({"law": "log-normal", "sigma": float("nan")}, "sigma must lie between"),
        ({"law": "power-law", "exponent": 0.0}, "exponent must lie between"),
        ({"law": "dirichlet", "alpha": -1.0}, "alpha must lie between"),
    ],
)
def test_a_law_without_its_number_or_with_anothers_is_refused(section: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        SizesSection(**section)  # type: ignore[arg-type]  # wrong on purpose
