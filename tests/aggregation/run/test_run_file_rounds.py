"""Overrides, coverage and self-tuning in the run file: merged as written, refused when it is read."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from umbel.aggregation.plans.round import CoverageFloor, TrainingPlan
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import DownlinkSection, Override, RoundsSection

FILES = TypeAdapter(RunFile)
ROUNDS = RoundsSection(count=10, target=8, minimum=4, window_s=600.0)


def run_file(*overrides: Override, training: TrainingPlan | None = None) -> RunFile:
    return RunFile("r", ROUNDS, training=training or TrainingPlan(), override=overrides)


def test_an_override_holds_for_its_rounds_only() -> None:
    file = run_file(Override(2, 3, target=6, window_s=60.0, learning_rate=0.5))
    plans = [file.round_plan(number, 1) for number in range(1, 5)]
    assert [(plan.target, plan.window_s, plan.minimum) for plan in plans] == [
        (8, 600.0, 4),
        (6, 60.0, 4),
        (6, 60.0, 4),
        (8, 600.0, 4),
    ]
    assert [file.training_plan(number).learning_rate for number in range(1, 5)] == [0.01, 0.5, 0.5, 0.01]


def test_of_several_the_last_counts_key_by_key() -> None:
    file = run_file(Override(1, target=6, minimum=2), Override(3, 4, target=5))
    assert [(p.target, p.minimum) for p in (file.round_plan(n, 1) for n in (1, 3, 5))] == [(6, 2), (5, 2), (6, 2)]


def test_steps_take_the_place_of_epochs_and_epochs_of_steps() -> None:
    file = run_file(Override(2, 2, local_steps=7), Override(3, 3, local_epochs=2))
    assert [(p.local_epochs, p.local_steps) for p in map(file.training_plan, (1, 2, 3))] == [
        (1, None),
        (None, 7),
        (2, None),
    ]
    stepped = run_file(Override(2, 2, local_epochs=3), training=TrainingPlan(local_steps=5))
    assert (stepped.training_plan(2).local_epochs, stepped.training_plan(2).local_steps) == (3, None)


def test_a_false_in_an_override_is_a_value() -> None:
    file = run_file(Override(2, evaluate=False), training=TrainingPlan(evaluate=True))
    assert [file.training_plan(number).evaluate for number in (1, 2)] == [True, False]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"first_round": 0, "target": 4}, "rounds from 1 on"),
        ({"first_round": 4, "last_round": 3, "target": 4}, "not 4 to 3"),
        ({"first_round": 1}, "changes nothing"),
        ({"first_round": 1, "local_epochs": 1, "local_steps": 1}, "not both"),
        ({"first_round": 11, "target": 4}, "beyond the last round, 10"),
        ({"first_round": 1, "last_round": 11, "target": 4}, "beyond the last round, 10"),
        ({"first_round": 5, "target": 3}, "with its overrides, round 5 cannot be planned: minimum must lie"),
        ({"first_round": 5, "learning_rate": -1.0}, "learning_rate must lie between 1e-12 and 1e.06, not -1.0"),
        ({"first_round": 5, "window_s": 0.0}, "window_s must lie between 0.1"),
        ({"first_round": 5, "weighting": "samples"}, "Unexpected keyword argument"),
    ],
)
def test_an_override_that_could_not_be_planned_is_refused_when_the_file_is_read(
    override: dict[str, Any], message: str
) -> None:
    rounds = {"count": 10, "target": 8, "minimum": 4}
    with pytest.raises(ValueError, match=message):
        FILES.validate_python({"name": "r", "rounds": rounds, "override": [override]})


def test_two_overrides_that_are_well_alone_are_refused_where_they_meet() -> None:
    with pytest.raises(ValueError, match="round 3 cannot be planned: minimum must lie between 1 and target = 3"):
        run_file(Override(1, 3, minimum=2), Override(2, 3, target=3), Override(3, minimum=4))


@given(
    st.lists(
        st.builds(
            lambda first, length, minimum: Override(first, min(first + length, 10), minimum=minimum),
            st.integers(1, 10),
            st.integers(0, 9),
            st.integers(1, 8),
        ),
        max_size=5,
    )
)
def test_every_round_of_an_accepted_file_can_be_planned(overrides: list[Override]) -> None:
    file = run_file(*overrides)
    for number in range(1, 11):
        assert file.round_plan(number, 1).minimum == next(
            (o.minimum for o in reversed(overrides) if o.covers(number)), ROUNDS.minimum
        )


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ({"window_min_s": 601.0}, "between 0 and window_s"),
        ({"window_min_s": -1.0}, "between 0 and window_s"),
        ({"attempts_max": 0}, "attempts_max must lie between 1 and"),
        ({"self_tuning": True, "weighting": "proportional"}, 'use weighting = "samples"'),
    ],
)
def test_rounds_that_make_no_sense_are_refused(rounds: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FILES.validate_python({"name": "r", "rounds": {"count": 1, "target": 8, "window_s": 600.0, **rounds}})


def test_a_run_file_reads_coverage_and_gives_it_to_every_plan() -> None:
    text = """
    name = "r"
    [rounds]
    count = 3
    target = 8
    attempts_max = 4
    [coverage]
    samples = 0.8
    sites = ["north"]
    tiers = ["hospital"]
    strict = true
    [[override]]
    first_round = 2
    target = 6
    """
    file = FILES.validate_python(tomllib.loads(text))
    assert file.round_plan(2, 3).coverage == CoverageFloor(0.8, ("north",), ("hospital",), True)  # type: ignore[arg-type]  # a literal is no ClientId
    assert FILES.validate_json(FILES.dump_json(file)) == file


@pytest.mark.parametrize("step", [0.0, 2.0**-9, 2.5, float("nan")])
def test_a_step_of_changes_that_cannot_work_is_refused(step: float) -> None:
    with pytest.raises(ValueError, match="step"):
        DownlinkSection("change", step)


def test_changes_are_made_only_where_the_run_file_asks_for_them() -> None:
    assert RunFile("a", RoundsSection(1, 1)).downlink.change_step is None
    assert RunFile("a", RoundsSection(1, 1), downlink=DownlinkSection("change", 0.5)).downlink.change_step == 0.5
