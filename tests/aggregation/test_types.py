"""A bad value cannot exist: what the nouns of a round refuse, and seeds that are the same in every language."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.counts import COUNT_MAX
from umbel.aggregation.plans.assignment import assignment_id
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import METRICS_MAX, ClientId, RunId, require_slug

PLAN = RoundPlan(RunId("demo"), 1, 1, 8, 4, 1.25, 600.0, Weighting.SAMPLES, 1 << 20, 64.0, seed=7)
WORK = WorkDone(10, 4, 4, "0" * 64)


@pytest.mark.parametrize(
    "change",
    [
        {"run": "Demo"},
        {"run": "a.b"},
        {"number": 0},
        {"attempt": 0},
        {"target": 0},
        {"target": 3},
        {"target": (1 << 20) + 1},
        {"target": 10**400},
        {"minimum": 0},
        {"minimum": 9},
        {"over_selection": 0.99},
        {"over_selection": 10.1},
        {"over_selection": math.nan},
        {"over_selection": math.inf},
        {"window_s": 0.0},
        {"window_s": math.inf},
        {"window_s": math.nan},
        {"sample_count_max": 0},
        {"sample_count_max": (1 << 40) + 1},
        {"sample_count_max": 1 << 40},  # ten of these leave no bits for the values
        {"max_abs": 0.0},
        {"max_abs": math.inf},
        {"max_abs": math.nan},
        {"max_abs": 1e300},
    ],
)
def test_a_round_plan_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must lie|must be|count from|must add up"):
        replace(PLAN, **change)


def test_the_bound_on_weights_counts_samples_or_draws() -> None:
    assert PLAN.n_wanted == 10
    assert PLAN.total_weight_max == 10 << 20
    assert replace(PLAN, weighting=Weighting.PROPORTIONAL).total_weight_max == 10
    assert replace(PLAN, over_selection=1.1, target=10, minimum=1).n_wanted == 11  # 10 * 1.1 > 11 in floats


@pytest.mark.parametrize(
    "change",
    [
        {"local_epochs": 1, "local_steps": 1},
        {"local_epochs": 0},
        {"local_steps": 0},
        {"local_steps": (1 << 31) + 1},
        {"batch_size": 0},
        {"learning_rate": 0.0},
        {"learning_rate": math.inf},
        {"proximal_mu": -0.1},
        {"proximal_mu": math.nan},
    ],
)
def test_a_training_plan_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|not both"):
        TrainingPlan(**change)


def test_a_training_plan_asks_one_epoch_unless_told_otherwise() -> None:
    assert TrainingPlan().local_epochs == 1
    assert TrainingPlan(local_steps=5).local_epochs is None


@pytest.mark.parametrize(
    "change",
    [
        {"sample_count": 0},
        {"sample_count": (1 << 40) + 1},
        {"steps_done": 0},
        {"steps_done": 5},
        {"steps_planned": 1 << 63},
        {"update_sha256": "0" * 63},
        {"update_sha256": "A" * 64},
        {"update_sha256": "0" * 64 + "\n"},
        {"train_s": -1.0},
        {"train_s": math.nan},
        {"evaluation_sample_count": -1},
        {"evaluation": {"accuracy": 0.5}},
        {"metrics": {"loss": math.nan}},
        {"metrics": {"loss": math.inf}},
        {"metrics": {"a b": 0.0}},
        {"metrics": {"": 0.0}},
        {"metrics": {"x" * 65: 0.0}},
        {"metrics": {f"m{i}": 0.0 for i in range(METRICS_MAX + 1)}},
        {"evaluation_counts": {"n": (1,)}},
        {"counts": {"n": (-1,)}},
        {"counts": {"n": ()}},
        {"counts": {"a b": (1,)}},
        {"evaluation_counts": {"n": (COUNT_MAX + 1,)}, "evaluation_sample_count": 1},
    ],
)
def test_work_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        replace(WORK, **change)


def test_fewer_steps_than_planned_are_partial_work() -> None:
    assert not WORK.is_partial
    assert replace(WORK, steps_done=1).is_partial


@pytest.mark.parametrize("slug", ["a", "0", "ward-7", "a_b", "x" * 63])
def test_a_slug_is_accepted(slug: str) -> None:
    require_slug(slug, "name")


@given(st.text().filter(lambda text: not (text.isascii() and text.replace("-", "").replace("_", "").isalnum())))
def test_what_cannot_stand_in_a_url_is_no_slug(text: str) -> None:
    with pytest.raises(ValueError, match="name must be 1 to 63"):
        require_slug(text, "name")


@pytest.mark.parametrize("text", ["", "-a", "_a", "A", "a.b", "a/b", "a\n", "x" * 64, "../a"])
def test_near_slugs_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="name must be"):
        require_slug(text, "name")


def test_an_assignment_is_named_by_run_round_attempt_and_client() -> None:
    assert assignment_id(RunId("demo"), 3, 1, ClientId("ward-7")) == "demo.3.1.ward-7"


def test_seeds_differ_by_parent_and_by_every_label() -> None:
    seeds = {derive_seed(7), derive_seed(8), derive_seed(7, "a"), derive_seed(7, "a", 1), derive_seed(7, 1, "a")}
    assert len(seeds) == 5
    assert all(0 <= seed < 1 << 63 for seed in seeds)
