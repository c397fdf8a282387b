"""Unbiasedness, exactly where all cohorts can be enumerated, statistically where `draw` itself is asked.

The exact tests hold the algebra in `weighting.py` to fractions: every cohort, every draw, every pattern of drop-outs of
a small population, each with its probability. The statistical ones hold `draw` to the same over fixed seeds.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.round.weighting import Candidate, draw, weight_of
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import ClientId


@dataclass(frozen=True)
class Holder:
    """A client of the population: its samples and its (scalar) update."""

    n: int
    x: Fraction


POPULATION = tuple(Holder(n, Fraction(x)) for n, x in ((1, 4), (2, -3), (5, 1), (8, 7)))
N = sum(holder.n for holder in POPULATION)
TRUTH = sum((holder.n * holder.x for holder in POPULATION), Fraction()) / N
EQUAL = tuple(Holder(3, holder.x) for holder in POPULATION)

Outcomes = Iterator[tuple[Fraction, Fraction | None]]  # (probability, the round's mean, None if nobody reported)


def truth(population: Sequence[Holder]) -> Fraction:
    total = sum(holder.n for holder in population)
    return sum((holder.n * holder.x for holder in population), Fraction()) / total


def expectation(outcomes: Outcomes) -> Fraction:
    """The expected mean, given that there is one."""
    pairs = [(p, mean) for p, mean in outcomes if mean is not None]
    return sum((p * mean for p, mean in pairs), Fraction()) / sum(p for p, _ in pairs)


def mean_over(reports: Sequence[tuple[Holder, int]]) -> Fraction | None:
    """The mean of (holder, weight) pairs as the coordinator takes it."""
    total = sum(weight for _, weight in reports)
    return sum((weight * holder.x for holder, weight in reports), Fraction()) / total if total else None


def bernoulli(reports: bool, rate: Fraction) -> Fraction:
    return rate if reports else 1 - rate


def samples_weight(holder: Holder) -> int:
    return weight_of(Weighting.SAMPLES, 1, holder.n)


# --- samples: a ratio estimator ---------------------------------------------------------------------------------------


def uniform_cohorts(population: Sequence[Holder], k: int) -> Outcomes:
    """Every cohort of `k`, all equally likely."""
    cohorts = list(combinations(population, k))
    for cohort in cohorts:
        yield Fraction(1, len(cohorts)), mean_over([(holder, samples_weight(holder)) for holder in cohort])


def over_selected(
    population: Sequence[Holder], asked: int, target: int, rate: Callable[[Holder], Fraction]
) -> Outcomes:
    """Ask a uniform cohort; each reports with its `rate`; the first `target` to arrive count, in any order alike."""
    for cohort in permutations(population, asked):
        for reports in product((True, False), repeat=asked):
            p = Fraction(1, math.perm(len(population), asked))
            for holder, is_in in zip(cohort, reports, strict=True):
                p *= bernoulli(is_in, rate(holder))
            arrived = [holder for holder, is_in in zip(cohort, reports, strict=True) if is_in][:target]
            yield p, mean_over([(holder, samples_weight(holder)) for holder in arrived])


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_samples_numerator_and_denominator_are_unbiased(k: int) -> None:
    cohorts = list(combinations(POPULATION, k))
    q = Fraction(k, len(POPULATION))
    numerator = sum((samples_weight(h) * h.x for c in cohorts for h in c), Fraction()) / len(cohorts)
    denominator = Fraction(sum(samples_weight(h) for c in cohorts for h in c), len(cohorts))
    assert numerator == q * N * TRUTH
    assert denominator == q * N


@pytest.mark.parametrize("k", [1, 2, 3])
def test_samples_bias_is_minus_the_covariance_with_the_denominator(k: int) -> None:
    cohorts = [
        (mean, sum(h.n for h in c)) for c in combinations(POPULATION, k) if (mean := mean_over([(h, h.n) for h in c]))
    ]
    count = len(list(combinations(POPULATION, k)))
    assert len(cohorts) == count
    mean_a = sum((a for a, _ in cohorts), Fraction()) / count
    mean_d = Fraction(sum(d for _, d in cohorts), count)
    covariance = sum((a * d for a, d in cohorts), Fraction()) / count - mean_a * mean_d
    assert expectation(uniform_cohorts(POPULATION, k)) - TRUTH == -covariance / mean_d


def first_order_bias(population: Sequence[Holder], k: int) -> float:
    """The formula of `weighting.py` for a cohort of `k`."""
    size, total = len(population), sum(holder.n for holder in population)
    spread = sum((holder.n**2 * (holder.x - truth(population)) for holder in population), Fraction())
    return float(-(1 - Fraction(k, size)) / (k * Fraction(total, size) ** 2 * (size - 1)) * spread)


def test_samples_bias_shrinks_as_the_formula_says() -> None:
    population = [Holder(10 + 3 * i, Fraction((7 * i) % 12)) for i in range(12)]
    biases = {k: float(expectation(uniform_cohorts(population, k)) - truth(population)) for k in (2, 4, 6, 12)}
    errors = {k: biases[k] / first_order_bias(population, k) - 1 for k in (2, 4, 6)}
    assert abs(errors[6]) < abs(errors[4]) < abs(errors[2]) < 0.5
    assert abs(errors[6]) < 0.1
    assert abs(biases[6]) < abs(biases[4]) < abs(biases[2])
    assert biases[12] == 0


def test_samples_is_exact_for_equal_counts_and_for_everybody() -> None:
    assert all(expectation(uniform_cohorts(EQUAL, k)) == truth(EQUAL) for k in (1, 2, 3, 4))
    assert expectation(uniform_cohorts(POPULATION, 4)) == TRUTH


def test_a_uniform_sample_of_a_uniform_sample_is_uniform() -> None:
    """Over-selection and blind drop-outs leave the estimator of cohorts of as many as reported."""
    rate = Fraction(2, 3)
    chances = [Fraction(math.comb(3, k)) * rate**k * (1 - rate) ** (3 - k) for k in range(4)]
    closing = {1: chances[1], 2: chances[2] + chances[3]}  # at a target of 2, a third report is surplus
    expected = sum((p * expectation(uniform_cohorts(POPULATION, k)) for k, p in closing.items()), Fraction())
    assert expectation(over_selected(POPULATION, 3, 2, lambda _: rate)) == expected / sum(closing.values())
    assert expectation(over_selected(EQUAL, 3, 2, lambda _: rate)) == truth(EQUAL)


def test_a_bias_remains_when_those_who_hold_much_report_seldom() -> None:
    rate: Callable[[Holder], Fraction] = lambda holder: Fraction(1, holder.n)  # noqa: E731 - a table in one line
    population = [Holder(1, Fraction(0))] * 2 + [Holder(4, Fraction(1))] * 2
    blind = expectation(over_selected(population, 4, 2, lambda _: Fraction(1, 2)))
    shy = expectation(over_selected(population, 4, 2, rate))
    assert 0 < truth(population) - blind < Fraction(1, 6)  # the ratio's own bias, O(1/K)
    assert truth(population) - shy > Fraction(1, 3)


# --- proportional: draws with replacement -----------------------------------------------------------------------------


def drawn(population: Sequence[Holder], n_draws: int) -> Iterator[tuple[Fraction, tuple[Holder, ...]]]:
    """Every sequence of draws with its probability."""
    total = sum(holder.n for holder in population)
    for draws in product(population, repeat=n_draws):
        yield math.prod((Fraction(holder.n, total) for holder in draws), start=Fraction(1)), draws


def plain_mean(draws: Sequence[Holder]) -> Fraction | None:
    """The coordinator's mean: one report for each client, weighted by its draws."""
    return mean_over([(holder, weight_of(Weighting.PROPORTIONAL, m, holder.n)) for holder, m in Counter(draws).items()])


def lost_by_draw(population: Sequence[Holder], n_draws: int, rate: Fraction) -> Outcomes:
    for p, draws in drawn(population, n_draws):
        for reports in product((True, False), repeat=n_draws):
            chance = math.prod((bernoulli(is_in, rate) for is_in in reports), start=p)
            yield chance, plain_mean([h for h, is_in in zip(draws, reports, strict=True) if is_in])


def lost_by_client(population: Sequence[Holder], n_draws: int, rate: Fraction) -> Outcomes:
    for p, draws in drawn(population, n_draws):
        for reachable in product((True, False), repeat=len(population)):
            chance = math.prod((bernoulli(is_in, rate) for is_in in reachable), start=p)
            there = {h for h, is_in in zip(population, reachable, strict=True) if is_in}
            yield chance, plain_mean([holder for holder in draws if holder in there])


def closed_at_target(population: Sequence[Holder], n_draws: int, target: int) -> Outcomes:
    """Everyone reports, in an order that is uniform over the cohort's clients; the round closes at `target` draws."""
    for p, draws in drawn(population, n_draws):
        counts = Counter(draws)
        for order in permutations(counts):
            n_in, accepted = 0, list[Holder]()
            for holder in order:
                if n_in < target:
                    accepted += [holder] * counts[holder]
                    n_in += counts[holder]
            yield p / math.factorial(len(counts)), plain_mean(accepted)


@pytest.mark.parametrize("n_draws", [1, 2, 3, 4])
def test_proportional_is_unbiased_for_every_number_of_draws(n_draws: int) -> None:
    assert expectation((p, plain_mean(draws)) for p, draws in drawn(POPULATION, n_draws)) == TRUTH


@pytest.mark.parametrize("n_draws", [1, 2, 3])
@pytest.mark.parametrize("rate", [Fraction(1, 3), Fraction(9, 10)])
def test_proportional_is_unbiased_when_draws_are_lost_one_by_one(n_draws: int, rate: Fraction) -> None:
    assert expectation(lost_by_draw(POPULATION, n_draws, rate)) == TRUTH


@pytest.mark.parametrize("target", [1, 2, 3])
def test_proportional_is_unbiased_at_the_target_when_each_client_is_drawn_once(target: int) -> None:
    """The first `target` of four draws, from those draws that name no client twice in a fleet of like clients."""
    once = [(p, draws) for p, draws in drawn(EQUAL, 3) if len(set(draws)) == 3]
    assert expectation((p, plain_mean(draws[:target])) for p, draws in once) == truth(EQUAL)


@pytest.mark.parametrize("n_draws", [1, 2, 3])
def test_losing_a_client_with_all_its_draws_leaves_the_bias_of_the_docstring(n_draws: int) -> None:
    rate = Fraction(2, 3)
    numerator = denominator = Fraction()
    for reachable in product((True, False), repeat=len(POPULATION)):
        there = [h for h, is_in in zip(POPULATION, reachable, strict=True) if is_in]
        if not there:
            continue
        p_there = Fraction(sum(h.n for h in there), N)
        chance = math.prod((bernoulli(is_in, rate) for is_in in reachable), start=Fraction(1))
        answered = chance * (1 - (1 - p_there) ** n_draws)
        numerator += answered * truth(there)
        denominator += answered
    bias = expectation(lost_by_client(POPULATION, n_draws, rate)) - TRUTH
    assert bias == numerator / denominator - TRUTH
    assert (bias == 0) == (n_draws == 1)


def test_that_bias_shrinks_with_the_fleet_and_not_with_the_cohort() -> None:
    def limit(fleet: Sequence[Holder], rate: Fraction) -> tuple[float, float]:
        """The bias for many draws, all reachable sets enumerated, and the formula for it."""
        pairs: list[tuple[Fraction, Fraction | None]] = []
        for reachable in product((True, False), repeat=len(fleet)):
            there = [h for h, is_in in zip(fleet, reachable, strict=True) if is_in]
            chance = math.prod((bernoulli(is_in, rate) for is_in in reachable), start=Fraction(1))
            pairs.append((chance, truth(there) if there else None))
        total = sum(h.n for h in fleet)
        spread = sum((Fraction(h.n, total) ** 2 * (h.x - truth(fleet)) for h in fleet), Fraction())
        return float(expectation(iter(pairs)) - truth(fleet)), float(-(1 - rate) / rate * spread)

    kinds = (Holder(1, Fraction(0)), Holder(2, Fraction(1)), Holder(3, Fraction(5)))
    biases = [limit(kinds * copies, Fraction(9, 10)) for copies in (1, 2, 4)]
    assert all(exact < 0 for exact, _ in biases)
    errors = [abs(exact / formula - 1) for exact, formula in biases]
    assert errors[2] < errors[1] / 2 < errors[0] / 4
    assert errors[2] < 0.25
    assert biases[2][1] == pytest.approx(biases[0][1] / 4)


def test_closing_at_the_target_favours_the_often_drawn() -> None:
    population = (Holder(1, Fraction(0)), Holder(3, Fraction(1)))
    assert expectation(closed_at_target(population, 3, 3)) == truth(population)
    assert expectation(closed_at_target(population, 3, 2)) > truth(population)


# --- draw -------------------------------------------------------------------------------------------------------------

CANDIDATES = tuple(Candidate(ClientId(f"c{i}"), holder.n) for i, holder in enumerate(POPULATION))
HOLDERS = {candidate.client: holder for candidate, holder in zip(CANDIDATES, POPULATION, strict=True)}
N_SEEDS = 4000


def z_score(values: Sequence[float], expected: float) -> float:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return (mean - expected) / math.sqrt(variance / len(values))


def test_drawn_rounds_with_over_selection_and_lost_draws_agree_with_the_expectation() -> None:
    """Ask 5 draws, lose each with probability 0.3 by itself, keep the first 3 answers: the mean is still the truth."""
    means: list[float] = []
    for seed in range(N_SEEDS):
        tickets = [c for c, m in draw(Weighting.PROPORTIONAL, CANDIDATES, 5, seed).items() for _ in range(m)]
        tickets.sort(key=lambda c: derive_seed(seed, "order", c))
        answered = [c for j, c in enumerate(tickets) if derive_seed(seed, "lost", j, c) / 2**63 >= 0.3]
        if mean := plain_mean([HOLDERS[c] for c in answered]) if answered else None:
            means.append(float(mean))
    assert abs(z_score(means, float(TRUTH))) < 4


@pytest.mark.parametrize("n_draws", [1, 3, 8])
def test_proportional_draws_average_to_the_truth(n_draws: int) -> None:
    rounds = (draw(Weighting.PROPORTIONAL, CANDIDATES, n_draws, seed) for seed in range(N_SEEDS))
    means = [float(sum(m * HOLDERS[c].x for c, m in cohort.items()) / n_draws) for cohort in rounds]
    assert abs(z_score(means, float(TRUTH))) < 4


@pytest.mark.parametrize("k", [1, 2, 3])
def test_samples_draws_average_to_the_exact_expectation_of_the_ratio(k: int) -> None:
    cohorts = [draw(Weighting.SAMPLES, CANDIDATES, k, seed) for seed in range(N_SEEDS)]
    means = [mean_over([(HOLDERS[c], HOLDERS[c].n) for c in cohort]) for cohort in cohorts]
    expected = expectation(uniform_cohorts(POPULATION, k))
    assert abs(z_score([float(mean) for mean in means if mean is not None], float(expected))) < 4
    numerators = [float(sum(HOLDERS[c].n * HOLDERS[c].x for c in cohort)) for cohort in cohorts]
    assert abs(z_score(numerators, k / 4 * N * float(TRUTH))) < 4


def chi_square(observed: Mapping[tuple[ClientId, ...], int], expected: Mapping[tuple[ClientId, ...], float]) -> float:
    assert set(observed) <= set(expected)
    return sum((observed.get(cell, 0) - count) ** 2 / count for cell, count in expected.items())


def test_every_uniform_cohort_is_equally_likely() -> None:
    observed = Counter(tuple(draw(Weighting.SAMPLES, CANDIDATES, 2, seed)) for seed in range(N_SEEDS))
    cells: dict[tuple[ClientId, ...], float] = dict.fromkeys(combinations(sorted(HOLDERS), 2), N_SEEDS / 6)
    assert chi_square(observed, cells) < 20.5  # 5 degrees of freedom, p = 0.001


def test_a_ticket_falls_on_a_client_as_often_as_it_holds_samples() -> None:
    observed = Counter(tuple(draw(Weighting.PROPORTIONAL, CANDIDATES, 1, seed)) for seed in range(N_SEEDS))
    cells: dict[tuple[ClientId, ...], float] = {(c.client,): N_SEEDS * c.sample_count / N for c in CANDIDATES}
    assert chi_square(observed, cells) < 16.3  # 3 degrees of freedom, p = 0.001


def fleets() -> st.SearchStrategy[list[Candidate]]:
    counts = st.dictionaries(
        st.from_regex(r"[a-z0-9][a-z0-9_-]{0,5}", fullmatch=True), st.integers(1, 1 << 40), min_size=1
    )
    return counts.map(lambda holders: [Candidate(ClientId(name), n) for name, n in holders.items()])


@given(fleets(), st.sampled_from(Weighting), st.integers(1, 12), st.integers(0, (1 << 63) - 1), st.randoms())
def test_the_order_of_candidates_does_not_matter(
    fleet: list[Candidate], weighting: Weighting, n_draws: int, seed: int, random: object
) -> None:
    cohort = draw(weighting, fleet, n_draws, seed)
    assert list(draw(weighting, fleet[::-1], n_draws, seed).items()) == list(cohort.items())
    assert list(cohort) == sorted(cohort)
    asked = min(n_draws, len(fleet)) if weighting is Weighting.SAMPLES else n_draws
    assert sum(cohort.values()) == asked
    assert weighting is Weighting.PROPORTIONAL or set(cohort.values()) == {1}


@given(fleets(), st.sampled_from(Weighting), st.integers(1, 8), st.integers(0, 8), st.integers(0, 1000))
def test_a_smaller_cohort_is_part_of_a_larger_one(
    fleet: list[Candidate], weighting: Weighting, n_draws: int, more: int, seed: int
) -> None:
    smaller, larger = (draw(weighting, fleet, n, seed) for n in (n_draws, n_draws + more))
    assert all(larger.get(client, 0) >= m for client, m in smaller.items())


def test_the_weight_of_a_client() -> None:
    assert weight_of(Weighting.SAMPLES, n_draws=1, sample_count=70) == 70
    assert weight_of(Weighting.PROPORTIONAL, n_draws=3, sample_count=70) == 3


# --- a coverage floor's price -----------------------------------------------------------------------------------------


def inclusion(clients: Sequence[ClientId], named: ClientId, k: int) -> dict[ClientId, Fraction]:
    """The chance of each client to be in a cohort of `k` that `named` is always in."""
    return {client: Fraction(1) if client == named else Fraction(k - 1, len(clients) - 1) for client in clients}


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_named_site_counts_as_if_the_others_held_less(k: int) -> None:
    """`samples`: numerator and denominator are, in expectation, those of the mean weighted by n_i pi_i."""
    clients = [candidate.client for candidate in CANDIDATES]
    named, others = clients[0], clients[1:]
    cohorts = [[HOLDERS[c] for c in (named, *rest)] for rest in combinations(others, k - 1)]
    pi = inclusion(clients, named, k)
    numerator = sum((h.n * h.x for cohort in cohorts for h in cohort), Fraction()) / len(cohorts)
    denominator = Fraction(sum(h.n for cohort in cohorts for h in cohort), len(cohorts))
    assert numerator == sum((pi[c] * HOLDERS[c].n * HOLDERS[c].x for c in clients), Fraction())
    assert denominator == sum((pi[c] * HOLDERS[c].n for c in clients), Fraction())


def test_the_draw_includes_the_named_always_and_the_others_alike() -> None:
    k, clients = 2, [candidate.client for candidate in CANDIDATES]
    pi = inclusion(clients, clients[0], k)
    cohorts = [draw(Weighting.SAMPLES, CANDIDATES, k, seed, required=clients[:1]) for seed in range(N_SEEDS)]
    for client in clients[1:]:
        assert abs(z_score([float(client in cohort) for cohort in cohorts], float(pi[client]))) < 4
    assert all(clients[0] in cohort and len(cohort) == k for cohort in cohorts)


def test_a_named_site_takes_the_last_draw_where_all_missed_it() -> None:
    """`proportional`: its expected draws rise from K p to K p + (1 - p)^K, and the cohort stays as large."""
    k, named = 5, CANDIDATES[0]
    p = named.sample_count / N
    cohorts = [draw(Weighting.PROPORTIONAL, CANDIDATES, k, seed, required=[named.client]) for seed in range(N_SEEDS)]
    plain = [draw(Weighting.PROPORTIONAL, CANDIDATES, k, seed) for seed in range(N_SEEDS)]
    assert all(sum(cohort.values()) == k and named.client in cohort for cohort in cohorts)
    assert all(new == old for new, old in zip(cohorts, plain, strict=True) if named.client in old)
    assert abs(z_score([float(cohort[named.client]) for cohort in cohorts], k * p + (1 - p) ** k)) < 4


def test_as_many_may_be_required_as_are_drawn() -> None:
    everybody = [candidate.client for candidate in CANDIDATES]
    for seed in range(50):
        cohort = draw(Weighting.PROPORTIONAL, CANDIDATES, len(everybody), seed, required=everybody)
        assert cohort == dict.fromkeys(everybody, 1)
