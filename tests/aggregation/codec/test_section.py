"""[codec] of a run file: every name makes a plan, keys of other codecs are refused, and the rounds' plans follow."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.codec.section import CodecSection, codec_key, require_codec
from umbel.aggregation.codec.step import RoundShown
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid

SECTIONS, PLANS = TypeAdapter(CodecSection), TypeAdapter(CodecPlan)
LAYOUT = Layout((TensorSpec("w", (1000,), "float32", 0),))
NOTHING = RoundShown(60.0, 1000)


def shown(
    *, rms: float = 0.01, n_bytes: int = 250, rates: tuple[float, ...] = (), window_s: float = 60.0
) -> RoundShown:
    return RoundShown(window_s, 1000, rms, [n_bytes] * max(len(rates), 1), rates)


def relative_step(plan: CodecPlan, rms: float = 0.01) -> float:
    return 1 / plan.inverse_step / rms


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "float32"},
        {"name": "integer", "step": 1.0, "first_norm": 2.0, "clip_norm": 3.0},
        {"name": "auto", "error": 0.05, "first_norm": 2.0, "clip_norm": 3.0},
        {"name": "eden", "bits": 2, "clip_norm": 1.0},
        {"name": "sign", "error_feedback": True},
        {"name": "ternary", "clip_sigmas": 2.5},
        {"name": "ternary", "clip_sigmas": 3},
        {"name": "qsgd", "levels": 16},
        {"name": "topk", "share": 0.001, "precision": "float32", "error_feedback": True, "momentum": 0.9},
        {"name": "topk", "share": 0.01, "warm_up_rounds": 3},
        {"name": "mask", "every": 10, "mode": "structured", "precision": "bfloat16", "error_feedback": True},
        {"name": "lowrank", "rank": 2, "mode": "sketched"},
        {"name": "planes", "precision": "bfloat16", "error_feedback": True},
    ],
    ids=lambda keys: f"{keys['name']} {len(keys)}",
)
def test_every_name_makes_a_plan_that_travels_and_a_codec(keys: dict[str, Any]) -> None:
    section = SECTIONS.validate_python(keys)
    plan = section.first(1000, 77)
    assert plan.codec is (Codec.INTEGER if keys["name"] == "auto" else Codec[keys["name"].upper()])
    assert PLANS.validate_json(PLANS.dump_json(plan)) == plan
    codec = codec_for(plan, Grid.finest(max_abs=64.0, total_weight_max=10), LAYOUT)
    assert codec.update_bytes[0] >= 64
    again = section.after(plan, 2, NOTHING, 78)
    assert again.key == (78 if plan.codec is not Codec.FLOAT32 else 0)
    assert again.codec is plan.codec


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"name": "zip"}, "Input should be 'float32', 'integer'"),
        ({"name": "float32", "step": 1.0}, 'name = "float32" does not take the key step; it takes no other key'),
        (
            {"name": "eden", "share": 0.1},
            'name = "eden" does not take the key share; it takes bits, clip_norm, error_feedback',
        ),
        ({"name": "integer", "error": 0.1}, 'name = "integer" does not take the key error; it takes step'),
        ({"name": "auto", "step": 1.0}, 'name = "auto" does not take the key step; it takes error'),
        ({"name": "integer", "error_feedback": True}, 'name = "integer" does not take the key error_feedback'),
        ({"name": "integer", "step": 0.001}, "`step` must lie between 0.00390625 and 16, not 0.001"),
        ({"name": "integer", "step": math.nan}, "`step` must lie between"),
        ({"name": "auto", "error": 30.0}, "`error` must lie between"),
        ({"name": "auto", "first_norm": math.inf}, "`first_norm` must lie between"),
        ({"name": "eden", "bits": 9}, "`bits` must lie between 1 and 8, not 9"),
        ({"name": "eden", "bits": 2.5}, "valid integer"),
        ({"name": "topk", "share": 0.0}, "`share` must lie between"),
        ({"name": "topk", "warm_up_rounds": 0}, "`warm_up_rounds` must lie between 1 and"),
        ({"name": "topk", "momentum": 0.9}, "momentum needs .* error_feedback = true"),
        ({"name": "topk", "error_feedback": True, "momentum": 1.0}, "momentum must lie between 0 and 0.999"),
        ({"name": "sign", "momentum": 0.9}, 'name = "sign" does not take the key momentum'),
        ({"name": "eden", "error_feedback": True}, "error_feedback does not work with"),
        ({"name": "mask", "error_feedback": True}, "error_feedback does not work with"),
        ({"name": "qsgd", "error_feedback": True}, "error_feedback does not work with"),
        ({"name": "ternary", "error_feedback": True}, "error_feedback does not work with"),
        ({"name": "lowrank", "mode": "sketched", "error_feedback": True}, "error_feedback does not work with"),
        ({"name": "eden", "clip_norm": -1.0}, "clip_norm must lie between"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        SECTIONS.validate_python(keys)


@pytest.mark.parametrize("name", ["FLOAT32", 7, "", ["eden"]])
def test_an_auditor_is_told_of_a_name_that_is_none(name: Any) -> None:
    with pytest.raises(ValueError, match="name must be one of float32, integer"):
        CodecSection(name=name)


@pytest.mark.parametrize(
    "plan",
    [
        {"codec": 2, "parameters": {"bits": 2.0}},
        {"codec": 2, "parameters": {"bits": "2"}},
        {"codec": 2, "parameters": {"rank": 2}},
        {"codec": 3, "parameters": {"x": 1}},
        {"codec": 6, "parameters": {"precision": "float64"}},
        {"codec": 6, "parameters": {"share": 0.5}, "momentum": 0.5},
        {"codec": 7, "feedback": True},
        {"codec": 0, "parameters": {"bits": 1}},
        {"codec": 1, "inverse_step": 1.0, "feedback": True},
        {"codec": 10},
        {"codec": 2, "key": -1},
        {"codec": 2, "clip_norm": 0.0},
    ],
)
def test_a_coordinator_that_plans_nonsense_is_refused_by_its_clients(plan: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each of these has words of its own
        require_codec(PLANS.validate_python(plan))


def test_top_k_warms_up_to_its_share_and_no_further() -> None:
    section = CodecSection("topk", share=0.01, warm_up_rounds=2)
    plan, shares = section.first(1000, 1), list[object]()
    for number in range(2, 10):
        shares.append(plan.parameters["share"])
        plan = section.after(plan, number, NOTHING, number)
    assert shares == [1 / 4, 1 / 4, 1 / 16, 1 / 16, 1 / 64, 1 / 64, 0.01, 0.01]


def test_the_step_of_auto_is_never_coarser_than_the_error_allows() -> None:
    section = CodecSection("auto", error=0.03, first_norm=1.0)
    first = section.first(1000, 1)
    assert relative_step(first, 1 / math.sqrt(1000)) == pytest.approx(0.6, rel=1e-6)
    for rates in ((), (1e-3,), (0.5, 1e9)):
        again = section.after(first.at_step(0.006), 2, shown(rates=rates), 2)
        assert relative_step(again) == pytest.approx(0.6, rel=1e-6)


def test_the_step_of_auto_is_as_fine_as_nine_of_ten_lines_carry() -> None:
    section = CodecSection("auto", error=0.03)
    before = section.first(1000, 1).at_step(0.006)  # 0.6 rms, 250 bytes
    steps = [
        relative_step(section.after(before, 2, shown(rates=(rate,) * 10), 2))
        for rate in (83.0, 125.0, 166.0, 249.0, 1e9)
    ]
    # A twentieth of a minute is 3 s: 249, 375, 498 and 747 bytes; a halving of the step costs 125.
    assert steps == pytest.approx([0.6, 0.3, 0.3, 0.6 / 2**3, 0.6 / 2**7], rel=1e-6)
    one_slow = shown(rates=(1.0, *(166.0,) * 9, *(166.0,) * 10))
    assert relative_step(section.after(before, 2, one_slow, 2)) == pytest.approx(0.3, rel=1e-6)


@given(
    st.floats(1e-5, 16.0),
    st.floats(1e-6, 1e6),
    st.lists(st.floats(1e-6, 1e15), max_size=30),
    st.integers(0, 10**9),
    st.floats(0.1, 1e7),
)
def test_auto_always_finds_a_step_within_its_bounds(
    error: float, rms: float, rates: list[float], n_bytes: int, window_s: float
) -> None:
    section = CodecSection("auto", error=error)
    before = section.first(1000, 1)
    found = section.after(before, 2, shown(rms=rms, n_bytes=n_bytes, rates=tuple(rates), window_s=window_s), 2)
    assert relative_step(found, rms) <= math.sqrt(12 * error) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (CodecSection(), "float32"),
        (CodecSection("integer", clip_norm=0.5), "integer, step 0.00791, clip_norm 0.5"),
        (CodecSection("topk", share=0.05, error_feedback=True), "topk, share 0.05, error feedback"),
        (CodecSection("mask", mode="structured"), "mask, mode structured"),
    ],
)
def test_a_plan_says_in_words_how_updates_are_written(section: CodecSection, words: str) -> None:
    assert section.first(1000, 1).words == words


def test_a_client_that_alone_measured_its_line_does_not_decide_for_the_others() -> None:
    section = CodecSection("auto", error=0.03)
    before = section.first(1000, 1).at_step(0.006)
    found = section.after(before, 2, RoundShown(60.0, 1000, 0.01, [250] * 10, (1e15,)), 2)
    assert relative_step(found) == pytest.approx(0.6, rel=1e-6)


@pytest.mark.parametrize(("name", "key"), [("topk", "share"), ("ternary", "clip_sigmas")])
def test_a_number_beyond_all_floats_is_refused_as_any_other(name: Any, key: str) -> None:
    given: dict[str, Any] = {key: 10**400}
    with pytest.raises(ValueError, match="too large for a float"):
        CodecSection(name, **given)
    with pytest.raises(ValueError, match="too large for a float"):
        require_codec(PLANS.validate_python({"codec": int(Codec[name.upper()]), "parameters": {key: 10**400}}))


def test_each_round_has_a_key_of_its_own() -> None:
    assert len({codec_key(7, number) for number in range(1, 100)} | {codec_key(8, 1)}) == 100
