"""The section [aggregation]: what an optimizer's keys default to, what is refused, and the rate over the rounds."""

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.audit.chain import section_of
from umbel.aggregation.canonical import canonical, parsed
from umbel.aggregation.optimizers.build import optimizer_of
from umbel.aggregation.optimizers.section import AggregationSection, ServerOptimizerName
from umbel.aggregation.plans.schedule import RateSchedule
from umbel.aggregation.plans.training import TrainingPlan

READ = TypeAdapter(AggregationSection).validate_python
PLAIN = '{"max_abs":64,"sample_count_max":1048576,"server_learning_rate":1}'


def test_a_section_without_the_keys_of_an_optimizer_is_written_as_before_there_were_any() -> None:
    assert canonical(AggregationSection()) == PLAIN
    assert canonical(READ({"optimizer": "sgd", "schedule": {}})) == PLAIN
    assert not AggregationSection().remembers


@pytest.mark.parametrize("name", get_args(ServerOptimizerName))
def test_every_optimizer_has_its_slots_and_a_rate_of_its_kind(name: ServerOptimizerName) -> None:
    section = AggregationSection(optimizer=name)
    assert bool(optimizer_of(section, TrainingPlan()).first) == section.remembers == (name != "sgd")
    assert section.rate(1, 1, 1) == (0.01 if name in ("adagrad", "adam", "yogi", "lamb") else 1.0)
    assert section.of("beta1") == (0.0 if name == "adagrad" else 0.9)


def test_with_bias_correction_the_second_moment_begins_with_zero() -> None:
    assert (
        optimizer_of(AggregationSection(optimizer="adam", bias_correction=True), TrainingPlan()).first["second_moment"]
        == 0.0
    )
    assert optimizer_of(AggregationSection(optimizer="adam", tau=0.5), TrainingPlan()).first["second_moment"] == 0.25


@pytest.mark.parametrize("name", ["adagrad", "adam", "yogi"])
def test_the_second_moment_begins_with_what_the_file_says(name: ServerOptimizerName) -> None:
    assert optimizer_of(AggregationSection(optimizer=name, v0=0.0), TrainingPlan()).first["second_moment"] == 0.0
    assert (
        optimizer_of(AggregationSection(optimizer=name, tau=0.5, v0=2.0), TrainingPlan()).first["second_moment"] == 2.0
    )


@pytest.mark.parametrize(
    "table",
    [
        {"optimizer": "adam", "tau": 0.1, "schedule": {"name": "cosine", "warm_up_rounds": 2}},
        {"optimizer": "momentum", "momentum": 0.5, "server_learning_rate": 0.25},
        {"schedule": {"name": "step", "every": 3}},
        {"optimizer": "adam", "v0": 0.5, "bias_correction": True, "bias_correction_from": 2},
    ],
)
def test_an_auditor_reads_the_section_that_the_coordinator_wrote(table: dict[str, Any]) -> None:
    section = READ(table)
    assert section_of({"aggregation": parsed(canonical(section))}, "aggregation", AggregationSection) == section


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"optimizer": "adamw"}, "adam"),
        ({"optimizer": "sgd", "momentum": 0.9}, '`momentum` is for optimizer = "momentum", "nesterov" or "lars", not'),
        (
            {"optimizer": "momentum", "tau": 0.1},
            '`tau` is for optimizer = "adagrad", "adam", "yogi" or "lamb", not for',
        ),
        (
            {"optimizer": "adagrad", "beta2": 0.9},
            '`beta2` is for optimizer = "adam", "yogi" or "lamb", not for "adagrad"',
        ),
        ({"optimizer": "lamb", "trust": 0.1}, '`trust` is for optimizer = "lars", not for "lamb": leave it out'),
        ({"optimizer": "yogi", "bias_correction": True}, '`bias_correction` is for optimizer = "adam": leave it out'),
        ({"optimizer": "lamb", "v0": 0.0}, '`v0` is for optimizer = "adagrad", "adam" or "yogi", not for "lamb"'),
        ({"optimizer": "adam", "v0": -1.0}, "v0 must lie between 0"),
        ({"optimizer": "adam", "bias_correction_from": 2}, "`bias_correction_from` is for bias_correction = true"),
        (
            {"optimizer": "adam", "bias_correction": True, "bias_correction_from": 0},
            "bias_correction_from must lie between 1",
        ),
        ({"optimizer": "adam", "beta1": 1.0}, "beta1 must lie between 0"),
        ({"optimizer": "adam", "tau": 0.0}, "tau must lie between 1e-12"),
        ({"optimizer": "lars", "trust": float("nan")}, "trust must lie between"),
        ({"server_learning_rate": "fast"}, "server_learning_rate"),
        ({"server_learning_rate": -1.0}, "server_learning_rate must lie between"),
        (
            {"server_learning_rate": 1e7, "schedule": {"name": "cosine"}},
            "server_learning_rate with .* must lie between",
        ),
        ({"schedule": {"name": "step"}}, "needs `every`"),
        ({"schedule": {"nmae": "step"}}, "nmae"),
        ({"beta3": 0.9}, "beta3"),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_remedy(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        READ(table)


def test_an_optimizer_that_nobody_knows_is_refused_where_no_schema_looks() -> None:
    with pytest.raises(ValueError, match=r'optimizer must be "sgd", .* or "lamb", not \'sdg\''):
        AggregationSection(optimizer="sdg")  # type: ignore[arg-type]


@given(st.integers(1, 50), st.integers(1, 40))
def test_the_rate_follows_the_schedule_as_that_of_the_clients_does(number: int, target: int) -> None:
    schedule = RateSchedule("cosine", warm_up_rounds=3, per_clients=10)
    section = AggregationSection(0.5, schedule=schedule)
    rate = section.rate(number, 50, target)
    assert rate == pytest.approx(0.5 * target / 10 * schedule.share(number, 50), rel=1e-8, abs=1e-12)
    assert section.gives(rate, number, 50, target)
    assert not section.gives(rate * (1 + 1e-6), number, 50, target)
    assert AggregationSection(0.5).gives(0.5, number, 50, target)
    assert not AggregationSection(0.5).gives(0.5 * (1 + 1e-12), number, 50, target)
