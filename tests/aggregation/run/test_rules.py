"""What in a run file cannot go with [privacy], and whether a member list is the one that it names."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.federations.consortium import first_list, without
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import TrainingPlan, Weighting
from umbel.aggregation.privacy.section import PrivacySection, require_private_model
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.rules import AnotherList, require_named
from umbel.aggregation.run.sections import Override, RoundsSection
from umbel.aggregation.run.stopping import StopRule
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.aggregation.trust.members import MemberList
from umbel.aggregation.trust.public_keys import grouped

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
        ({"training": TrainingPlan(evaluate=True)}, "metrics would be summed without noise"),
        ({"stop": StopRule("training.loss", patience=3, minimum=1)}, "metrics would be summed without noise"),
        ({"override": (Override(2, 2, evaluate=True),)}, "metrics would be summed without noise"),
        ({"override": (Override(2, 2, target=7),)}, "one size of cohort"),
        ({"override": (Override(2, 2, minimum=7),)}, "one size of cohort"),
        ({"override": (Override(2, 2, over_selection=1.1),)}, "one size of cohort"),
        ({"codec": CodecSection("integer", step=0.01)}, "has no bound"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_would_show_more_than_sums_with_noise_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(PRIVATE, **changes)


def test_a_model_with_values_that_travel_exactly_has_no_private_rounds() -> None:
    require_private_model(Layout.of_state({"w": torch.zeros(3)}))
    with pytest.raises(ValueError, match=r"travel exactly \(n\), which would have no noise"):
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
    with pytest.raises(AnotherList, match="asks for none"):
        require_named(off, FIRST)


REFUSED = {
    "of a plain run": (PLAIN, FIRST, "the run file asks for none"),
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
