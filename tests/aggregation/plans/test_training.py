"""What a round asks of local training: the optimizer, the rate of the round, and the run's own options."""

import math
from typing import Any

import pytest
from pydantic import TypeAdapter

from umbel.aggregation.canonical import canonical
from umbel.aggregation.plans.schedule import RateSchedule
from umbel.aggregation.plans.training import TrainingPlan, TrainingSection
from umbel.aggregation.run.file import RunFile

_FILES: TypeAdapter[RunFile] = TypeAdapter(RunFile)


def read(**training: Any) -> RunFile:
    return _FILES.validate_python({"name": "r", "rounds": {"count": 10, "target": 4}, "training": training})


def test_a_plan_without_the_later_keys_has_the_text_that_it_had_before_them() -> None:
    assert canonical(TrainingPlan()) == (
        '{"batch_size":32,"evaluate":false,"learning_rate":0.01,"local_epochs":1,"local_steps":null,"proximal_mu":0}'
    )
    assert canonical(read().training) == canonical(TrainingPlan())


def test_the_plan_of_a_round_has_its_own_rate_and_the_schedule_that_gave_it() -> None:
    file = read(learning_rate=0.4, schedule={"name": "step", "every": 2, "factor": 0.5})
    plans = [file.training_plan(number) for number in (1, 2, 3, 5)]
    assert [plan.learning_rate for plan in plans] == [0.4, 0.4, 0.2, 0.1]
    assert {plan.rate_plan for plan in plans} == {plans[0].rate_plan}
    assert plans[0].rate_plan is not None
    assert plans[0].rate_plan.schedule == RateSchedule("step", 2, 0.5)


def test_an_override_of_the_rate_is_scheduled_too() -> None:
    text = {"name": "r", "rounds": {"count": 10, "target": 4}, "override": [{"first_round": 3, "learning_rate": 0.8}]}
    file = _FILES.validate_python({**text, "training": {"schedule": {"name": "step", "every": 2, "factor": 0.5}}})
    assert [file.training_plan(number).learning_rate for number in (2, 3, 5)] == [0.01, 0.4, 0.2]


def test_options_are_scalars_and_keep_their_types() -> None:
    options = {"stage": "head\n\tonly é", "augment": True, "n": 3, "rate": 1.0}
    found = read(options=options).training_plan(1).options
    assert dict(found) == options
    assert [type(value) for value in found.values()] == [str, bool, int, float]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"a": [1]}, "options"),
        ({"a": None}, "options"),
        ({"a": math.inf}, "the option a must be finite"),
        ({"a": 1 << 53}, r"the option a must lie within \+-\(2\^53 - 1\)"),
        ({"a": "x" * 1025}, "at most 1024 characters, not 1025"),
        ({"a": "head\x1b[31m"}, r"the option a must have no control characters, such as '\\x1b'"),
        ({"a": "head\u202e"}, "must have no control characters"),
        ({"": 1}, "must be 1 to 63 letters"),
        ({"1st": 1}, "must be 1 to 63 letters"),
        ({f"k{i}": 1 for i in range(65)}, "at most 64 keys, not 65"),
        ({f"k{i}": "x" * 1024 for i in range(20)}, "at most 16384 characters in all"),
    ],
)
def test_options_beyond_their_bounds_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(options=options)


def test_momentum_belongs_to_sgd() -> None:
    with pytest.raises(ValueError, match='momentum is of optimizer = "sgd" and "lars", not of "adam"'):
        TrainingSection(optimizer="adam", momentum=0.9)
    assert read(optimizer="adamw", weight_decay=0.1, clip_norm=1.0).training_plan(1).optimizer == "adamw"
