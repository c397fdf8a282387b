"""The mod: what a strategy and a ClientApp see of it, and every training that it refuses."""

import logging

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode

from tests.client.flower.codec.messages import (
    FIRST,
    Arrays,
    app_of,
    arrays_in,
    context_of,
    message_of,
    moved,
    record_of,
    train_content,
)
from umbel.aggregation.codec.one_update import read_one
from umbel.aggregation.codec.section import CodecSection
from umbel.client.flower.codec.arrays import StartArrays
from umbel.client.flower.codec.mod import compressing
from umbel.client.flower.codec.terms import RECORD, Terms, is_written, put_in, update_in

TERMS = Terms(CodecSection("eden", bits=6).first(621, 3), 64.0, 4)


def asked(terms: Terms = TERMS, arrays: Arrays = FIRST) -> Message:
    return message_of(put_in(train_content(arrays), terms))


def reason_of(reply: Message) -> str:
    assert reply.has_error()
    assert reply.error.code == ErrorCode.MOD_FAILED_PRECONDITION
    return reply.error.reason or ""


def test_the_reply_holds_only_the_update_and_the_app_sees_nothing_of_it() -> None:
    seen: list[RecordDict] = []

    def looking(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """A mod after it."""
        seen.append(RecordDict(dict(message.content)))
        reply = call_next(message, context)
        seen.append(RecordDict(dict(reply.content)))
        return reply

    context = context_of()
    reply = app_of(mods=[compressing, looking])(asked(), context)
    request, answer = seen
    assert {*request} == {"arrays", "config"}
    assert arrays_in(answer.array_records["arrays"]).keys() == FIRST.keys()
    assert {*reply.content} == {"arrays", "metrics"}
    assert reply.content["metrics"] == answer["metrics"]
    assert len(context.state) == 0
    record = reply.content.array_records["arrays"]
    start = StartArrays.of(record_of(FIRST))
    found = arrays_in(start.moved(read_one(TERMS.codec(start.layout), update_in(record), TERMS.rank).change))
    for name, one in moved(FIRST, 0).items():
        np.testing.assert_allclose(found[name], one, atol=2e-3)
    assert int(found["n"]) == 7, "integers are exact"


def test_a_message_without_terms_is_left_alone() -> None:
    message, passed = message_of(train_content()), list[Message]()

    def app(message: Message, context: Context) -> Message:
        passed.append(message)
        return Message(train_content(), reply_to=message)

    reply = compressing(message, context_of(), app)
    assert passed == [message]
    assert not is_written(reply.content.array_records["arrays"])
    evaluation = app_of(mods=[compressing])(message_of(train_content(), "evaluate"), context_of())
    assert "mean" in evaluation.content["metrics"]


def test_an_app_may_use_up_the_message() -> None:
    """Flower's own example: `to_torch_state_dict(keep_input=False)` empties the record that came."""

    def app(message: Message, context: Context) -> Message:
        new = arrays_in(message.content["arrays"])
        message.content["arrays"].clear()
        return Message(RecordDict({"model": record_of(moved(new, 0))}), reply_to=message)

    reply = compressing(asked(), context_of(), app)
    assert is_written(reply.content.array_records["model"])


def test_an_error_of_the_app_is_passed_on() -> None:
    error = Error(17, "no data")
    reply = compressing(asked(), context_of(), lambda message, _context: Message(error, reply_to=message))
    assert reply.error == error
    with pytest.raises(ZeroDivisionError):
        app_of(lambda _arrays, _node: {"w": np.array(1 // 0)}, [compressing])(asked(), context_of())


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ({"w.weight": np.zeros(3, np.float32)}, "array 'n' is missing in the reply of the training"),
        ({**FIRST, "w.bias": np.zeros(4, np.float32)}, "array 'w.bias' came with the shape [20]"),
        ({**FIRST, "w.bias": np.full(20, np.nan, np.float32)}, "hold a NaN or an infinity"),
        ({**FIRST, "w.bias": np.full(20, np.inf, np.float32)}, "hold a NaN or an infinity"),
        ({**FIRST, "w.bias": np.full(20, 65.0, np.float32)}, "changed by more than max_abs, 64: try a smaller"),
    ],
)
def test_a_training_that_cannot_be_sent_is_an_error_reply(local: Arrays, words: str) -> None:
    reason = reason_of(app_of(lambda _arrays, _node: local, [compressing])(asked(), context_of()))
    assert reason.startswith("umbel's compression: ")
    assert words in reason


def test_the_value_of_a_weight_stays_at_the_node(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "umbel.client")
    local = {**FIRST, "w.bias": np.full(20, 12345.0, np.float32)}
    reply = app_of(lambda _arrays, _node: local, [compressing])(asked(), context_of())
    assert "12345" not in reason_of(reply)
    assert "12345" in caplog.text


def test_a_reply_with_several_records_or_none_is_refused() -> None:
    for names in ((), ("a", "b")):
        content = RecordDict({**{name: record_of(FIRST) for name in names}, "m": MetricRecord({"num-examples": 1})})
        reply = compressing(asked(), context_of(), lambda m, _c, content=content: Message(content, reply_to=m))  # type: ignore[misc]
        assert f"has {len(names)} ArrayRecords; it must have one" in reason_of(reply)


def untrained(message: Message, context: Context) -> Message:
    raise AssertionError("nobody trains for terms that cannot be kept")


def test_terms_that_cannot_be_kept_are_refused_before_the_training() -> None:
    no_terms = message_of(RecordDict({**train_content(), RECORD: ConfigRecord({"terms": "{}"})}))
    assert "cannot be used: plan" in reason_of(compressing(no_terms, context_of(), untrained))
    two = RecordDict({**train_content(), "more": ArrayRecord()})
    reply = compressing(message_of(put_in(two, TERMS)), context_of(), untrained)
    assert "the message has 2 ArrayRecords" in reason_of(reply)
    complex_ = {"w": np.zeros(2, dtype=np.complex64)}
    assert "cannot be averaged" in reason_of(compressing(asked(arrays=complex_), context_of(), untrained))
    lowrank = Terms(CodecSection("lowrank").first(621, 3), 64.0, 0)
    assert "set mode to" in reason_of(compressing(asked(lowrank), context_of(), untrained))
