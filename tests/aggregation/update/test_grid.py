"""The integer grid against a slow oracle of Python integers and fractions."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from umbel.aggregation.errors import LyingLength, NonFiniteUpdate, UpdateOutOfRange
from umbel.aggregation.model.layout import PIECE_VALUES
from umbel.aggregation.plans.codec import MAX_ABS_LEAST, MAX_ABS_MOST, TOTAL_WEIGHT_MAX, Grid
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.types import RunId
from umbel.aggregation.update.grid import GridAccumulator, check_values, to_integers

GRID = Grid.finest(max_abs=64.0, total_weight_max=1 << 20)


@dataclass(frozen=True)
class Update:
    """A client's update as hypothesis draws it: float32 values and an integer weight."""

    values: tuple[float, ...]
    weight: int

    @property
    def vector(self) -> Tensor:
        return torch.tensor(self.values, dtype=torch.float32)


def grids() -> st.SearchStrategy[Grid]:
    bounds = st.floats(MAX_ABS_LEAST, MAX_ABS_MOST)
    return st.builds(
        lambda max_abs, total: Grid.finest(max_abs=max_abs, total_weight_max=total),
        bounds,
        st.integers(1, TOTAL_WEIGHT_MAX),
    )


@st.composite
def rounds(draw: st.DrawFn) -> list[Update]:
    """Up to six updates of one length, zero and one included, whose weights fit `GRID`."""
    n_values = draw(st.integers(0, 7))
    values = st.lists(st.floats(-64, 64, width=32), min_size=n_values, max_size=n_values).map(tuple)
    updates = st.lists(st.builds(Update, values, st.integers(1, 1 << 16)), min_size=1, max_size=6)
    return draw(updates)


def oracle_integer(value: float, grid: Grid) -> int:
    """round(x / D), half to even, with fractions."""
    return round(Fraction(value) / Fraction(grid.step))


def oracle_sums(updates: Sequence[Update], grid: Grid) -> list[int]:
    n_values = len(updates[0].values)
    return [sum(u.weight * oracle_integer(u.values[i], grid) for u in updates) for i in range(n_values)]


def folded(updates: Sequence[Update], grid: Grid = GRID) -> GridAccumulator:
    total = GridAccumulator(len(updates[0].values), grid)
    for update in updates:
        total.fold_vector(update.vector, update.weight)
    return total


def mean_of(total: GridAccumulator) -> Tensor:
    return total.mean_slice(0, total.n_sums)


def integer_sums(total: GridAccumulator) -> list[int]:
    return [int(value) for value in total.sums.tolist()]


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int64), right.view(torch.int64))


@given(rounds())
def test_sums_are_those_of_python_integers(updates: list[Update]) -> None:
    assert integer_sums(folded(updates)) == oracle_sums(updates, GRID)


@given(rounds())
def test_the_mean_is_the_exact_quotient_rounded_twice(updates: list[Update]) -> None:
    total_weight = sum(update.weight for update in updates)
    expected = [float(k) * GRID.step / total_weight for k in oracle_sums(updates, GRID)]
    assert mean_of(folded(updates)).tolist() == expected


@given(rounds())
def test_the_mean_is_within_half_a_step_of_the_mean_of_the_reals(updates: list[Update]) -> None:
    weights = sum(update.weight for update in updates)
    for i, mean in enumerate(mean_of(folded(updates)).tolist()):
        exact = sum((Fraction(u.values[i]) * u.weight for u in updates), Fraction()) / weights
        float64_rounding = Fraction(2) ** -52 * abs(Fraction(mean))
        assert abs(Fraction(mean) - exact) <= Fraction(GRID.step) / 2 + float64_rounding


@given(rounds(), st.randoms(use_true_random=False))
def test_any_order_gives_the_same_bits(updates: list[Update], random: Random) -> None:
    shuffled = list(updates)
    random.shuffle(shuffled)
    assert same_bits(mean_of(folded(shuffled)), mean_of(folded(updates)))


@given(rounds(), st.integers(0, 6), st.integers(0, 6))
def test_any_split_into_partial_sums_gives_the_same_bits(updates: list[Update], one: int, two: int) -> None:
    low, high = sorted((one, two))
    merged = GridAccumulator(len(updates[0].values), GRID)
    for part in (updates[high:], updates[:low], updates[low:high]):
        partial = GridAccumulator(merged.n_sums, GRID)
        for update in part:
            partial.fold_vector(update.vector, update.weight)
        merged.merge_sums((partial.sums,), partial.total_weight, partial.n_folded)
    whole = folded(updates)
    assert integer_sums(merged) == integer_sums(whole)
    assert (merged.total_weight, merged.n_folded) == (whole.total_weight, whole.n_folded)
    assert same_bits(mean_of(merged), mean_of(whole))


@given(rounds(), st.lists(st.integers(0, 7), max_size=4))
def test_any_chunking_gives_the_same_bits(updates: list[Update], cuts: list[int]) -> None:
    chunked = GridAccumulator(len(updates[0].values), GRID)
    n_values = chunked.n_sums
    edges = [0, *sorted(min(cut, n_values) for cut in cuts), n_values]
    for update in updates:
        chunks = [update.vector[a:b] for a, b in itertools.pairwise(edges)]
        chunked.fold(chunks, update.weight)
    assert integer_sums(chunked) == integer_sums(folded(updates))


def test_chunks_of_a_long_vector_meet_without_a_seam() -> None:
    vector = torch.linspace(-1, 1, 2 * PIECE_VALUES + 1)
    total = GridAccumulator(vector.numel(), GRID)
    total.fold_vector(vector, 3)
    assert torch.equal(total.sums, 3 * to_integers(vector, GRID))


@given(grids(), st.data())
def test_rounding_costs_at_most_half_a_step(grid: Grid, data: st.DataObject) -> None:
    bound = float(torch.tensor(grid.max_abs).clamp(max=grid.max_abs))
    value = data.draw(st.floats(-1, 1, width=32).map(lambda unit: float(torch.tensor(unit * bound))))
    if abs(value) > grid.max_abs:
        value = 0.0
    k = int(to_integers(torch.tensor([value]), grid).item())
    assert abs(Fraction(value) - k * Fraction(grid.step)) <= Fraction(grid.step) / 2
    assert k == oracle_integer(value, grid)


@given(st.floats(MAX_ABS_LEAST, MAX_ABS_MOST), st.integers(1, TOTAL_WEIGHT_MAX))
def test_finest_cannot_overflow_and_half_its_step_could(max_abs: float, total: int) -> None:
    grid = Grid.finest(max_abs=max_abs, total_weight_max=total)
    assert Fraction(max_abs) / Fraction(grid.step) * total <= 2**62
    assert Fraction(max_abs) / Fraction(grid.step / 2) * total > 2**62
    assert grid.step <= max_abs * 2.0**-23  # never coarser than float32 is at max_abs
    with pytest.raises(ValueError, match="could overflow"):
        Grid(grid.step / 2, max_abs, total)


@pytest.mark.parametrize("exponent", range(-64, 65, 8))
@pytest.mark.parametrize("nudge", [-1, 0, 1])
@pytest.mark.parametrize("total", [1, 2, 3, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, TOTAL_WEIGHT_MAX])
def test_finest_at_and_beside_powers_of_two(exponent: int, nudge: int, total: int) -> None:
    power = 2.0**exponent
    max_abs = power if nudge == 0 else math.nextafter(power, math.inf if nudge > 0 else 0)
    if MAX_ABS_LEAST <= max_abs <= MAX_ABS_MOST:
        grid = Grid.finest(max_abs=max_abs, total_weight_max=total)
        assert Fraction(max_abs) * total <= Fraction(grid.step) * 2**62 < 2 * Fraction(max_abs) * total


@given(
    st.integers(1, 1 << 20),
    st.floats(1, 10),
    st.integers(1, 1 << 40),
    st.sampled_from(Weighting),
    st.floats(allow_nan=True, allow_infinity=True),
)
def test_every_plan_has_a_grid_that_cannot_overflow_or_is_refused(
    target: int, over_selection: float, sample_count_max: int, weighting: Weighting, max_abs: float
) -> None:
    try:
        plan = RoundPlan(RunId("r"), 1, 1, target, 1, over_selection, 1.0, weighting, sample_count_max, max_abs, seed=0)
    except ValueError:
        return
    assert Fraction(max_abs) / Fraction(plan.grid.step) * plan.total_weight_max <= 2**62


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("weights", [[TOTAL_WEIGHT_MAX], [TOTAL_WEIGHT_MAX - 1, 1], [1 << 37] * 2])
@pytest.mark.parametrize("max_abs", [64.0, float(torch.tensor(0.1)), 3.0, 2.0**-20])
def test_the_sum_holds_at_the_extremes(sign: float, weights: list[int], max_abs: float) -> None:
    grid = Grid.finest(max_abs=max_abs, total_weight_max=TOTAL_WEIGHT_MAX)
    updates = [Update((sign * max_abs,) * 3, weight) for weight in weights]
    total = folded(updates, grid)
    assert integer_sums(total) == oracle_sums(updates, grid)
    assert mean_of(total).tolist() == [sign * max_abs] * 3
    with pytest.raises(ValueError, match="would make the total weight"):
        total.fold_vector(updates[0].vector, 1)


@given(rounds(), st.sampled_from([math.nan, math.inf, -math.inf, 64.000008, -1e30]), st.data())
def test_a_refused_update_changes_nothing(updates: list[Update], poison: float, data: st.DataObject) -> None:
    total = folded(updates)
    before = (total.sums.clone(), total.total_weight, total.n_folded)
    bad = torch.zeros(total.n_sums)
    if total.n_sums:
        index = data.draw(st.integers(0, total.n_sums - 1))
        bad[index] = poison
        refusal = UpdateOutOfRange if math.isfinite(poison) else NonFiniteUpdate
        with pytest.raises(refusal, match=f"value {index} of the update"):
            total.fold_vector(bad, 1)
    for wrong in (torch.zeros(total.n_sums + 1), torch.zeros(max(total.n_sums - 1, 0))):
        if wrong.numel() != total.n_sums:
            with pytest.raises(LyingLength):
                total.fold_vector(wrong, 1)
    for weight in (0, -1, GRID.total_weight_max + 1):
        with pytest.raises(ValueError, match="would make the total weight"):
            total.fold_vector(torch.zeros(total.n_sums), weight)
    assert torch.equal(total.sums, before[0])
    assert (total.total_weight, total.n_folded) == before[1:]


def test_the_first_offender_is_named_by_its_place_in_the_whole_update() -> None:
    with pytest.raises(NonFiniteUpdate, match="value 1002 of the update is nan"):
        check_values(torch.tensor([99.0, 0.0, math.nan, math.inf]), GRID, first=1000)
    with pytest.raises(UpdateOutOfRange, match="value 1001 of the update is -99, beyond"):
        check_values(torch.tensor([GRID.max_abs, -99.0, 99.0]), GRID, first=1000)


def test_a_value_just_over_a_bound_that_is_no_float32_is_refused() -> None:
    grid = Grid.finest(max_abs=0.1, total_weight_max=1)  # float32(0.1) > 0.1
    with pytest.raises(UpdateOutOfRange, match="value 0 "):
        check_values(torch.tensor([0.1]), grid)


def test_an_empty_vector_is_an_update() -> None:
    check_values(torch.zeros(0), Grid.finest(max_abs=2.0**-20, total_weight_max=1))
    total = GridAccumulator(0, GRID)
    total.fold_vector(torch.zeros(0), 2)
    assert (total.n_folded, total.total_weight, mean_of(total).numel()) == (1, 2, 0)


@pytest.mark.parametrize("sizes", [[], [3], [2, 1], [4, 1], [3, 3]])
def test_chunks_that_do_not_add_up_are_a_lying_length(sizes: list[int]) -> None:
    with pytest.raises(LyingLength):
        GridAccumulator(4, GRID).fold([torch.zeros(size) for size in sizes], 1)


def test_there_is_no_mean_of_nothing() -> None:
    with pytest.raises(ValueError, match="no update was added"):
        GridAccumulator(1, GRID).mean_slice(0, 1)


def test_a_partial_sum_of_another_length_does_not_merge() -> None:
    with pytest.raises(LyingLength, match="more integers than the sum, which has 4"):
        GridAccumulator(4, GRID).merge_sums((GridAccumulator(5, GRID).sums,), 0, 0)


def test_partial_sums_that_together_weigh_too_much_do_not_merge() -> None:
    one, two = (folded([Update((1.0,), GRID.total_weight_max)]) for _ in range(2))
    with pytest.raises(ValueError, match="would make the total weight"):
        one.merge_sums((two.sums,), two.total_weight, two.n_folded)
    assert one.total_weight == GRID.total_weight_max


@pytest.mark.parametrize("max_abs", [math.nan, math.inf, -math.inf, 0.0, -1.0, 5e-324, 1e308, 2.0**65])
def test_a_bound_that_makes_no_grid_is_refused(max_abs: float) -> None:
    with pytest.raises(ValueError, match="max_abs must lie"):
        Grid.finest(max_abs=max_abs, total_weight_max=1)
    with pytest.raises(ValueError, match="max_abs must lie"):
        Grid(1.0, max_abs, 1)


@pytest.mark.parametrize("total", [0, -1, TOTAL_WEIGHT_MAX + 1, 10**400])
def test_weights_that_make_no_grid_are_refused(total: int) -> None:
    with pytest.raises(ValueError, match="must add up to at least 1 and at most"):
        Grid.finest(max_abs=1.0, total_weight_max=total)


@pytest.mark.parametrize("step", [0.0, -0.5, 0.3, math.nan, math.inf])
def test_a_step_must_be_a_power_of_two(step: float) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Grid(step, 1.0, 1)
