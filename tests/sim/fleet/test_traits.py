"""How devices differ, and how each differs from itself."""

import numpy as np
import pytest
import torch

from tests.sim.fleet.sure import Floats, require_drawn
from umbel.sim.fleet.draws import Trait, log_normal

N = 50_000
DEVICES = np.arange(N)


def normal_below(values: Floats) -> Floats:
    below: Floats = torch.special.ndtr(torch.from_numpy(values)).numpy()
    return below


def test_devices_are_log_normal_around_the_median_and_each_around_its_own() -> None:
    trait = log_normal("step", 3, 2.0, 0.5, 0.2)
    usual, today = trait.usual(DEVICES), trait.today(DEVICES, 4, 1)
    require_drawn(normal_below(np.log(usual / 2.0) / 0.5))
    require_drawn(normal_below(np.log(today / usual) / 0.2))
    assert abs(np.corrcoef(np.log(usual), np.log(today / usual))[0, 1]) < 6.5 / np.sqrt(N)
    assert not np.array_equal(today, trait.today(DEVICES, 4, 2))


@pytest.mark.parametrize("tail", [0.7, 1.2, 3.0])
def test_a_tail_follows_the_law_of_pareto_with_that_median(tail: float) -> None:
    trait = Trait("step", 3, np.log([2.0]), np.zeros(1), np.zeros(1), tail=tail)
    usual = trait.usual(DEVICES)
    least = 2.0 * 2 ** (-1 / tail)
    assert usual.min() >= least
    require_drawn(1 - (least / usual) ** tail)


def test_without_spread_all_are_alike() -> None:
    assert set(log_normal("up", 1, 8.0, 0.0, 0.0).today(DEVICES, 1, 1).round(9)) == {8.0}


def test_what_is_known_of_each_device_begins_anew_beyond_the_last() -> None:
    trait = Trait("up", 1, np.log([1.0, 10.0]), np.zeros(2), np.zeros(2))
    assert trait.usual(np.array([0, 1, 2, 3, 1_000_001])).round(9).tolist() == [1.0, 10.0, 1.0, 10.0, 10.0]


def test_a_phone_drawn_by_chance_is_the_same_one_both_ways() -> None:
    entries = np.log(np.arange(1.0, 20.0))
    down, up = (Trait(name, 1, entries, np.zeros(19), np.zeros(19), is_drawn=True) for name in ("down", "up"))
    assert down.usual(DEVICES).tolist() == up.usual(DEVICES).tolist()
    require_drawn(down.usual(DEVICES).round() / 19 - np.random.default_rng(1).random(N) / 19)
