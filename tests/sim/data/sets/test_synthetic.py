"""Synthetic(alpha, beta) is the published law, a client's data are its own whoever is asked, and a million are free."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData
from umbel.sim.data.sets.synthetic import SyntheticLaw, SyntheticPopulation

laws = st.builds(
    SyntheticLaw,
    n_clients=st.just(1000),
    beta=st.sampled_from([0.0, 0.5, 1.0]),
    is_iid=st.booleans(),
    samples=st.none() | st.integers(1, 30),
)
# Of the law of sizes, clients with few samples, so that an example takes milliseconds.
SMALL = np.flatnonzero(SyntheticPopulation(SyntheticLaw(1000), 0).sizes(np.arange(1000)) < 80).tolist()


def everybody(population: SyntheticPopulation) -> Indices:
    return np.arange(population.n_clients)


def assert_same(some: CohortData, other: CohortData) -> None:
    assert np.array_equal(some.starts, other.starts)
    assert torch.equal(some.samples.inputs, other.samples.inputs)
    assert torch.equal(some.samples.targets, other.samples.targets)


@given(laws, st.lists(st.sampled_from(SMALL), min_size=1, max_size=8))
def test_a_client_has_the_same_data_whoever_is_asked_for_with_it(law: SyntheticLaw, chosen: list[int]) -> None:
    population = SyntheticPopulation(law, 0)
    clients = np.array(chosen)
    together = population.data_of(clients)
    assert np.array_equal(together.sizes, population.sizes(clients))
    held = population.holdout_of(clients)
    for position, client in enumerate(chosen):
        for whole, part in (
            (together, SyntheticPopulation(law, 0).data_of(np.array([client]))),
            (held, population.holdout_of(np.array([client]))),
        ):
            mine = whole.of(position)
            assert torch.equal(mine.inputs, part.samples.inputs)
            assert torch.equal(mine.targets, part.samples.targets)


@given(laws, st.integers(0, 1 << 62))
def test_what_is_held_back_is_a_tenth_of_all_and_not_trained_on(law: SyntheticLaw, seed: int) -> None:
    population = SyntheticPopulation(law, seed)
    clients = np.arange(10)[population.sizes(np.arange(10)) < 100]
    data, holdout = population.data_of(clients), population.holdout_of(clients)
    trained, held = data.sizes, holdout.sizes
    if law.samples is None:
        assert np.array_equal(trained, (trained + held) * 9 // 10)
        assert trained.min(initial=45) >= 45
    else:
        assert set(trained.tolist()) <= {law.samples}
        assert held.min(initial=1) >= 1
    for position in range(len(clients)):
        mine = {tuple(row) for row in data.of(position).inputs.tolist()}
        assert mine.isdisjoint(map(tuple, holdout.of(position).inputs.tolist()))


def test_another_seed_or_another_client_is_another_one() -> None:
    law = SyntheticLaw(10, samples=5)
    first, other = (SyntheticPopulation(law, seed).data_of(np.arange(10)) for seed in (1, 2))
    rows = torch.cat([first.samples.inputs, other.samples.inputs])
    assert len(rows.unique(dim=0)) == len(rows) == 100


def test_inputs_have_the_variances_of_the_paper_around_each_client_s_centre() -> None:
    population = SyntheticPopulation(SyntheticLaw(200, beta=1.0, samples=500), 3)
    inputs = population.data_of(everybody(population)).samples.inputs.double().view(200, 500, 60)
    around = inputs - inputs.mean(1, keepdim=True)
    ratios = (around**2).sum((0, 1)) / (200 * 499) / torch.arange(1, 61) ** -1.2
    assert (ratios - 1).abs().max() < 6 * (2 / 100_000) ** 0.5, "six standard deviations of a variance's estimate"
    correlation = torch.corrcoef(around.reshape(-1, 60).T) - torch.eye(60)
    assert correlation.abs().max() < 6 / 100_000**0.5
    centres = inputs.mean(1)
    between = centres.mean(1)  # of a client: N(0, beta) and a sixtieth of the variance within
    assert abs(between.var().item() - (1 + 1 / 60)) < 6 * (2 / 200) ** 0.5
    within = (centres - centres.mean(1, keepdim=True)).var(1).mean().item()
    assert abs(within - 1) < 6 * (2 / (200 * 59)) ** 0.5 + 0.01  # a centre is known up to 1/500 of Sigma


def test_sizes_follow_the_log_normal_law_of_the_authors() -> None:
    population = SyntheticPopulation(SyntheticLaw(100_000), 3)
    clients = everybody(population)
    all_there = population.sizes(clients) + np.ceil(population.sizes(clients) / 9)
    logarithms = np.log(all_there - 50 + 0.5)
    assert abs(np.median(logarithms) - 4) < 0.05
    assert abs(np.subtract(*np.quantile(logarithms, [0.9, 0.1])) - 2 * 2 * 1.28155) < 0.1


def test_classes_are_those_of_each_client_s_linear_model_with_u_or_without() -> None:
    """A model of its own for each client, which one softmax regression per client must be able to find; and the
    argument by which alpha is left out: what it adds to W and b adds the same to every logit.
    """
    population = SyntheticPopulation(SyntheticLaw(3, samples=2000), 5)
    data = population.data_of(np.arange(3))
    models = population._models(np.arange(3))  # pyright: ignore[reportPrivateUsage]  # the labels' own source
    assert models.shape == (3, 61, 10)
    assert abs(float(models.std()) - 1) < 0.1
    for client in range(3):
        mine = data.of(client)
        inputs = np.column_stack([mine.inputs.numpy(), np.ones(2000)])
        for shift in (0.0, 1.7):
            logits = inputs @ (models[client].astype(np.float64) + shift)
            assert np.array_equal(logits.argmax(1), mine.targets.numpy())
    assert not np.array_equal(models[0], models[1])


def test_in_the_iid_variant_one_model_and_one_distribution_are_everybody_s() -> None:
    population = SyntheticPopulation(SyntheticLaw(100, is_iid=True, samples=200), 5)
    data = population.data_of(everybody(population))
    inputs = np.column_stack([data.samples.inputs.numpy(), np.ones(20_000)])
    model = population._models(np.arange(1))[0]  # pyright: ignore[reportPrivateUsage]  # as above
    assert np.array_equal((inputs @ model).argmax(1), data.samples.targets.numpy())
    centres = data.samples.inputs.view(100, 200, 60).mean(1)
    assert centres[:, -1].abs().max() < 6 * (60**-1.2 / 200) ** 0.5


def test_no_sample_repeats_numbers_of_the_one_before_it() -> None:
    """Each takes 15 words of its client's stream; had it fewer of its own, the next would show the same, moved on."""
    population = SyntheticPopulation(SyntheticLaw(2, is_iid=True, samples=500), 5)
    drawn = population.data_of(np.arange(2)).samples.inputs.numpy() * np.arange(1, 61) ** 0.6
    for moved in range(0, 60, 4):
        assert np.isclose(drawn[1:, : 60 - moved], drawn[:-1, moved:], atol=1e-6).mean() < 0.01


def test_alpha_changes_nothing_and_beta_does() -> None:
    clients = np.arange(5)
    plain, alpha, beta = (
        SyntheticPopulation(SyntheticLaw(5, a, b, samples=10), 1).data_of(clients)
        for a, b in ((0, 1), (1, 1), (0, 0.5))
    )
    assert_same(plain, alpha)
    assert not torch.equal(plain.samples.inputs, beta.samples.inputs)


def test_the_test_set_is_what_clients_hold_back_or_a_thousand_of_them() -> None:
    few = SyntheticPopulation(SyntheticLaw(30, samples=90), 1)
    assert torch.equal(few.test.inputs, few.holdout_of(everybody(few)).samples.inputs)
    many = SyntheticPopulation(SyntheticLaw(5000, samples=9), 1)
    assert torch.equal(many.test.inputs, many.holdout_of(np.arange(0, 5000, 5)).samples.inputs)


def test_a_million_clients_take_no_more_memory_than_those_that_are_asked() -> None:
    SyntheticPopulation(SyntheticLaw(10, samples=20), 1).data_of(np.arange(10))  # the table of quantiles
    tracemalloc.start()
    population = SyntheticPopulation(SyntheticLaw(1_000_000, samples=20), 1)
    population.sizes(np.arange(0, 1_000_000, 100))
    population.data_of(np.arange(0, 1_000_000, 100_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_nobody_holds_nothing() -> None:
    population = SyntheticPopulation(SyntheticLaw(10), 1)
    nobody = population.data_of(np.empty(0, dtype=np.int64))
    assert (len(nobody), len(nobody.samples)) == (0, 0)


@pytest.mark.parametrize(
    "bad", [{"n_clients": 0}, {"n_clients": 10_000_001}, {"alpha": -1}, {"beta": float("nan")}, {"samples": 0}]
)
def test_a_law_that_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must lie between"):
        SyntheticLaw(**bad)
