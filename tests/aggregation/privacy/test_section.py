"""[privacy] of a run file: what is refused and in which words, and the noise that follows from what is not."""

import math
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.privacy.accounting import Ledger
from umbel.aggregation.privacy.section import PrivacySection, release_of

ROUND: dict[str, Any] = {"rounds": 30, "least": 7, "n_values": 100_000, "inverse_step": 500.0, "clip_norm": 1.0}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "set exactly one of epsilon"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "set exactly one of epsilon"),
        ({"epsilon": 0.0}, "epsilon must lie between 0.01 and 100"),
        ({"epsilon": math.nan}, "epsilon must lie"),
        ({"epsilon": 1.0, "delta": 0.0}, "delta must lie"),
        ({"epsilon": 1.0, "delta": 0.5}, "delta must lie"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must lie"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must lie"),
        ({"epsilon": 1.0, "clip_norm": 0.0}, "clip_norm must lie"),
        ({"epsilon": 1.0, "colluders": -1}, "colluders must lie"),
    ],
    ids=lambda value: ",".join(value) or "nothing" if isinstance(value, dict) else "",
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PrivacySection(**given)


def test_a_key_that_is_misspelt_is_refused() -> None:
    with pytest.raises(ValidationError, match="epsilom"):
        TypeAdapter(PrivacySection).validate_python({"epsilom": 1.0})


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 4.0, 100.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.01])
def test_a_budget_lasts_for_all_rounds_of_the_run(epsilon: float, delta: float) -> None:
    plan = PrivacySection(epsilon=epsilon, delta=delta, colluders=3).plan(**ROUND)
    spent = Ledger(delta).after(release_of(plan), ROUND["rounds"]).epsilon
    assert 0.98 * epsilon < spent <= epsilon


def test_a_noise_multiplier_is_of_the_honest_clients_sum() -> None:
    plan = PrivacySection(noise_multiplier=2.0, colluders=3).plan(**ROUND)
    assert plan.variance_per_client * 4 == pytest.approx(4 * plan.bound_squared)
    assert (plan.least, plan.colluders, plan.n_values) == (7, 3, 100_000)


def test_the_noise_in_units_of_the_weights_hardly_depends_on_a_fine_step() -> None:
    section = PrivacySection(epsilon=4.0)
    std = list[float]()
    for inverse_step in (2e3, 8e3, 3.2e4):
        given: dict[str, Any] = {**ROUND, "inverse_step": inverse_step}
        std.append(math.sqrt(section.plan(**given).variance_per_client) / inverse_step)
    assert std[0] == pytest.approx(std[2], rel=0.01)
    assert std[0] >= std[1] >= std[2]


def test_more_colluders_than_the_smallest_sum_bears_are_refused() -> None:
    with pytest.raises(ValueError, match="one of the 7 clients in the smallest sum must be honest"):
        PrivacySection(epsilon=1.0, colluders=7).plan(**ROUND)


def test_the_clip_norm_is_said_once() -> None:
    section = PrivacySection(epsilon=1.0, clip_norm=2.0)
    assert section.clip(None) == section.clip(2.0) == 2.0
    assert PrivacySection(epsilon=1.0).clip(3.0) == 3.0
    with pytest.raises(ValueError, match="different values of clip_norm"):
        section.clip(3.0)
    with pytest.raises(ValueError, match="has no bound"):
        PrivacySection(epsilon=1.0).clip(None)
