"""The terms of a compressed training, and the array of a compressed reply: nothing else is taken for one."""

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from tests.client.flower.codec.messages import FIRST, over_the_wire, record_of, train_content
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.errors import MalformedUpdate
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.client.flower.codec.arrays import StartArrays
from umbel.client.flower.codec.terms import (
    RECORD,
    STYPE,
    UPDATE,
    Terms,
    is_written,
    put_in,
    taken_out,
    update_in,
    written,
)

PLANS = [
    CodecSection(name).first(1000, 5) for name in ("float32", "integer", "eden", "sign", "ternary", "qsgd", "planes")
] + [
    CodecSection("integer", step=0.3, first_norm=7.7, clip_norm=3.3).first(1000, (1 << 63) - 1),
    CodecSection("topk", share=0.25, precision="bfloat16", clip_norm=1.0).first(1000, 1),
    CodecSection("mask", every=3, mode="sketched").first(1000, 1),
]
OTHER = Array(np.zeros(3, dtype=np.uint8))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.words)
def test_terms_arrive_as_they_were_sent_and_are_taken_out(plan: CodecPlan) -> None:
    content, terms = train_content(), Terms(plan, 12.5, 70_000)
    arrived = over_the_wire(put_in(content, terms))
    assert RECORD not in content, "the strategy's own content stays"
    assert taken_out(arrived) == terms
    assert {*arrived} == {*content}
    assert taken_out(arrived) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": -1}, "rank must lie between 0 and 4294967295, not -1"),
        ({"rank": 1 << 32}, "rank must lie between"),
        ({"rank": True}, "rank: Input should be a valid integer"),
        ({"max_abs": 0.0}, "max_abs must lie between"),
        ({"max_abs": "1"}, "max_abs: Input should be a valid number"),
        ({"version": 2}, "knows version 1 of the terms, not 2"),
        ({"more": 1}, "more: "),
        ({"plan": {"codec": 1, "inverse_step": 0.0}}, "inverse_step must be a float32"),
        ({"plan": {"codec": 99}}, "plan.codec: "),
        ({"plan": {"codec": 10}}, 'a plan cannot name the codec "masked"'),
        ({"plan": {"codec": 2, "parameters": {"bits": 99}}}, "`bits` must lie between 1 and 8"),
        ({"plan": {"codec": 2, "parameters": {"bit": 1}}}, "has no parameter 'bit'"),
        ({"plan": {"codec": 6, "feedback": True}}, "error feedback needs a state"),
        ({"plan": {"codec": 0, "key": -1}}, "key must lie between"),
    ],
)
def test_terms_that_no_update_can_be_written_with_are_refused(change: dict[str, Any], words: str) -> None:
    good = {"plan": {"codec": 0}, "max_abs": 1.0, "rank": 0}
    assert taken_out(RecordDict({RECORD: ConfigRecord({"terms": json.dumps(good)})})) == Terms(CodecPlan(), 1.0, 0)
    with pytest.raises(ValueError, match=words):
        taken_out(RecordDict({RECORD: ConfigRecord({"terms": json.dumps({**good, **change})})}))


@pytest.mark.parametrize("value", [{}, {"terms": 1}, {"terms": b"{}"}, {"terms": "{"}, {"terms": " " * 5000}])
def test_a_record_without_terms_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"umbel\.codec"):
        taken_out(RecordDict({RECORD: ConfigRecord(value)}))


def test_the_layout_decides_whether_a_codec_needs_the_gradients() -> None:
    layout = StartArrays.of(record_of(FIRST)).layout
    with pytest.raises(ValueError, match='lowrank with mode = "structured" changes the gradients'):
        Terms(CodecPlan(Codec.LOWRANK), 1.0, 0).codec(layout)
    Terms(CodecPlan(Codec.LOWRANK, parameters={"mode": "sketched"}), 1.0, 0).codec(layout)


def test_an_update_is_one_array_that_nobody_takes_for_weights() -> None:
    record = over_the_wire(RecordDict({"a": written(b"abc")})).array_records["a"]
    assert is_written(record)
    assert update_in(record) == b"abc"
    with pytest.raises(TypeError, match=r"umbel\.update/1"):
        record[UPDATE].numpy()
    assert not is_written(ArrayRecord({UPDATE: OTHER}))


@pytest.mark.parametrize(
    "record",
    [
        ArrayRecord({UPDATE: Array("uint8", (3,), STYPE, b"abc"), "w": OTHER}),
        ArrayRecord({"w": Array("uint8", (3,), STYPE, b"abc")}),
        ArrayRecord({UPDATE: OTHER}),
        ArrayRecord(),
        ArrayRecord({UPDATE: Array("float64", (3,), STYPE, b"abc")}),
        ArrayRecord({UPDATE: Array("uint8", (1 << 60,), STYPE, b"abc")}),
        ArrayRecord({UPDATE: Array("uint8", (), STYPE, b"abc")}),
    ],
)
def test_any_other_record_is_no_update(record: ArrayRecord) -> None:
    with pytest.raises(MalformedUpdate):
        update_in(record)
