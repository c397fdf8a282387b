"""The run file: overrides, coverage and self-tuning are merged as written; what cannot go together is refused."""

import tomllib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.federations.consortium import first_list, without
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import CoverageFloor, Weighting
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.privacy.section import PrivacySection, require_private_model
from umbel.aggregation.run.file import AnotherList, RunFile, require_named
from umbel.aggregation.run.sections import DownlinkSection, Override, RoundsSection
from umbel.aggregation.run.stopping import StopRule
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.aggregation.trust.members import MemberList
from umbel.aggregation.trust.public_keys import grouped

FILES = TypeAdapter(RunFile)
ROUNDS = RoundsSection(count=10, target=8, minimum=4, window_s=600.0)


def run_file(*overrides: Override, training: TrainingSection | None = None) -> RunFile:
    return RunFile("r", ROUNDS, training=training or TrainingSection(), override=overrides)


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
    stepped = run_file(Override(2, 2, local_epochs=3), training=TrainingSection(local_steps=5))
    assert (stepped.training_plan(2).local_epochs, stepped.training_plan(2).local_steps) == (3, None)


def test_a_false_in_an_override_is_a_value() -> None:
    file = run_file(Override(2, evaluate=False), training=TrainingSection(evaluate=True))
    assert [file.training_plan(number).evaluate for number in (1, 2)] == [True, False]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"first_round": 0, "target": 4}, "must be at least 1, and at most last_round"),
        ({"first_round": 4, "last_round": 3, "target": 4}, "this override covers 4 to 3"),
        ({"first_round": 1}, "changes nothing"),
        ({"first_round": 1, "local_epochs": 1, "local_steps": 1}, "not both"),
        ({"first_round": 11, "target": 4}, "after the last one, which is 10"),
        ({"first_round": 1, "last_round": 11, "target": 4}, "after the last one, which is 10"),
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


SAMPLES = RoundsSection(2, target=8, minimum=6, weighting=Weighting.SAMPLES)
PRIVATE = RunFile(
    "demo",
    SAMPLES,
    codec=CodecSection("integer", step=0.01, clip_norm=1.0),
    secure_aggregation=SecureAggregationSection(),
    privacy=PrivacySection(noise_multiplier=1.0),
)


def test_what_is_summed_with_noise_is_allowed() -> None:
    changed = Override(1, 1, window_s=30.0, learning_rate=0.5)
    assert replace(PRIVATE, override=(changed,)).override == (changed,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"secure_aggregation": None}, r"add \[secure_aggregation\]"),
        ({"rounds": replace(SAMPLES, weighting=Weighting.PROPORTIONAL)}, 'set weighting = "samples"'),
        ({"training": TrainingSection(evaluate=True)}, "metrics would be summed without noise"),
        ({"training": TrainingSection(inexactness=True)}, "summed without noise: leave `inexactness` out"),
        ({"stop": StopRule("training.loss", patience=3, minimum=1)}, "metrics would be summed without noise"),
        ({"override": (Override(2, 2, evaluate=True),)}, "metrics would be summed without noise"),
        ({"override": (Override(2, 2, target=7),)}, "one cohort size"),
        ({"override": (Override(2, 2, minimum=7),)}, "one cohort size"),
        ({"override": (Override(2, 2, over_selection=1.1),)}, "one cohort size"),
        ({"codec": CodecSection("integer", step=0.01)}, "has no bound"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_would_show_more_than_sums_with_noise_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(PRIVATE, **changes)


def test_a_model_with_values_that_travel_exactly_has_no_private_rounds() -> None:
    require_private_model(Layout.of_state({"w": torch.zeros(3)}))
    with pytest.raises(
        ValueError, match=r"cannot add noise to integer tensors or running statistics, and the model has some \(n\)"
    ):
        require_private_model(Layout.of_state({"w": torch.zeros(3), "n": torch.tensor(0)}))


FIRST = first_list()
SECOND = without(FIRST, "south")
PLAIN = RunFile("ward", RoundsSection(1, target=4, minimum=3, over_selection=1.0), codec=CodecSection("integer"))
UNBOUND = replace(PLAIN, secure_aggregation=SecureAggregationSection())
BOUND = replace(PLAIN, secure_aggregation=SecureAggregationSection(members_sha256=FIRST.sha256))


def test_the_list_that_the_file_names_is_its_own() -> None:
    require_named(BOUND, FIRST)
    assert BOUND.members_sha256 == FIRST.sha256
    assert UNBOUND.members_sha256 == PLAIN.members_sha256 == ""


def test_masked_updates_that_are_switched_off_are_bound_to_no_list() -> None:
    off = replace(PLAIN, secure_aggregation=SecureAggregationSection(enabled=False, members_sha256=FIRST.sha256))
    assert off.members_sha256 == ""
    with pytest.raises(AnotherList, match="does not use"):
        require_named(off, FIRST)


REFUSED = {
    "of a plain run": (PLAIN, FIRST, "this run file does not use"),
    "of a run that names none": (UNBOUND, FIRST, "the run file names no member list"),
    "of another epoch": (BOUND, SECOND, "the run file names another member list"),
}


@pytest.mark.parametrize(("file", "members", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_a_list_that_is_not_named_is_refused_with_the_line_for_it(
    file: RunFile, members: MemberList, sentence: str
) -> None:
    with pytest.raises(AnotherList, match=sentence) as refused:
        require_named(file, members)
    assert f'write members_sha256 = "{members.sha256}" into' in str(refused.value)
    assert members.words in str(refused.value)


def test_of_two_lists_both_hashes_are_told() -> None:
    with pytest.raises(AnotherList) as refused:
        require_named(BOUND, SECOND)
    for one in (FIRST, SECOND):
        assert f"({grouped(one.sha256[:16])})" in str(refused.value)
