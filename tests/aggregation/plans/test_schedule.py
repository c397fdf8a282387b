"""The learning rate over the rounds is that of the papers, and of torch's schedulers."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from umbel.aggregation.plans.schedule import RatePlan, RateSchedule

N_ROUNDS = 20


def rates(schedule: RateSchedule, n_rounds: int = N_ROUNDS, target: int = 10) -> list[float]:
    plan = RatePlan(schedule, 0.5, n_rounds, target)
    return [plan.rate(number) for number in range(1, n_rounds + 1)]


def of_torch(kind: type, **arguments: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], 0.5)
    schedule, found = kind(optimizer, **arguments), list[float]()
    for _ in range(N_ROUNDS):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_steps_are_torchs() -> None:
    assert rates(RateSchedule("step", every=4, factor=0.3)) == pytest.approx(of_torch(StepLR, step_size=4, gamma=0.3))
    assert rates(RateSchedule("step", every=7)) == pytest.approx(of_torch(StepLR, step_size=7, gamma=0.1))


@pytest.mark.parametrize("final", [0.0, 0.25])
def test_the_cosine_is_torchs(final: float) -> None:
    ours = rates(RateSchedule("cosine", final=final))
    assert ours == pytest.approx(of_torch(CosineAnnealingLR, T_max=N_ROUNDS, eta_min=0.5 * final), abs=1e-9)


def test_a_warm_up_rises_in_equal_parts_and_the_schedule_begins_after_it() -> None:
    warm = rates(RateSchedule("cosine", warm_up_rounds=5))
    assert warm[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert warm[5:] == rates(RateSchedule("cosine"), N_ROUNDS - 5)


def test_the_rate_grows_with_the_cohort() -> None:
    schedule = RateSchedule(per_clients=10)
    assert rates(schedule, 1, 10) == [0.5]
    assert rates(schedule, 1, 40) == [2.0]


@given(st.integers(1, 1000), st.floats(-1e-15, 1e-15))
def test_a_rate_of_another_machine_is_recognized_and_another_rate_is_not(number: int, error: float) -> None:
    plan = RatePlan(RateSchedule("cosine", final=0.1), 0.3, 1000, 10)
    rate = plan.rate(number)
    assert plan.gives(float(f"{rate * (1 + error):.9g}"), number)
    assert not plan.gives(rate * (1 + 1e-6), number)
    assert not replace(plan, learning_rate=0.31).gives(rate, number)


def test_a_constant_rate_is_the_files() -> None:
    assert rates(RateSchedule()) == [0.5] * N_ROUNDS


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"name": "step"}, "needs `every`"),
        ({"every": 3}, '`every` is for name = "step"'),
        ({"name": "cosine", "factor": 0.5}, '`factor` is for name = "step"'),
        ({"name": "step", "every": 1, "final": 0.5}, '`final` is for name = "cosine"'),
        ({"name": "step", "every": 0}, "every must lie between 1"),
        ({"name": "cosine", "final": math.nan}, "final must lie between 0"),
        ({"warm_up_rounds": -1}, "warm_up_rounds must lie between 0"),
        ({"per_clients": 0}, "per_clients must lie between 1"),
    ],
)
def test_a_schedule_that_means_nothing_is_refused(keys: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RateSchedule(**keys)  # type: ignore[arg-type]
