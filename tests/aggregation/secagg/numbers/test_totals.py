"""The coordinator's side: sums without masks come to the weighted mean, or to nothing at all."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.aggregation.secagg.house import (
    N_VALUES,
    Cohort,
    cohort,
    composed,
    gaussian,
    mean_of,
    secure_plan,
    sent,
    vector_layout,
    weighted_mean,
    work_of,
)
from tests.federations.whole_states import next_master, state_change
from umbel.aggregation.codec.modular import lift
from umbel.aggregation.codec.step import ALARM_SHARE
from umbel.aggregation.kernels.rotation import unrotate
from umbel.aggregation.model.layout import INTEGER_UNIT, Layout
from umbel.aggregation.model.state import master_of
from umbel.aggregation.plans.masks import NoisePlan
from umbel.aggregation.secagg.numbers.composition import METRIC_LIMIT, N_COUNTS, RMS_UNIT, STEPS_LIMIT
from umbel.aggregation.secagg.numbers.contribution import LocalWork, contribution, nothing
from umbel.aggregation.secagg.numbers.metric_sums import MetricSum
from umbel.aggregation.secagg.numbers.totals import (
    CanaryWrong,
    ImplausibleTotals,
    SumWrapped,
    Totals,
    TotalsRefused,
    totals,
)
from umbel.aggregation.types import LEVEL_MAX, MetricNames
from umbel.aggregation.update.grid import GridAccumulator, IntegerSum


@given(
    n_clients=st.integers(3, 12),
    n_values=st.integers(1, 6000),
    spare_bits=st.integers(0, 9),
    weights=st.lists(st.integers(1, 100_000), min_size=12, max_size=12),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_sums_come_to_the_weighted_mean(
    n_clients: int, n_values: int, spare_bits: int, weights: list[int], seed: int
) -> None:
    """Each level is off by less than a step, whatever the dither; and the rotation keeps lengths."""
    weights = weights[:n_clients]
    plan = secure_plan(n_clients, 300, minimum=3)
    plan = replace(plan, bits=min(32, plan.bits + spare_bits))
    composition = composed(plan, vector_layout(n_values), step=0.5)
    changes = [gaussian(n_values, 100 * seed + rank) for rank in range(n_clients)]
    works = [LocalWork(weight, 2, 2) for weight in weights]
    made = cohort(composition, changes, works).totals()
    off = mean_of(made, n_values) - weighted_mean(changes, weights)
    factor = plan.weight_unit / sum(weights)
    bound = n_clients * 0.5 * math.sqrt(composition.n_levels) * factor
    assert float(off.norm()) <= bound + 1e-5 * max(weights) * n_clients * factor * math.sqrt(n_values)
    assert (made.total_weight, made.sample_count, made.n_clients) == (sum(weights), sum(weights), n_clients)


def test_the_mean_is_unbiased() -> None:
    """Over 400 cohorts, at a step of two root mean squares: no coordinate is off by more than five standard errors."""
    n_values, weights = 64, [1, 2, 5]
    changes = [gaussian(n_values, rank) for rank in range(3)]
    found = torch.stack(
        [
            mean_of(
                cohort(
                    composed(secure_plan(3), vector_layout(n_values), step=2.0, key=key),
                    changes,
                    [work_of(weight) for weight in weights],
                    first_rank=3 * key,
                ).totals(),
                n_values,
            )
            for key in range(400)
        ]
    )
    off = (found.mean(0) - weighted_mean(changes, weights)).abs()
    errors = found.var(0).mean().sqrt() / math.sqrt(400)
    assert float((off / errors).max()) < 5
    assert float(errors) > 0.003  # the step is coarse enough for a bias to show


def test_equal_weights_make_the_model_of_a_plain_exact_sum() -> None:
    """To the last bit: what `IntegerSum` adds up of the same integers, and `Modular` of the packed ones."""
    composition = composed(replace(secure_plan(6, weight_unit=50), bits=11))
    changes = [gaussian(N_VALUES, rank) for rank in range(6)]
    here = cohort(composition, changes, [work_of(50)] * 6)
    made, modular = here.totals(), composition.modular
    total = IntegerSum(composition.n_levels, 6)
    sums = modular.new_sum()
    for one in here.contributions:
        total.add(one.levels(), 1)
        modular.add(sums, torch.cat(list(modular.packed(one.levels()))))
    parts = (total.sums[first : first + n] for first, n in modular.rotated.parts(total.sums))
    plain = modular.rotated.plain_mean(parts, 6)
    assert torch.equal(modular.mean(sums, 6), plain)
    layout, start = composition.layout, {"weight": gaussian(N_VALUES, 99)}
    model = next_master(layout, start, made.mean, 0.7)["weight"]
    assert torch.equal(model, (start["weight"].double() + plain.double() * 0.7).float())


def test_any_slice_of_the_mean_is_that_of_the_whole() -> None:
    made = cohort(composed(secure_plan(3)), [gaussian(N_VALUES, rank) for rank in range(3)], [work_of(9)] * 3).totals()
    whole = mean_of(made, N_VALUES)
    slices = [made.mean.mean_slice(start, min(start + 701, N_VALUES)) for start in range(0, N_VALUES, 701)]
    assert torch.equal(torch.cat(slices), whole)
    whole.zero_()  # it is the caller's to write over
    assert mean_of(made, N_VALUES).any()


@pytest.mark.parametrize(("bits", "lane"), [(8, torch.int8), (13, torch.int16), (24, torch.int32)])
def test_masked_sums_in_the_narrowest_lanes_come_to_the_same(bits: int, lane: torch.dtype) -> None:
    composition = composed(replace(secure_plan(4), bits=bits), step=0.5)
    here = cohort(composition, [gaussian(N_VALUES, rank) for rank in range(4)], [work_of(1)] * 4)
    assert not here.has_wrapped
    limits, generator = torch.iinfo(lane), torch.Generator().manual_seed(0)
    masked, masks = torch.zeros(composition.n_levels, dtype=lane), torch.zeros(composition.n_levels, dtype=lane)
    for one in here.contributions:
        mask = torch.randint(limits.min, limits.max, (composition.n_levels,), generator=generator).to(lane)
        masked += torch.cat(list(one.levels())).to(lane) + mask
        masks += mask
    made = totals(composition, masked - masks, here.words(), here.ranks)
    assert torch.equal(mean_of(made, N_VALUES), mean_of(here.totals(), N_VALUES))
    assert made.sum_sha256 == here.totals().sum_sha256


def test_some_of_the_cohort_may_be_missing() -> None:
    composition = composed(secure_plan(9))
    changes = [gaussian(N_VALUES, rank) for rank in range(9)]
    made = cohort(composition, changes, [work_of(1 + rank) for rank in range(9)])
    there = Cohort(composition, [made.contributions[rank] for rank in (1, 4, 5, 8)])
    off = mean_of(there.totals(), N_VALUES) - weighted_mean([changes[r] for r in (1, 4, 5, 8)], [2, 5, 6, 9])
    assert float(off.square().mean().sqrt()) < 0.25 * 2 / 22


# --- exact tensors ----------------------------------------------------------------------------------------------------


def normalized(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model.register_buffer("is_on", torch.tensor([seed % 2 == 0, True]))
    for _ in range(seed):
        model(torch.randn(8, 4))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_batch_norm_and_counters_are_the_same_as_on_the_plain_path() -> None:
    """To the last bit those of codec 0, whose grid they stand on."""
    start, locals_ = normalized(0), [normalized(seed) for seed in (3, 4, 8)]
    layout, weights = Layout.of_state(start), [10, 30, 77]
    composition = composed(secure_plan(3, weight_unit=16), layout, max_abs=64.0)
    changes = [state_change(layout, local, start) for local in locals_]
    made = cohort(composition, changes, [work_of(weight) for weight in weights]).totals()
    plain = GridAccumulator(layout.n_values, composition.grid)
    for change, weight in zip(changes, weights, strict=True):
        plain.fold_vector(change, weight)
    ours = next_master(layout, master_of(layout, start), made.mean)
    theirs = next_master(layout, master_of(layout, start), plain)
    exact = [spec.name for spec in layout.owners() if not spec.is_coded]
    assert sorted(exact) == ["1.num_batches_tracked", "1.running_mean", "1.running_var", "is_on"]
    for name in exact:
        assert torch.equal(ours[name], theirs[name]), name
    assert int(ours["1.num_batches_tracked"]) == round((3 * 10 + 4 * 30 + 8 * 77) / 117)
    assert not torch.equal(ours["0.weight"], theirs["0.weight"])  # that one was rounded


# --- wrapping ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(1, 900), st.lists(st.integers(-(1 << 22), 1 << 22), min_size=3, max_size=3)),
        min_size=3,
        max_size=6,
    ),
    st.floats(0.0, 500.0),
)
@settings(max_examples=25, deadline=None)
def test_tensors_of_the_kind_count_are_added_up_exactly_and_never_shortened(
    clients: list[tuple[int, list[int]]], size: float
) -> None:
    """Beside Python's own integers. `size`: of another value of the update, beyond max_abs too."""
    state = {"a": torch.zeros(40), "n": torch.zeros(3, dtype=torch.int64), "z": torch.zeros((), dtype=torch.int64)}
    layout = Layout.of_state(state, lambda name: "count" if name == "n" else "mean")
    composition = composed(secure_plan(len(clients), 300), layout, step=0.5, max_abs=64.0)
    changes = list[Tensor]()
    for _, counted in clients:
        change = torch.zeros(layout.n_values)
        change[0], change[40:43], change[43] = size, torch.tensor(counted) * INTEGER_UNIT, 8 * INTEGER_UNIT
        changes.append(change)
    made = cohort(composition, changes, [LocalWork(weight, 2, 2) for weight, _ in clients]).totals()
    found = made.mean.mean_slice(40, 43) / INTEGER_UNIT
    assert found.tolist() == [sum(counted[i] for _, counted in clients) for i in range(3)]
    assert torch.equal(made.mean.mean_slice(41, 42) / INTEGER_UNIT, found[1:2]), "any slice is that of the whole"
    if size <= composition.grid.max_abs:
        assert float(made.mean.mean_slice(43, 44)) == pytest.approx(8 * INTEGER_UNIT, abs=1e-6)


def test_the_extreme_at_the_greatest_weight_is_exact_and_one_bit_less_wraps() -> None:
    """Eight levels of each block at +-32,766, of every client: as many as a change may have that is not shortened."""
    plan = secure_plan(5)
    rotated = composed(plan).modular.rotated
    spikes = torch.zeros(rotated.n_levels)
    spikes[:: rotated.blocks.size // 8] = 1e9
    extreme = unrotate(spikes, rotated.blocks, rotated.plan.key)
    here = cohort(composed(plan), [extreme] * 5, [work_of(1 << 20)] * 5)
    assert int(here.plain_levels().abs().max()) == 5 * LEVEL_MAX
    assert not here.has_wrapped
    assert here.totals().n_clients == 5
    narrower = cohort(composed(replace(plan, bits=plan.bits - 1)), [extreme] * 5, [work_of(1 << 20)] * 5)
    assert narrower.has_wrapped
    with pytest.raises(SumWrapped, match="the next attempt uses enough bits for every possible sum"):
        narrower.totals()


def test_a_sum_beyond_its_bits_is_an_alarm_first_and_then_refused() -> None:
    """Ten clients that agree, at ninety steps: the sum's standard deviation is 900."""
    changes = [gaussian(N_VALUES, 7)] * 10
    shown = dict[int, Totals]()
    for bits in (15, 14, 13):
        here = cohort(composed(replace(secure_plan(10), bits=bits), step=1 / 90), changes, [work_of(1)] * 10)
        assert not here.has_wrapped
        shown[bits] = here.totals()
    assert shown[15].shown.share_near_the_edge == 0
    assert ALARM_SHARE < shown[13].shown.share_near_the_edge < 0.01
    for bits in (12, 11, 9, 6, 2, 1):
        here = cohort(composed(replace(secure_plan(10), bits=bits), step=1 / 90), changes, [work_of(1)] * 10)
        assert here.has_wrapped
        with pytest.raises(SumWrapped):
            here.totals()


@pytest.mark.parametrize("asked", [("loss", "low"), "all"])
def test_words_at_their_maxima_do_not_wrap(asked: MetricNames) -> None:
    """4,096 clients of 2^26 samples, the most there may be, all at every limit. Names in a table may wrap."""
    n_clients, samples, max_abs = 4096, 1 << 26, 64.0
    composition = composed(
        secure_plan(n_clients, metrics=asked, evaluation=("loss",)),
        Layout.of_state({"steps": torch.zeros(2, dtype=torch.int64)}),
        sample_count_max=samples,
        max_abs=max_abs,
    )
    low_and_high = torch.tensor([max_abs, -max_abs])
    metrics = {"loss": math.inf, "low": -math.inf}
    work = LocalWork(samples, 1 << 62, 1 << 62, metrics, {"loss": 1e9}, 1 << 40)
    words = sent(composition, low_and_high, work, 0).words
    assert all(abs(word) * n_clients <= 1 << 62 for word in words.tolist()) or asked == "all"
    levels = torch.zeros(composition.n_levels, dtype=torch.int32)
    made = totals(composition, levels, words * n_clients, range(n_clients))
    assert made.sample_count == made.total_weight == 1 << 38
    assert mean_of(made, 2).tolist() == [max_abs, -max_abs]
    assert made.metrics == {"loss": METRIC_LIMIT, "low": -METRIC_LIMIT}
    assert made.n_cut == 3 * n_clients
    assert made.steps_done == n_clients * STEPS_LIMIT


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_means_over_the_samples_of_those_that_measured_them() -> None:
    composition = composed(secure_plan(4, metrics=("loss",), evaluation=("accuracy",)))
    works = [
        LocalWork(10, 2, 3, {"loss": 1.0}, {"accuracy": 0.5}, 7),
        LocalWork(30, 3, 3, {"loss": 2.0}, {}, 7),
        LocalWork(50, 3, 3, {"loss": 0.25}, {"accuracy": 0.75}, 14),
        LocalWork(99, 1, 3, {}, {"accuracy": 0.25}, 1),
    ]
    made = cohort(composition, [torch.zeros(N_VALUES)] * 4, works).totals()
    assert made.metrics["loss"] == pytest.approx((10 + 60 + 12.5) / 90)
    assert made.evaluation["accuracy"] == pytest.approx((3.5 + 10.5 + 0.25) / 22)
    assert made.measured_by == {"training.loss": 3, "evaluation.accuracy": 3}
    assert (made.n_partial, made.steps_done, made.steps_planned, made.n_cut) == (2, 9, 12, 0)


def test_a_metric_that_too_few_have_measured_is_left_out() -> None:
    composition = composed(secure_plan(4, metrics=("loss", "auc"), evaluation=("loss",)))
    works = [LocalWork(10, 2, 3, {"loss": 1.0, **({"auc": 0.5} if rank < 2 else {})}) for rank in range(4)]
    made = cohort(composition, [torch.zeros(N_VALUES)] * 4, works).totals()
    assert (dict(made.metrics), dict(made.evaluation)) == ({"loss": 1.0}, {})
    assert made.measured_by == {"training.loss": 4, "training.auc": 2, "evaluation.loss": 0}


MEASURED = st.dictionaries(st.sampled_from(["loss", "auc", "a/b", "z-9"]), st.floats(allow_infinity=True), max_size=4)


@given(
    of_clients=st.lists(st.tuples(MEASURED, MEASURED, st.integers(0, 50)), min_size=4, max_size=4),
    own=st.dictionaries(st.sampled_from(["loss", "z-9"]), st.integers(0, 9)),
)
@settings(max_examples=50)
def test_all_metrics_come_to_what_the_same_metrics_come_to_if_the_run_file_lists_them(
    of_clients: list[tuple[dict[str, float], dict[str, float], int]], own: dict[str, int]
) -> None:
    """Only a metric of no client is missing: nobody has said its name."""
    works = [
        LocalWork(10, 2, 3, found, held_out, n_held_out, weights=own if rank == 1 else {})
        for rank, (found, held_out, n_held_out) in enumerate(of_clients)
    ]
    names = ("a/b", "auc", "loss", "z-9")
    listed, every = (
        cohort(composed(plan), [torch.zeros(N_VALUES)] * 4, works).totals()
        for plan in (secure_plan(4, metrics=names, evaluation=names), secure_plan(4, metrics="all", evaluation="all"))
    )
    assert (every.metrics, every.evaluation, every.n_cut) == (listed.metrics, listed.evaluation, listed.n_cut)
    assert every.measured_by == {name: n for name, n in listed.measured_by.items() if n}
    assert every.overfull == frozenset()


def test_more_metrics_than_there_is_room_for_are_an_overfull_table_and_not_an_error() -> None:
    composition = composed(secure_plan(20, metrics="all", evaluation="all"))
    works = [LocalWork(10, 2, 3, {"loss": 1.0, **{f"m{rank}.{i}": 1.0 for i in range(30)}}) for rank in range(20)]
    made = cohort(composition, [torch.zeros(N_VALUES)] * 20, works).totals()
    assert made.overfull == {"training"}
    assert made.metrics.keys() <= {"loss"}


def test_what_a_client_makes_up_in_a_table_is_an_overfull_table_or_impossible() -> None:
    composition = composed(secure_plan(4, metrics="all"))
    works = [LocalWork(10, 2, 3, {"loss": 0.5})] * 4
    here = cohort(composition, [torch.zeros(N_VALUES)] * 4, works)
    noise = torch.randint(-(1 << 62), 1 << 62, (composition.n_words,), generator=torch.Generator().manual_seed(5))
    noise[:N_COUNTS] = 0
    made = totals(composition, here.levels(), here.words() + noise, here.ranks)
    assert not made.metrics
    assert made.overfull == {"training"}
    heavy = composition.words.of_training.join({"made-up": MetricSum(1, 1 << 62, 0)})
    words = here.words()
    words[N_COUNTS:] += torch.tensor(heavy)
    with pytest.raises(ImplausibleTotals, match="a metric in the unmasked sum is impossible"):
        totals(composition, here.levels(), words, here.ranks)


# --- counts -----------------------------------------------------------------------------------------------------------

CONFUSIONS = st.lists(st.integers(0, 1 << 40), min_size=4, max_size=4).map(tuple)


@given(of_clients=st.lists(st.none() | CONFUSIONS, min_size=4, max_size=4), held_out=CONFUSIONS)
def test_counts_are_exact_sums_and_those_of_too_few_clients_are_left_out(
    of_clients: list[tuple[int, ...] | None], held_out: tuple[int, ...]
) -> None:
    plan = secure_plan(4, counts={"confusion": 4, "n": 1}, evaluation_counts={"confusion": 4})
    works = [
        LocalWork(
            10,
            2,
            3,
            counts={"other": (1,), **({} if one is None else {"confusion": one})},
            evaluation_counts={"confusion": held_out},
        )
        for one in of_clients
    ]
    made = cohort(composed(plan), [torch.zeros(N_VALUES)] * 4, works).totals()
    known = [one for one in of_clients if one is not None]
    total = tuple(sum(one[i] for one in known) for i in range(4))
    assert made.counts == ({"confusion": total} if len(known) >= plan.minimum else {})
    assert made.evaluation_counts == {"confusion": tuple(4 * number for number in held_out)}
    assert made.counted_by == {"training.confusion": len(known), "training.n": 0, "evaluation.confusion": 4}


@pytest.mark.parametrize(
    "impossible",
    [(-1, 0, 0), (5, 0, 0), (4, -1, 0), (4, 0, 4 * (1 << 40) + 1), (0, 0, 1), (1, (1 << 40) + 1, 0)],
)
def test_sums_of_counts_that_no_clients_can_have_are_refused(impossible: tuple[int, ...]) -> None:
    here = cohort(composed(secure_plan(4, counts={"n": 2})), [torch.zeros(N_VALUES)] * 4, [work_of(10)] * 4)
    words = here.words()
    words[-3:] = torch.tensor(impossible)
    with pytest.raises(ImplausibleTotals, match="counts in the unmasked sum are impossible"):
        totals(here.composition, here.levels(), words, here.ranks)
    words[-3:] = torch.tensor([4, 4 * (1 << 40), 0])
    assert totals(here.composition, here.levels(), words, here.ranks).counts == {"n": (1 << 42, 0)}


# --- what is refused --------------------------------------------------------------------------------------------------


def a_cohort() -> Cohort:
    layout = Layout.of_state({"a": torch.zeros(800), "steps": torch.zeros(1, dtype=torch.int64)})
    composition = composed(secure_plan(4, metrics=("loss",)), layout, sample_count_max=1000, max_abs=64.0)
    works = [LocalWork(600 + rank, 2, 3, {"loss": 1.0}) for rank in range(4)]
    return cohort(composition, [gaussian(801, rank) for rank in range(4)], works)


def test_a_mask_that_did_not_come_off_is_found() -> None:
    here = a_cohort()
    mask = torch.randint(-(1 << 62), 1 << 62, here.words().shape, generator=torch.Generator().manual_seed(1))
    with pytest.raises(CanaryWrong, match="a mask was not removed"):
        totals(here.composition, here.levels(), here.words() + mask, here.ranks)


def test_the_sum_of_other_clients_is_found() -> None:
    here = a_cohort()
    with pytest.raises(CanaryWrong):
        totals(here.composition, here.levels(), here.words(), [0, 1, 2])
    three = Cohort(here.composition, here.contributions[:3])
    with pytest.raises(CanaryWrong):
        totals(here.composition, three.levels(), three.words(), here.ranks)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (1, 0),  # a weight that is not the samples'
        (2, -1),
        (2, 4001),
        (3, -1),
        (3, 5),
        (4, 3),
        (4, 13),  # more steps done than planned
        (5, 4 * STEPS_LIMIT + 1),
        (6, -1),
        (6, 4 * LEVEL_MAX * RMS_UNIT + 1),
        (7, -1),
        (7, 5),
        (N_COUNTS, -1),
        (N_COUNTS, 5),
        (N_COUNTS + 1, -1),
        (N_COUNTS + 1, 4001),
        (N_COUNTS + 2, 1 << 62),
        (N_COUNTS + 2, -(1 << 63)),
        (N_COUNTS + 3, 1 << 62),
        (N_COUNTS + 3, -(1 << 63)),
    ],
)
def test_sums_that_no_such_clients_have_are_refused(place: int, value: int) -> None:
    here = a_cohort()
    words = here.words()
    words[place] = value
    if place == 2:
        words[1] = value
    with pytest.raises(ImplausibleTotals, match="a client broke the protocol"):
        totals(here.composition, here.levels(), words, here.ranks)


@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2, 2], [0, 1, 2, 4], [-1, 0, 1, 2], []])
def test_clients_that_no_sum_may_have_are_refused(ranks: list[int]) -> None:
    here = a_cohort()
    with pytest.raises(TotalsRefused, match=f"the sum has {len(ranks)} ranks, .* allows 3 to 4 different"):
        totals(here.composition, here.levels(), here.words(), ranks)


def test_vectors_of_another_length_are_refused() -> None:
    here = a_cohort()
    with pytest.raises(ValueError, match="the words must have shape"):
        totals(here.composition, here.levels(), here.words()[1:], here.ranks)
    with pytest.raises(ValueError, match="the sum must have shape"):
        totals(here.composition, here.levels()[1:], here.words(), here.ranks)


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_what_is_shown_is_in_units_of_the_weighted_changes() -> None:
    composition = composed(secure_plan(4, weight_unit=10), step=1 / 64)
    changes = [gaussian(N_VALUES, rank) * 3 for rank in range(4)]
    shown = cohort(composition, changes, [work_of(20)] * 4).totals().shown
    assert shown.n_clients == 4
    assert shown.update_rms == pytest.approx(6, rel=0.03)
    assert 12 * 0.97 < shown.spread < 12 * 1.3  # of twelve blocks of 256, the greatest


def test_a_block_that_stands_out_is_what_is_shown() -> None:
    spike = torch.zeros(N_VALUES)
    spike[5] = 1000.0  # all in one block
    composition = composed(secure_plan(3))
    shown = cohort(composition, [spike] * 3, [work_of(1)] * 3).totals().shown
    block = composition.modular.rotated.blocks.size
    assert shown.spread == pytest.approx(3 * 1000 / math.sqrt(block), rel=1e-2)


def test_the_greatest_sums_are_squared_without_a_wrap() -> None:
    n_clients, level = 65_535, 3 * (1 << 29) - 1  # just below the edge of 32 bits
    composition = composed(secure_plan(n_clients), step=1.0)
    levels = torch.tensor([level, -level], dtype=torch.int32).repeat(composition.n_levels // 2)
    words = torch.zeros(composition.n_words, dtype=torch.int64)
    words[[0, 1, 2, 4, 5]] = n_clients
    assert totals(composition, levels, words, range(n_clients)).shown.spread == level


def test_noise_is_taken_off_what_is_shown() -> None:
    plan = replace(secure_plan(4), metrics=(), evaluation=(), noise=NoisePlan(10_000.0, 1 << 30, 4096, 3))
    composition = composed(plan, step=1.0)
    quiet = composed(replace(plan, noise=None), step=1.0)
    here = cohort(quiet, [gaussian(N_VALUES, rank) * 50 for rank in range(4)], [work_of(1)] * 4)
    noise = (gaussian(composition.n_levels, 9) * 200).round().to(torch.int32)
    shown = totals(composition, here.levels() + noise, here.words(), here.ranks).shown
    assert shown.spread == pytest.approx(100, rel=0.35)
    assert float(lift(here.levels() + noise, plan.bits).double().square().mean().sqrt()) > 215


@pytest.mark.parametrize(("own", "shown"), [((5, 0, 3), 3.5), ((0, 0, 0), None)])
def test_a_client_with_the_weight_0_has_the_metric_and_a_metric_without_weight_has_no_mean(
    own: tuple[int, ...], shown: float | None
) -> None:
    """The sum does not show which of three clients had something to measure."""
    plan = replace(secure_plan(3, 300, minimum=3), evaluation=("recall",))
    one = composed(plan, vector_layout(10))
    words = torch.zeros(one.n_words, dtype=torch.int64)
    levels = torch.zeros(one.n_levels, dtype=torch.int32)
    for i, weight in enumerate(own):
        metrics = {"recall": 2.0 + 4 * (i > 0)} if weight else {}
        work = replace(
            work_of(10), evaluation=metrics, evaluation_sample_count=7, evaluation_weights={"recall": weight}
        )
        made = contribution(one, nothing(one), work, bytes([i]) * 32)
        words += made.words
        levels += torch.cat(list(made.levels()))
    found = totals(one, levels, words, [0, 1, 2])
    assert found.measured_by["evaluation.recall"] == 3
    assert found.evaluation == ({} if shown is None else {"recall": shown})
