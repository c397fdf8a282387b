"""A client's side: what it masks is what it would have sent, and what must not be sent is refused."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.aggregation.secagg.house import (
    N_VALUES,
    Cohort,
    composed,
    gaussian,
    mean_of,
    pieces_of,
    secure_plan,
    sent,
    vector_layout,
    work_of,
)
from tests.federations.own_dithers import dither_of, secret_of
from tests.repository import VECTORS
from umbel.aggregation.errors import NonFiniteUpdate
from umbel.aggregation.kernels.packing import pack
from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.plans.codec import Codec
from umbel.aggregation.plans.masks import NoisePlan
from umbel.aggregation.privacy.skellam import Skellam
from umbel.aggregation.secagg.numbers.composition import METRIC_LIMIT, N_COUNTS, RMS_UNIT, Composition
from umbel.aggregation.secagg.numbers.contribution import (
    Contribution,
    ContributionRefused,
    LocalWork,
    contribution,
    nothing,
)
from umbel.aggregation.secagg.numbers.metric_sums import MetricSum
from umbel.aggregation.types import LEVEL_MAX
from umbel.aggregation.update.grid import fitting


def counts_of(made: Contribution) -> list[int]:
    return made.words[:N_COUNTS].tolist()


def measured_of(made: Contribution) -> list[MetricSum]:
    measured = made.composition.words.split(made.words)[1]
    return [*measured.training.by_name.values(), *measured.evaluation.by_name.values()]


def test_the_levels_are_those_that_would_go_without_a_mask() -> None:
    """The weighted change, rounded with the client's own dither, and the same ones whenever asked."""
    composition = composed(replace(secure_plan(5, weight_unit=10), bits=9))
    values = gaussian(N_VALUES, 1)
    made = sent(composition, values, work_of(25), rank=3)
    levels = torch.cat(list(made.levels()))
    assert torch.equal(levels, torch.cat(list(made.levels())))
    assert torch.equal(levels, torch.cat(list(composition.modular.residues(values * 2.5, dither_of(3)))))
    assert levels.dtype == torch.int32
    assert levels.numel() == composition.n_levels


def test_the_counts_say_what_was_done() -> None:
    composition = composed(secure_plan(5, weight_unit=10))
    values = gaussian(N_VALUES, 1)
    made = sent(composition, values, LocalWork(20, 4, 9), rank=0)
    rms = round(2 * float(values.double().square().mean().sqrt()) / 0.25 * RMS_UNIT)
    assert counts_of(made)[:6] == [1, 20, 20, 1, 4, 9]
    assert counts_of(made)[6] == pytest.approx(rms, rel=1e-6)
    assert counts_of(made)[7] == 0
    assert made.words.dtype == torch.int64
    assert made.words.shape == (composition.n_words,)


def test_a_change_is_clipped_before_it_is_weighed() -> None:
    composition = composed(secure_plan(5, weight_unit=2), clip_norm=0.5)
    made = sent(composition, gaussian(N_VALUES, 1), work_of(8), rank=0)
    assert float(made.values.norm()) == pytest.approx(0.5 * 4)
    short = sent(composition, gaussian(N_VALUES, 1) * 1e-3, work_of(8), rank=0)
    assert torch.equal(short.values, gaussian(N_VALUES, 1) * 1e-3 * 4)


def test_metrics_of_other_names_stay_at_the_client_and_missing_ones_count_nothing() -> None:
    composition = composed(secure_plan(5, metrics=("loss", "auc"), evaluation=("loss",)))
    work = LocalWork(10, 1, 1, {"loss": 0.25, "secret": 3.0}, {"loss": 2.0}, 4)
    loss, auc, evaluation = measured_of(sent(composition, torch.zeros(N_VALUES), work, 0))
    unit = 1 << composition.words.fraction_bits
    assert loss == MetricSum(1, 10, 10 * unit // 4)
    assert auc == MetricSum()
    assert evaluation == MetricSum(1, 4, 8 * unit)


def test_a_table_has_the_metrics_that_a_client_has_and_one_with_the_weight_zero_without_a_value() -> None:
    composition = composed(secure_plan(5, metrics="all", evaluation="all"))
    work = LocalWork(10, 1, 1, {"loss": 0.25, "recall": math.nan}, {"auc": 0.5}, 0, weights={"recall": 0, "dice": 0})
    measured = composition.words.split(sent(composition, torch.zeros(N_VALUES), work, 0).words)[1]
    unit = 1 << composition.words.fraction_bits
    nothing_measured = MetricSum(clients=1)
    assert measured.training.by_name == {
        "dice": nothing_measured,
        "loss": MetricSum(1, 10, 10 * unit // 4),
        "recall": nothing_measured,
    }
    assert measured.evaluation.by_name == {}, "there were no held-out samples"


def test_a_client_whose_policy_keeps_its_metrics_leaves_the_table_empty() -> None:
    composition = composed(secure_plan(5, metrics="all"))
    made = sent(composition, torch.zeros(N_VALUES), LocalWork(10, 1, 1), 0)
    assert not made.words[N_COUNTS:].any()
    assert made.words.shape == (composition.n_words,) == (N_COUNTS + 2880,)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e30, -METRIC_LIMIT - 1])
def test_a_metric_out_of_range_is_cut_and_counted(value: float) -> None:
    composition = composed(secure_plan(5, metrics=("loss",), evaluation=("loss",)))
    made = sent(composition, torch.zeros(N_VALUES), LocalWork(10, 1, 1, {"loss": value}), 0)
    assert composition.words.mean_of(measured_of(made)[0]) == math.copysign(METRIC_LIMIT, value)
    assert counts_of(made)[7] == 1


def test_a_metric_that_is_not_a_number_is_cut_and_counted_too() -> None:
    """Left out, it would show whose value is a number: a coordinator chooses the model that is measured."""
    composition = composed(secure_plan(5, metrics=("loss", "auc")))
    made = sent(composition, torch.zeros(N_VALUES), LocalWork(10, 1, 1, {"loss": math.nan}), 0)
    loss, auc = measured_of(made)
    assert (loss.clients, loss.samples, composition.words.mean_of(loss)) == (1, 10, METRIC_LIMIT)
    assert auc == MetricSum(), "nobody has said anything of it"
    assert counts_of(made)[7] == 1


def test_the_vastest_change_has_the_size_of_the_longest_that_is_not_cut() -> None:
    composition = composed(secure_plan(5), step=2.0**-20)
    made = sent(composition, gaussian(N_VALUES, 1) * 1e6, work_of(1), 0)
    assert counts_of(made)[6] == pytest.approx(LEVEL_MAX / 5 * RMS_UNIT, rel=0.2)
    assert int(torch.cat(list(made.levels())).abs().max()) < LEVEL_MAX


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (LocalWork(0, 3, 3), "trained on no samples"),
        (LocalWork(500, 0, 4711), "steps_done"),
        (LocalWork(500, 4711, 3), "steps_done"),
    ],
)
def test_work_that_must_not_be_sent_is_refused_without_a_number_of_it(work: LocalWork, says: str) -> None:
    with pytest.raises(ContributionRefused, match=says) as refusal:
        sent(composed(secure_plan(5), sample_count_max=1000), torch.zeros(N_VALUES), work, 0)
    assert "4711" not in str(refusal.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, N_VALUES - 1])
def test_a_change_that_is_not_finite_is_refused(value: float, place: int) -> None:
    values = torch.zeros(N_VALUES)
    values[place] = value
    with pytest.raises(NonFiniteUpdate):
        sent(composed(secure_plan(5), max_abs=1.0), values, work_of(1), 0)


# --- what is beyond a bound is no reason to refuse, for that would answer whoever has chosen the bound ----------------


@pytest.mark.parametrize(("n_samples", "counted"), [(999, 999), (1000, 1000), (1001, 1000), (4711, 1000)])
def test_samples_beyond_what_the_run_takes_do_not_count(n_samples: int, counted: int) -> None:
    composition = composed(secure_plan(5, metrics=("loss",)), sample_count_max=1000)
    made = sent(composition, torch.ones(N_VALUES), LocalWork(n_samples, 1, 1, {"loss": 0.5}), 0)
    assert counts_of(made)[1:3] == [counted, counted]
    assert measured_of(made)[0].samples == counted
    assert torch.equal(made.values, torch.full((N_VALUES,), float(counted))), "it weighs as much as it says"


def test_a_change_with_values_beyond_max_abs_is_shortened_whole_and_the_clients_own_log_can_say_so() -> None:
    composition = composed(secure_plan(5), max_abs=1.0)
    values = torch.linspace(-2.0, 2.0, N_VALUES)
    made = sent(composition, values, work_of(1), 0)
    assert torch.allclose(made.values, values / 2)
    (remark,) = made.remarks
    assert "beyond the run's max_abs 1, so the whole update is shortened" in remark
    within = sent(composition, values / 2, work_of(1), 0)
    assert not within.remarks
    assert torch.equal(within.values, values / 2)


@pytest.mark.parametrize("clip_norm", [None, 8.0])
def test_what_is_shortened_to_max_abs_is_clipped_and_measured_as_short_as_it_then_is(clip_norm: float | None) -> None:
    composition = composed(secure_plan(5), step=0.001, max_abs=1.0, clip_norm=clip_norm)
    values = gaussian(N_VALUES, 1) * 10
    norm = float(values.norm() / values.abs().max())
    assert norm > 8.0
    made = sent(composition, values, work_of(3), 0)
    assert float(made.values.norm()) == pytest.approx(3 * (clip_norm or norm), rel=1e-5)
    assert counts_of(made)[6] == pytest.approx(
        3 * (clip_norm or norm) / math.sqrt(N_VALUES) / 0.001 * RMS_UNIT, rel=1e-3
    )


@pytest.mark.parametrize("max_abs", [0.1, 1 / 3, 2.0**-64, 2.0**64])
def test_what_is_shortened_is_within_max_abs_also_where_that_is_no_float32(max_abs: float) -> None:
    grid = composed(secure_plan(5), max_abs=max_abs).grid
    for greatest in (3.0e38, max_abs * 1.5):
        values = torch.tensor([greatest, -greatest, 0.0])
        divisor, most = fitting(float(values[0]), grid)
        values.div_(divisor).mul_(most)
        assert max_abs * (1 - 2.0**-23) <= float(values[0]) <= max_abs
        assert values.tolist() == [float(values[0]), -float(values[0]), 0.0]
        assert fitting(float(values[0]), grid) == (1.0, 1.0)


def test_exact_values_are_shortened_with_the_others() -> None:
    composition = composed(secure_plan(5), MIXED, max_abs=4.0)
    change = torch.full((MIXED.n_values,), 5.0)
    change[705] = 8.0  # of an exact tensor, and the greatest of all
    made = sent(composition, change, work_of(7), 1)
    assert torch.allclose(made.values[:700], torch.full((700,), 2.5 * 7))
    shortened = [2.5] * 5 + [4.0] + [2.5] * 2
    assert made.words[-8:].tolist() == [round(one * 7 / composition.grid.step) for one in shortened]


@pytest.mark.parametrize(("rms", "is_said"), [(6500.0, False), (6600.0, True)])
@pytest.mark.parametrize("n_set", [N_VALUES, 16], ids=["all over", "in one block"])
def test_where_the_step_is_so_fine_that_levels_would_be_cut_the_change_is_shortened_and_the_client_told(
    rms: float, n_set: int, is_said: bool
) -> None:
    """The longest block decides, for each is rotated by itself."""
    composition = composed(secure_plan(5))
    blocks, change = composition.modular.rotated.blocks, torch.zeros(N_VALUES)
    n_here = n_set if n_set < N_VALUES else blocks.size
    change[:n_set] = rms * math.sqrt(blocks.size / n_here) / composition.codec.inverse_step
    made = sent(composition, change, work_of(composition.secure.weight_unit), 0)
    assert any("so fine that this update is shortened" in remark for remark in made.remarks) is is_said
    for remark in made.remarks:  # the honest cause and its remedy are named before the suspicion
        assert remark.index("a running statistic or a counter") < remark.index("codec.first_norm")
        assert remark.index("codec.first_norm") < remark.index("would show how large this update is")
    assert torch.allclose(made.values, change * (LEVEL_MAX / 5 / rms if is_said else 1.0))
    assert int(torch.cat(list(made.levels())).abs().max()) < LEVEL_MAX


def test_a_change_beyond_all_numbers_is_shortened() -> None:
    composition = composed(secure_plan(5), max_abs=2.0**60, step=2.0**50)
    made = sent(composition, torch.full((N_VALUES,), 2.0**50), work_of(1 << 20), 0)
    assert 2.0**59 < float(made.values.norm()) <= 2.0**60
    assert "far too large" in made.remarks[0]
    assert sum(part.numel() for part in made.levels()) == composition.n_levels


def test_each_reason_to_shorten_a_change_is_said() -> None:
    made = sent(composed(secure_plan(5), max_abs=2.0**60), torch.full((N_VALUES,), 2.0**61), work_of(1 << 20), 0)
    for remark, words in zip(made.remarks, ["max_abs", "far too large", "so fine"], strict=True):
        assert words in remark


# --- private rounds: nothing is refused -------------------------------------------------------------------------------

SECRET = bytes(range(32))


def private(clip_norm: float | None = 1.0, step: float = 0.01, bound_squared: int = 20_000) -> Composition:
    n_levels = composed(secure_plan(5)).n_levels
    noise = NoisePlan(2.0**-20, bound_squared, n_levels, least=3, colluders=1)
    return composed(replace(secure_plan(5), noise=noise), step=step, clip_norm=clip_norm, max_abs=2.0**-64)


def of_private_round(composition: Composition, values: Tensor) -> tuple[Contribution, Tensor]:
    """What a client contributes of this change, and its levels without noise."""
    made = contribution(composition, lambda: pieces_of(values), work_of(1), SECRET, is_covered=True)
    assert composition.secure.noise is not None
    noise = Skellam(composition.secure.noise.variance_per_client).draw(SECRET, 0, composition.n_levels)
    return made, torch.cat(list(made.levels())) - noise


ODD_VALUES = {
    "not a number": math.nan,
    "infinite": math.inf,
    "minus infinity": -math.inf,
    "1e30": 1e30,
    "the greatest float32": 3.4028234e38,
    "denormal": 1e-45,
    "beyond max_abs": 0.5,
}


@pytest.mark.parametrize("everywhere", [False, True], ids=["one value", "all values"])
@pytest.mark.parametrize("clip_norm", [None, 2.0**-60, 1.0, 2.0**60])
@pytest.mark.parametrize("step", [2.0**-99, 0.01, 2.0**99])
@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES.keys())
def test_whatever_the_values_are_a_private_round_gets_levels_within_the_bound(
    value: float, step: float, clip_norm: float | None, everywhere: bool
) -> None:
    """Also where the coordinator has chosen a clip norm and a step at the ends of what a plan may say."""
    values = torch.full((N_VALUES,), value) if everywhere else torch.zeros(N_VALUES)
    values[N_VALUES // 2] = value
    composition = private(clip_norm, step)
    made, levels = of_private_round(composition, values)
    assert composition.secure.noise is not None
    assert int(levels.to(torch.int64).square().sum()) <= composition.secure.noise.bound_squared
    assert counts_of(made) == [1, 1, 1, 0, 1, 1, 0, 0], "what every client of a private round says"
    if not math.isfinite(value):
        assert not levels.any()
        assert "not finite, so zeros and noise are sent" in made.remarks[0]


def test_a_long_change_in_a_private_round_keeps_its_direction() -> None:
    """It is clipped as any other is, not thrown away: 1e30 in one value is a spike of the clip norm."""
    values = torch.zeros(N_VALUES)
    values[7] = 1e30
    _, levels = of_private_round(private(bound_squared=40_000), values)
    spike = torch.zeros(N_VALUES)
    spike[7] = 1.0
    _, expected = of_private_round(private(bound_squared=40_000), spike)
    assert levels.any()
    assert torch.equal(levels, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_under_noise_that_it_does_not_rely_on_a_client_sends_no_zeros(value: float) -> None:
    """With next to no noise, zeros would thin the sum out as in any other round."""
    with pytest.raises(NonFiniteUpdate):
        sent(private(), torch.full((N_VALUES,), value), work_of(1), 0)


def test_a_client_whose_training_has_failed_contributes_noise_alone() -> None:
    composition = private()
    made = contribution(composition, nothing(composition), work_of(1), SECRET, is_covered=True)
    _, levels = of_private_round(composition, torch.zeros(N_VALUES))
    assert not made.values.any()
    assert not levels.any()


def test_a_private_round_takes_no_model_with_values_that_would_have_no_noise() -> None:
    of_mixed = replace(private(), layout=MIXED)
    with pytest.raises(ValueError, match=r"cannot add noise to integer tensors or running statistics.*b\.running_mean"):
        contribution(of_mixed, nothing(of_mixed), work_of(1), SECRET, is_covered=True)


@pytest.mark.parametrize("n_values", [N_VALUES - 1, N_VALUES + 1, N_VALUES + 2])
def test_a_change_of_another_length_is_refused(n_values: int) -> None:
    with pytest.raises(ValueError, match="values"):
        sent(composed(secure_plan(5)), torch.zeros(n_values), work_of(1), 0)


def test_plans_that_do_not_fit_each_other_are_refused() -> None:
    good = composed(secure_plan(5))
    with pytest.raises(ValueError, match="not the codec float32"):
        replace(good, codec=replace(good.codec, codec=Codec.FLOAT32))
    with pytest.raises(ValueError, match="more than the grid's total_weight_max"):
        replace(good, secure=secure_plan(6))
    with pytest.raises(ValueError, match="clients cannot check how often each was drawn"):
        replace(good, secure=replace(good.secure, is_proportional=True))
    with pytest.raises(ValueError, match="more than 2\\^38"):
        replace(good.words, sample_count_max=1 << 37)


def test_nothing_of_a_client_is_in_a_repr() -> None:
    work = LocalWork(31337, 31338, 31339, {"loss": 31340.0}, {"loss": 31341.0}, 31342)
    made = sent(composed(secure_plan(5)), torch.full((N_VALUES,), 31343.0), work, 0)
    assert "3134" not in repr(work) + repr(made)
    assert "3133" not in repr(work) + repr(made)


# --- exact tensors ----------------------------------------------------------------------------------------------------

MIXED = Layout(
    (
        TensorSpec("a.weight", (700,), "float32", 0),
        TensorSpec("b.running_mean", (5,), "float32", 700),
        TensorSpec("c.steps", (), "int64", 705),
        TensorSpec("d.weight", (300,), "bfloat16", 706),
        TensorSpec("e.is_on", (2,), "bool", 1006),
    )
)


def test_what_may_not_be_rounded_travels_among_the_words() -> None:
    composition = composed(secure_plan(5), MIXED, max_abs=64.0)
    values = gaussian(MIXED.n_values, 2)
    made = sent(composition, values, work_of(7), 1)
    places = [*range(700, 706), 1006, 1007]
    assert made.words[-8:].tolist() == [round(float(values[i]) / composition.grid.step) * 7 for i in places]
    assert not made.values[places].any()
    others = [i for i in range(MIXED.n_values) if i not in places]
    assert torch.equal(made.values[others], values[others] * 7)


@pytest.mark.parametrize("size", [1, 3, 699, 703, 5000])
def test_the_pieces_of_a_change_may_have_any_length(size: int) -> None:
    composition, values = composed(secure_plan(5), MIXED, max_abs=64.0), gaussian(MIXED.n_values, 2)

    def change() -> Iterator[Tensor]:
        return pieces_of(values, size)

    made, whole = contribution(composition, change, work_of(7), secret_of(1)), sent(composition, values, work_of(7), 1)
    assert torch.equal(made.words, whole.words)
    assert torch.equal(made.values, whole.values)


# --- frozen -----------------------------------------------------------------------------------------------------------


def test_the_integers_of_two_clients_are_those_that_are_published() -> None:
    """`tests/vectors/contribution.json`: for other languages."""
    vector: dict[str, Any] = json.loads((VECTORS / "contribution.json").read_text())
    layout = Layout.from_json(vector["layout_json"])
    plan = secure_plan(
        vector["clients_max"],
        vector["weight_unit"],
        metrics=tuple(vector["metrics"]),
        evaluation=tuple(vector["evaluation"]),
    )
    composition = composed(
        replace(plan, bits=vector["bits"]),
        layout,
        step=vector["step"],
        key=vector["key"],
        sample_count_max=vector["sample_count_max"],
        max_abs=vector["max_abs"],
    )
    contributions = list[Contribution]()
    for client in vector["clients"]:
        change = torch.tensor(client["change"], dtype=torch.float32)
        secret = bytes.fromhex(client["secret_hex"])
        made = contribution(composition, partial(pieces_of, change), LocalWork(**client["work"]), secret)
        contributions.append(made)
        assert made.words.tolist() == client["words"]
        assert pack(torch.cat(list(made.levels())), vector["bits"]).numpy().tobytes().hex() == client["levels_hex"]
    total = Cohort(composition, contributions).totals()
    assert total.sum_sha256 == vector["sum_sha256"]
    assert [value.hex() for value in mean_of(total, layout.n_values).tolist()] == vector["mean"]


def test_what_a_round_costs_beyond_the_levels() -> None:
    """Words of eight bytes: eight, and three for each metric."""
    composition = composed(
        secure_plan(100, metrics=("loss", "accuracy"), evaluation=("loss", "accuracy")), vector_layout(199_210)
    )
    assert 8 * composition.n_words == 160
    assert composition.n_levels / 199_210 < 1.01
