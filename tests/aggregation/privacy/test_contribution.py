"""What a client of a private round sends: within the bound whatever its update and the dither, and noise on top."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.federations.own_dithers import dither_of, secret_of
from umbel.aggregation.codec.modular import Modular
from umbel.aggregation.codec.rotated import Dither, Rotated, sum_of_squares
from umbel.aggregation.kernels.arguments import UNIT
from umbel.aggregation.plans.codec import Codec, CodecPlan, as_float32
from umbel.aggregation.plans.masks import NoisePlan
from umbel.aggregation.privacy.section import PrivacySection, noisy_bits
from umbel.aggregation.privacy.sensitivity import rounded_bound
from umbel.aggregation.privacy.skellam import Skellam, contribution, levels_within

KEY = bytes(range(32))


def rotated(n_values: int, inverse_step: float = 16.0, clip_norm: float | None = 1.0, key: int = 5) -> Rotated:
    return Rotated(CodecPlan(Codec.INTEGER, as_float32(inverse_step), key, clip_norm), n_values)


def update(n_values: int, norm: float, seed: int = 0) -> Tensor:
    values = torch.randn(n_values, generator=torch.Generator().manual_seed(seed))
    return values.mul_(norm / float(values.norm()))


def whole(bound: int, codec: Rotated, values: Tensor, rank: int = 0) -> Tensor:
    return torch.cat(list(levels_within(bound, codec, values, dither_of(rank)))).to(torch.int64)


@given(
    st.integers(1, 3000),
    st.floats(-20, 20),
    st.one_of(st.none(), st.floats(1e-3, 100)),
    st.integers(1, 10**6),
    st.integers(0, 50),
)
@settings(max_examples=60, deadline=None)
def test_no_update_and_no_dither_exceeds_the_bound(
    n_values: int, log_norm: float, clip_norm: float | None, bound: int, key: int
) -> None:
    codec = rotated(n_values, clip_norm=clip_norm, key=key)
    found = whole(bound, codec, update(n_values, 2.0**log_norm, key), rank=key)
    assert found.numel() == codec.n_levels
    assert int(found.square().sum()) <= bound


def test_an_update_that_is_within_it_is_left_as_it_is() -> None:
    codec, values = rotated(5000), update(5000, 1.0)
    bound = rounded_bound(16.0, codec.n_levels)
    levels = torch.cat(list(codec.levels_with(values, dither_of(3))))
    assert torch.equal(whole(bound, codec, values, 3), levels.to(torch.int64))


@pytest.mark.parametrize(("norm", "clip_norm"), [(0.7, None), (0.7, 50.0), (1e6, 0.7)])
def test_one_that_is_not_is_shortened_no_more_than_it_must(norm: float, clip_norm: float | None) -> None:
    codec, values = rotated(5000, inverse_step=1000.0, clip_norm=clip_norm), update(5000, norm)
    before = torch.cat(list(codec.levels_with(values, dither_of(0)))).to(torch.float64)
    bound = int(before.square().sum()) // 2
    found = whole(bound, codec, values).to(torch.float64)
    assert 0.9 * bound < float(found.square().sum()) <= bound
    assert float(torch.corrcoef(torch.stack([found, before]))[0, 1]) > 0.99


def test_of_what_rounding_takes_beyond_the_bound_all_the_same_nothing_is_left() -> None:
    """A dither that rounds every value up, which none of a client's own is likely to be."""
    codec, values = rotated(5000), update(5000, 1.0)
    bound = rounded_bound(16.0, codec.n_levels)

    def upwards(_first: int, length: int) -> Tensor:
        return torch.full((length,), UNIT - 1, dtype=torch.int32)

    assert sum(sum_of_squares(part) for part in codec.levels_with(values, upwards)) > bound
    assert not torch.cat(list(levels_within(bound, codec, values, upwards))).any()


def test_a_bound_that_is_enough_for_no_update_gets_next_to_nothing() -> None:
    codec, values = rotated(20_000, inverse_step=50.0), update(20_000, 1.0)
    assert int(whole(3, codec, values).square().sum()) <= 3


@pytest.mark.parametrize("share", [1.0, 0.5, 1e-3, 1e-9])
@pytest.mark.parametrize("norm", [0.0, 1e-3, 1.0, 1e6])
def test_the_passes_over_an_update_are_two_whatever_it_and_the_bound_are(
    norm: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator chooses the bound. More passes for longer updates would tell it how long one is."""
    codec, passes = rotated(5000), list[float]()
    values = update(5000, 1.0) * norm
    levels_with = Rotated.levels_with

    def counted(self: Rotated, values: Tensor, dither: Dither) -> Iterator[Tensor]:
        passes.append(self.plan.clip_norm or 0.0)
        return levels_with(self, values, dither)

    monkeypatch.setattr(Rotated, "levels_with", counted)
    bound = max(int(share * rounded_bound(16.0, codec.n_levels)), 1)
    assert int(whole(bound, codec, values).square().sum()) <= bound
    assert passes == [passes[0]] * 2, "over the same norm, which follows from the plan"
    assert (passes[0] == 1.0) is (share == 1.0)


def test_what_is_sent_is_the_levels_and_the_noise_of_the_key() -> None:
    codec, values = rotated(150_000), update(150_000, 1.0)
    assert len(list(codec.parts(values))) > 2
    plan = NoisePlan(9.0, rounded_bound(16.0, codec.n_levels), codec.n_levels, least=3)
    kept = values.clone()
    found = torch.cat(list(contribution(codec, values, dither_of(2), plan, KEY)))
    assert torch.equal(values, kept)
    levels = torch.cat(list(codec.levels_with(values, dither_of(2))))
    assert torch.equal(found, levels + Skellam(9.0).draw(KEY, 0, codec.n_levels))


def test_the_mean_of_a_round_is_that_of_its_updates_but_for_the_noise() -> None:
    n_clients, clip, inverse_step, n_values = 6, 1.0, 400.0, 20_000
    codec = rotated(n_values, inverse_step, clip)
    section = PrivacySection(noise_multiplier=0.2, colluders=1)
    plan = section.plan(rounds=1, least=4, n_values=codec.n_levels, inverse_step=inverse_step, clip_norm=clip)
    bits = noisy_bits(
        plan, inverse_step=inverse_step, sigma_sum=n_clients * clip / math.sqrt(n_values), n_clients=n_clients
    )
    modular = Modular(codec, bits)
    sums, updates = modular.new_sum(), [update(n_values, clip, seed) for seed in range(n_clients)]
    for rank, values in enumerate(updates):
        parts = contribution(codec, values, dither_of(rank), plan, secret_of(rank))
        for part in modular.packed([torch.cat(list(parts))]):
            modular.add(sums, part)
    error = modular.mean(sums, n_clients) - torch.stack(updates).mean(0)
    wanted = math.sqrt(n_clients * plan.variance_per_client) / (inverse_step * n_clients)
    assert float(error.std()) == pytest.approx(wanted, rel=0.03)
    assert modular.share_near_the_edge(sums) < 1e-4


def test_a_plan_for_another_model_is_refused() -> None:
    codec = rotated(100)
    plan = NoisePlan(1.0, 10, codec.n_levels + 1, least=3)
    with pytest.raises(ValueError, match="planned for"):
        next(contribution(codec, update(100, 1.0), dither_of(0), plan, KEY))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    codec, values = rotated(100), torch.full((100,), value)
    with pytest.raises(ValueError, match="norm"):
        whole(10, codec, values)
