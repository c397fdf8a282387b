"""[secure_aggregation] of a run file, and what else there cannot go with it: each refusal says why and what to do."""

import math
from dataclasses import replace

import pytest

from umbel.aggregation.audit.bundle import json_sha256
from umbel.aggregation.canonical import canonical
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.codec.step import RoundShown
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.plans.round import CoverageFloor, Weighting
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.privacy.section import PrivacySection
from umbel.aggregation.run.file import RunFile, require_compatible
from umbel.aggregation.run.sections import (
    CanarySection,
    DownlinkSection,
    EvaluationSection,
    Override,
    RetentionSection,
    RoundsSection,
)
from umbel.aggregation.run.stopping import StopRule
from umbel.aggregation.secagg.parameters import survivors_min
from umbel.aggregation.secagg.section import SecureAggregationSection, survivors_needed
from umbel.aggregation.trust.public_keys import grouped
from umbel.aggregation.types import ClientId

SECTION = SecureAggregationSection()
COUNTING = SecureAggregationSection(counts={"a.confusion": 4}, evaluation_counts={"scores": 64})
EVERYTHING = SecureAggregationSection(metrics="all", evaluation="all")
ROUNDS = RoundsSection(10, target=9, minimum=5, over_selection=1.4)
FILE = RunFile("run", ROUNDS, codec=CodecSection("integer"), training=TrainingSection(evaluate=True))


@pytest.mark.parametrize("codec", [CodecSection(), CodecSection(step=2.0, clip_norm=1.0)])
def test_a_secure_run_file_without_the_name_of_a_codec_has_the_integer_codec(codec: CodecSection) -> None:
    integer = replace(codec, name="integer")
    masked = RunFile("run", ROUNDS, codec=codec, secure_aggregation=SECTION)
    assert masked == RunFile("run", ROUNDS, codec=integer, secure_aggregation=SECTION)
    assert json_sha256(masked) == json_sha256(replace(masked, codec=integer))


@pytest.mark.parametrize("section", [None, SecureAggregationSection(enabled=False)])
def test_a_plain_run_file_without_the_name_of_a_codec_has_float32(section: SecureAggregationSection | None) -> None:
    plain = RunFile("run", ROUNDS, secure_aggregation=section)
    assert plain.codec == CodecSection("float32")
    with pytest.raises(ValueError, match='name = "float32" does not take the key step'):
        RunFile("run", ROUNDS, codec=CodecSection(step=2.0), secure_aggregation=section)


@pytest.mark.parametrize(
    "file",
    [
        FILE,
        replace(FILE, codec=CodecSection("integer", step=2.0, clip_norm=1.0)),
        replace(FILE, coverage=CoverageFloor(sites=(ClientId("north"),), tiers=("hospital",), strict=True)),
        replace(FILE, stop=StopRule("evaluation.loss", patience=3, minimum=1)),
        replace(FILE, evaluation=EvaluationSection(2, 3), rounds=replace(ROUNDS, over_selection=1.0)),
        replace(FILE, stop=StopRule("training.accuracy", target=0.9, minimum=2)),
        replace(
            FILE,
            training=TrainingSection(evaluate_after=True),
            secure_aggregation=SecureAggregationSection(evaluation_counts={"personal.confusion": 4}),
        ),
        replace(FILE, downlink=DownlinkSection("change"), retention=RetentionSection(versions=3)),
        replace(FILE, stop=StopRule("training.a.confusion.f1", patience=3, minimum=1), secure_aggregation=COUNTING),
        replace(FILE, stop=StopRule("evaluation.scores.auc", patience=3, minimum=1), secure_aggregation=COUNTING),
        replace(FILE, rounds=replace(ROUNDS, target=3, minimum=3, over_selection=1.3)),
        replace(FILE, stop=StopRule("training.any.name", patience=3, minimum=1), secure_aggregation=EVERYTHING),
        replace(FILE, stop=StopRule("evaluation.any", target=0.9, minimum=2), secure_aggregation=EVERYTHING),
        replace(FILE, training=TrainingSection(evaluate_after=True), secure_aggregation=EVERYTHING),
        replace(FILE, training=TrainingSection(inexactness=True), secure_aggregation=EVERYTHING),
        replace(
            FILE,
            training=TrainingSection(inexactness=True),
            secure_aggregation=SecureAggregationSection(metrics=("loss", "gamma")),
        ),
    ],
)
def test_what_goes_with_it_passes(file: RunFile) -> None:
    require_compatible(file.secure or SECTION, file)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (
            replace(FILE, codec=CodecSection("float32")),
            r'float32 does not work with secure aggregation.*name = "integer"',
        ),
        (replace(FILE, codec=CodecSection("topk")), r'topk does not work.*its own.*name = "integer"'),
        (
            replace(FILE, codec=CodecSection("mask")),
            r'only updates of the integer codec, not of mask.*name = "integer"',
        ),
        (replace(FILE, codec=CodecSection("lowrank")), r'not of lowrank.*name = "integer"'),
        (replace(FILE, codec=CodecSection("auto")), r'"auto" chooses its step.*name = "integer" and a step'),
        (replace(FILE, canary=CanarySection()), r"looks at single updates.*leave \[canary\] out"),
        (
            replace(FILE, evaluation=EvaluationSection(1, 2)),
            r"a sum over 2 clients hides no client's metrics: set clients = 3 or more in \[evaluation\]",
        ),
        (replace(FILE, retention=RetentionSection(per_site_metrics=True)), "leave per_site_metrics out of"),
        (replace(FILE, retention=RetentionSection(updates="all")), r'masked update is useless.*updates = "none"'),
        (replace(FILE, coverage=CoverageFloor(samples=0.5)), r"needs each client's sample count.*name sites or tiers"),
        (
            replace(FILE, rounds=replace(ROUNDS, self_tuning=True)),
            r"three times as many clients as the target.*self_tuning = false",
        ),
        (
            replace(FILE, stop=StopRule("evaluation.loss", patience=3)),
            r"needs each client's value.*set minimum = 1",
        ),
        (
            replace(FILE, stop=StopRule("evaluation.auc", patience=3, minimum=1)),
            r"add 'auc' to `evaluation` in \[secure_aggregation\]",
        ),
        (
            replace(FILE, stop=StopRule("evaluation.scores.auc", patience=3, minimum=1)),
            r"add 'scores\.auc' to `evaluation` in .*, or the counts that it follows from",
        ),
        (replace(FILE, stop=StopRule("training.auc", patience=3, minimum=1)), r"add 'auc' to `metrics`"),
        (replace(FILE, rounds=replace(ROUNDS, minimum=1)), r"^a sum over 1 client hides no update: set minimum = 3"),
        (replace(FILE, rounds=replace(ROUNDS, minimum=2)), r"^a sum over 2 clients hides no update"),
        (
            replace(FILE, rounds=replace(ROUNDS, over_selection=1.5)),
            r"secure aggregation needs 10 of the 14 clients that are asked, more than the target of 9: "
            r"set over_selection = 1.44 or less",
        ),
        (
            replace(FILE, rounds=replace(ROUNDS, target=60_000, over_selection=1.1)),
            r"at most 65536 clients, not 66000: lower target",
        ),
        (
            replace(FILE, training=TrainingSection(inexactness=True)),
            r'inexactness = true has no effect.*add "gamma" to `metrics` in \[secure_aggregation\]',
        ),
        (
            replace(FILE, rounds=replace(ROUNDS, weighting=Weighting.PROPORTIONAL)),
            r"could give one client all the weight: set weighting = \"samples\"",
        ),
        (
            replace(FILE, aggregation=AggregationSection(sample_count_max=100)),
            r"expected_sample_count = 128 is above sample_count_max = 100",
        ),
        (
            replace(FILE, override=(Override(3, 4, minimum=2),)),
            r"^with its overrides, round 3: a sum over 2 clients hides no update",
        ),
    ],
)
def test_what_cannot_go_with_it_is_refused_with_why_and_what_to_do(file: RunFile, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        require_compatible(SECTION, file)
    assert replace(file, secure_aggregation=replace(SECTION, enabled=False)).secure is None


@pytest.mark.parametrize("target", [3, 4, 5, 7, 8, 10, 33, 100, 250, 265, 300, 1000])
def test_without_a_choice_a_secure_round_asks_as_many_more_as_its_masks_allow(target: int) -> None:
    plain = RunFile("run", RoundsSection(10, target, 3))
    assert plain.rounds.over_selection == 1.3
    secure = RunFile("run", RoundsSection(10, target, 3), secure_aggregation=SECTION)
    n_asked = secure.round_plan(1, 1).n_wanted
    assert target <= n_asked <= math.ceil(round(1.3 * target, 9))
    assert survivors_needed(n_asked) <= target
    measured = replace(secure, rounds=ROUNDS, evaluation=EvaluationSection(1, target)).evaluation_plan(1)
    assert survivors_needed(measured.n_wanted) <= target
    assert secure.rounds.over_selection == 1.3 or survivors_needed(n_asked + 1 + target // 100) > target


@pytest.mark.parametrize("target", [3, 4, 5, 7, 10, 33, 100, 250, 1000])
def test_the_over_selection_that_is_advised_passes(target: int) -> None:
    file = replace(FILE, rounds=replace(ROUNDS, target=target, minimum=3, over_selection=3.0))
    with pytest.raises(ValueError, match="set over_selection") as refusal:
        require_compatible(SECTION, file)
    advised = float(str(refusal.value).split()[-3])
    require_compatible(SECTION, replace(file, rounds=replace(file.rounds, over_selection=advised)))
    n_asked = math.ceil(round(advised * target, 9))
    assert survivors_needed(n_asked + 2) > target


@pytest.mark.parametrize(("n_clients", "needed"), [(3, 3), (10, 7), (300, 201), (1000, 900)])
def test_how_many_must_come_in_is_what_the_graph_asks(n_clients: int, needed: int) -> None:
    assert survivors_needed(n_clients) == needed == survivors_min(n_clients)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"metrics": ("loss", "loss")}, "each of them once"),
        ({"evaluation": ("",)}, "metric name ''"),
        ({"expected_sample_count": 0}, "expected_sample_count must lie between 1"),
        ({"minimum_work": 0.0}, "minimum_work must lie between 1e-06 and 1"),
        ({"minimum_work": 1.001}, "minimum_work must lie between 1e-06 and 1"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(SECTION, **changes)  # type: ignore[arg-type]


def test_the_hash_of_a_member_list_is_the_same_however_it_is_written() -> None:
    """As `umbel members show` prints it, too: the run that is stored and signed has one spelling."""
    digits = "bbe16508a138e4a572432bb267de9859a139877e5f805a75c7b8c3d9e3e29513"
    files = [
        replace(FILE, secure_aggregation=replace(SECTION, members_sha256=text))
        for text in (digits, grouped(digits), digits.upper(), f" {grouped(digits)}\n")
    ]
    assert {canonical(file) for file in files} == {canonical(files[0])}
    assert f'"members_sha256":"{digits}"' in canonical(files[1])
    with pytest.raises(ValueError, match="members_sha256 must be the 64 hex digits that `umbel members show` prints"):
        replace(SECTION, members_sha256=digits[1:])


@pytest.mark.parametrize(("named", "plain", "private"), [(None, 1.0, 0.0), (0.25, 0.25, 0.25), (1.0, 1.0, 1.0)])
def test_all_of_the_work_is_asked_unless_the_file_says_less_or_there_is_noise(
    named: float | None, plain: float, private: float
) -> None:
    section = replace(SECTION, minimum_work=named)
    assert section.work_floor(has_noise=False) == plain
    assert section.work_floor(has_noise=True) == private
    for noise, floor in ((None, plain), (PrivacySection(noise_multiplier=1.0, clip_norm=1.0, colluders=0), private)):
        file = RunFile(
            "run",
            RoundsSection(10, target=9, minimum=7, over_selection=1.0),
            codec=CodecSection("integer"),
            secure_aggregation=section,
            privacy=noise,
        )
        first = file.first_plan(1000)
        assert first.secure is not None
        assert first.secure.minimum_work == floor, "it is in the plan, which every client signs"
        again = file.round_plan(1, 2).numbered_as(first)
        assert again.secure is not None
        assert again.secure.minimum_work == floor, "of every attempt"
        following = file.numbered_after(
            file.round_plan(2, 1), first, RoundShown(1.0, 0, 1.0), SumShown(9, 0.1, 0.2, 0.0)
        )
        assert following.secure is not None
        assert following.secure.minimum_work == floor, "and of every round"


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ({"confusion": 0}, "must have 1 to 4096 numbers, not 0"),
        ({"confusion": 4097}, "must have 1 to 4096 numbers, not 4097"),
        ({"a b": 4}, "metric name"),
        ({f"n{i}": 1 for i in range(65)}, "at most 64 names of counts"),
    ],
)
def test_lengths_of_counts_out_of_bounds_are_refused(counts: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SecureAggregationSection(counts=counts)
    with pytest.raises(ValueError, match=why):
        SecureAggregationSection(evaluation_counts=counts)


def test_the_plan_of_every_round_asks_for_the_counts_of_the_file() -> None:
    file = replace(FILE, secure_aggregation=COUNTING)
    first = file.first_plan(100)
    shown = SumShown(9, 1.0, 1.0, 0.0)
    second = file.numbered_after(file.round_plan(2, 1), first, RoundShown(600.0, 100), shown)
    for plan in (first, second, file.round_plan(1, 2).numbered_as(first)):
        assert plan.secure is not None
        assert (plan.secure.counts, plan.secure.evaluation_counts) == ({"a.confusion": 4}, {"scores": 64})


def test_counts_of_another_length_than_the_files_are_refused_and_other_names_are_not() -> None:
    COUNTING.require_lengths_of({"a.confusion": (1, 2, 3, 4), "n": (5,)}, {"scores": (0,) * 64})
    COUNTING.require_lengths_of({}, {"a.confusion": (1,)})
    with pytest.raises(ValueError, match=r"has 9 numbers of counts 'a\.confusion', and the run file asks for 4"):
        COUNTING.require_lengths_of({"a.confusion": (1,) * 9}, {})
    with pytest.raises(ValueError, match="has 2 numbers of evaluation_counts 'scores', and the run file asks for 64"):
        COUNTING.require_lengths_of({}, {"scores": (1, 2)})


def test_a_private_run_adds_up_no_counts() -> None:
    private = PrivacySection(clip_norm=1.0, noise_multiplier=1.0)
    file = replace(FILE, training=TrainingSection())
    for section in (replace(SECTION, counts={"n": 1}), replace(SECTION, evaluation_counts={"n": 1})):
        with pytest.raises(ValueError, match="counts would be summed without noise: leave `counts`"):
            replace(file, secure_aggregation=section, privacy=private)


@pytest.mark.parametrize(("source", "key"), [("training", "metrics"), ("evaluation", "evaluation")])
def test_all_metrics_have_no_room_for_a_name_that_is_too_long_so_no_run_can_be_stopped_by_it(
    source: str, key: str
) -> None:
    file = replace(FILE, secure_aggregation=EVERYTHING)
    longest = replace(file, stop=StopRule(f"{source}.{'n' * 48}", patience=3, minimum=1))
    require_compatible(EVERYTHING, longest)
    with pytest.raises(ValueError, match=rf'with {key} = "all", a name must be 1 to 48 letters.*or list it in `{key}`'):
        require_compatible(EVERYTHING, replace(file, stop=StopRule(f"{source}.{'n' * 49}", patience=3, minimum=1)))


def test_all_metrics_are_in_the_plan_of_every_round_and_a_list_of_letters_is_another_thing() -> None:
    file = replace(FILE, secure_aggregation=EVERYTHING)
    first = file.first_plan(100)
    second = file.numbered_after(file.round_plan(2, 1), first, RoundShown(600.0, 100), SumShown(9, 1.0, 1.0, 0.0))
    for plan in (first, second):
        assert plan.secure is not None
        assert (plan.secure.metrics, plan.secure.evaluation) == ("all", "all")
    listed = replace(SECTION, metrics=("a", "l"), evaluation=("all",))
    assert (listed.metrics, listed.evaluation) == (("a", "l"), ("all",))
    assert '"metrics":"all"' in canonical(file)
    with pytest.raises(ValueError, match="add 'auc' to `metrics`"):
        require_compatible(listed, replace(FILE, stop=StopRule("training.auc", patience=3, minimum=1)))


@pytest.mark.parametrize("changes", [{"metrics": "all"}, {"evaluation": "all"}])
def test_a_private_run_does_not_add_up_all_metrics(changes: dict[str, object]) -> None:
    private = PrivacySection(clip_norm=1.0, noise_multiplier=1.0)
    section = replace(SECTION, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="metrics would be summed without noise: leave `metrics` and `evaluation` out"):
        replace(FILE, training=TrainingSection(), secure_aggregation=section, privacy=private)


def test_an_evaluation_under_masks_needs_a_listed_metric_of_held_out_data() -> None:
    section = SecureAggregationSection(evaluation=())
    asked = replace(FILE, evaluation=EvaluationSection(1, 3), rounds=replace(ROUNDS, over_selection=1.0))
    with pytest.raises(ValueError, match=r"the run file lists none: name them in `evaluation`"):
        require_compatible(section, asked)
    require_compatible(replace(section, evaluation_counts={"confusion": 4}), asked)
