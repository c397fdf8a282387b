"""Clients' inputs differ as asked for, and each client sees the same whenever and with whomever it is asked."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.data.populations import population
from umbel.sim.data.data_set import SampleSet, TrainAndTest
from umbel.sim.data.partition.feature_skew import FeaturesSection, GrowingNoise, Rotation, transform_of, turned
from umbel.sim.data.partition.partition import Partition, Transform, shards_of, with_holdouts
from umbel.sim.data.population import ShardedPopulation

N, SIDE = 60, 6
TRAIN = SampleSet(torch.rand(N, SIDE * SIDE, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 4)
TEST = SampleSet(torch.zeros(3, SIDE * SIDE), torch.zeros(3, dtype=torch.int64))
SHARDS = shards_of(np.random.default_rng(0).integers(0, 8, N), 8)
transforms = st.sampled_from([GrowingNoise(0.3, 8, 5), Rotation(90.0, 4), Rotation(25.0, 14)])


def _population(transform: Transform | None) -> ShardedPopulation:
    return population(TrainAndTest(TRAIN, TEST), with_holdouts(Partition(SHARDS), 0.3, 1), transform)


@given(transforms, st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True), st.booleans())
def test_a_client_sees_the_same_whoever_is_asked_with_it(
    transform: Transform, clients: list[int], is_held_back: bool
) -> None:
    made = _population(transform)
    ask = made.holdout_of if is_held_back else made.data_of
    together = ask(np.array(clients))
    assert together is not None
    for position, client in enumerate(clients):
        alone = ask(np.array([client]))
        assert alone is not None
        assert torch.equal(together.of(position).inputs, alone.of(0).inputs)
        assert torch.equal(together.of(position).targets, alone.of(0).targets)


@given(transforms)
def test_the_data_set_itself_stays_as_it_is(transform: Transform) -> None:
    before = TRAIN.inputs.clone()
    made = _population(transform)
    made.data_of(np.arange(8))
    made.holdout_of(np.arange(8))
    assert torch.equal(TRAIN.inputs, before)
    assert made.test is TEST


def test_the_variance_of_the_noise_grows_up_to_the_last_client() -> None:
    inputs, starts = torch.zeros(5 * 200, 10, 10), np.arange(6) * 200
    noise = GrowingNoise(0.5, 5, 1)(inputs, np.arange(5), starts, are_held_back=False).view(5, -1)
    assert noise.mean(1).abs().max() < 0.02
    assert noise.var(1).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5], rel=0.05)
    assert abs(float(torch.corrcoef(noise)[3, 4])) < 0.03, "each client has its own"


def test_training_data_and_holdouts_have_their_own_noise_and_so_have_seeds() -> None:
    def noise(seed: int, *, are_held_back: bool) -> torch.Tensor:
        inputs = torch.zeros(3, 4)
        return GrowingNoise(1.0, 9, seed)(inputs, np.array([2]), np.array([0, 3]), are_held_back=are_held_back)

    first = noise(1, are_held_back=False)
    assert torch.equal(first, noise(1, are_held_back=False))
    assert not torch.isclose(first, noise(1, are_held_back=True)).any()
    assert not torch.isclose(first, noise(2, are_held_back=False)).any()


@pytest.mark.parametrize("shape", [(SIDE * SIDE,), (SIDE, SIDE), (1, SIDE, SIDE), (3, SIDE, SIDE)])
def test_client_k_holds_its_images_turned_k_times(shape: tuple[int, ...]) -> None:
    inputs = torch.rand(5, *shape, generator=torch.Generator().manual_seed(3))
    images = inputs.clone().view(5, -1, SIDE, SIDE)
    clients, starts = np.array([0, 1, 6, 7]), np.array([0, 1, 3, 4, 5])
    seen = Rotation(90.0, 4)(inputs, clients, starts, are_held_back=False)
    assert seen.shape == (5, *shape)
    quarters = [0, 1, 1, 2, 3]
    for image, before, n_quarters in zip(seen.view(5, -1, SIDE, SIDE), images, quarters, strict=True):
        assert torch.equal(image, torch.rot90(before, n_quarters, dims=(1, 2)))


@pytest.mark.parametrize("degrees", [90.0, 180.0, 270.0])
def test_images_turned_by_interpolation_turn_the_same_way_as_those_turned_by_quarters(degrees: float) -> None:
    images = torch.rand(4, 2, 9, 9, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(turned(images, degrees + 1e-4), turned(images, degrees), atol=1e-3)


def test_an_image_turned_by_a_third_three_times_is_nearly_itself() -> None:
    x, y = torch.meshgrid(torch.linspace(-1, 1, 41), torch.linspace(-1, 1, 41), indexing="ij")
    blob = torch.exp(-((x - 0.3) ** 2 + (y + 0.2) ** 2) / 0.02)[None, None]
    once = turned(blob, 120.0)
    assert float((once - blob).abs().max()) > 0.5
    assert torch.allclose(turned(turned(once, 120.0), 120.0), blob, atol=0.15)


@pytest.mark.parametrize(
    ("transform", "inputs"),
    [
        (GrowingNoise(1.0, 8, 0), torch.zeros(N, 80, dtype=torch.int64)),
        (Rotation(90.0, 4), torch.zeros(N, 13)),
        (Rotation(90.0, 4), torch.zeros(N, 1, 6, 8)),
        (Rotation(90.0, 4), torch.zeros(N, 36, dtype=torch.uint8)),
    ],
)
def test_inputs_that_cannot_be_changed_are_refused_when_the_population_is_made(
    transform: Transform, inputs: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=r"these inputs are|can be rotated"):
        population(TrainAndTest(SampleSet(inputs, TRAIN.targets), TEST), Partition(SHARDS), transform)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"kind": "noise"}, "needs variance"),
        ({"kind": "rotation"}, "needs angle"),
        ({"kind": "noise", "variance": 1.0, "angle": 3.0}, 'angle is for kind = "rotation"'),
        ({"kind": "noise", "variance": 1.0, "turns": 3}, 'turns is for kind = "rotation"'),
        ({"kind": "noise", "variance": -1.0}, "variance must lie between"),
        ({"kind": "rotation", "angle": 361.0}, "angle must lie between"),
        ({"kind": "rotation", "angle": 1.0, "turns": 0}, "turns must lie between"),
    ],
)
def test_features_without_their_number_or_with_anothers_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        FeaturesSection(**options)


def test_as_many_turns_as_make_a_full_one_unless_they_are_given() -> None:
    assert transform_of(FeaturesSection("rotation", angle=90.0), 9, 0) == Rotation(90.0, 4)
    assert transform_of(FeaturesSection("rotation", angle=100.0), 9, 0) == Rotation(100.0, 3)
    assert transform_of(FeaturesSection("rotation", angle=10.0, turns=2), 9, 0) == Rotation(10.0, 2)
    assert transform_of(FeaturesSection("noise", variance=0.25), 9, 7) == GrowingNoise(0.25, 9, 7)
