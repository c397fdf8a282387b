"""Records that go to another process arrive as they were."""

import socket

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from umbel.client.channel import Channel
from umbel.sim.engines.flower.pieces import SharedPieces, pieces_of, read_pieces, record_of
from umbel.sim.engines.flower.processes import answers_of, send_answers
from umbel.sim.engines.flower.work import NodeAnswer


def a_record(n_values: int = 5) -> RecordDict:
    rising, empty = np.arange(n_values, dtype=np.float32), np.zeros((0, 3))
    return RecordDict(
        {
            "metrics": MetricRecord({"loss": 0.5, "counts": [1, 2]}),
            "first": ArrayRecord({"b": Array(rising), "a": Array(empty)}),
            "config": ConfigRecord({"lr": 0.1, "name": "x", "raw": b"\0"}),
            "second": ArrayRecord({"b": Array(rising * 2)}),
            "none": ArrayRecord(),
        }
    )


def test_a_record_in_pieces_is_put_together_in_its_order() -> None:
    record = a_record()
    head, *arrays = pieces_of(record)
    assert arrays == [
        record.array_records[name][key].data for name, key in (("first", "b"), ("first", "a"), ("second", "b"))
    ]
    assert len(head) < 400
    again = record_of([head, *arrays])
    assert again == record
    assert [*again] == [*record]
    assert record.array_records["second"]["b"].numpy()[1] == 2, "the record itself keeps its arrays"


def test_pieces_in_shared_memory_are_read_as_copies() -> None:
    pieces = [b"head", b"", b"x" * 5000]
    shared = SharedPieces(pieces)
    assert read_pieces(shared.fd, shared.lengths) == pieces
    nothing = SharedPieces([b""])
    assert read_pieces(nothing.fd, nothing.lengths) == [b""]


@pytest.mark.parametrize("n_values", [5, 50_000])
def test_answers_arrive_with_their_contents_states_and_errors(n_values: int) -> None:
    """Small ones through the socket, large ones in shared memory."""
    record = a_record(n_values)
    sent = [NodeAnswer(record, b"state"), NodeAnswer(None, b"", (203, "no disk")), NodeAnswer(RecordDict(), b"s")]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_answers(Channel(ours), [(one, [] if one.content is None else pieces_of(one.content)) for one in sent])
        message = Channel(theirs).receive()
    assert len(message.fds) == (n_values > 5)
    found = answers_of(message)
    assert [(one.content, one.state, one.error) for one in found] == [
        (one.content, one.state, one.error) for one in sent
    ]
