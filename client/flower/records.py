"""Flower's messages and records, made and read outside Flower's own processes."""

from collections.abc import Callable
from typing import cast

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto

SAMPLES = "num-examples"  # Flower's name, in a reply, for the number of samples
SERVER_NODE = 1
TTL_S = 43_200.0  # of a message, as Flower has it by default

# The declared constructors raise an error outside Flower's own processes. This one does not.
_made = cast(Callable[..., Message], Message)


def message_with(metadata: Metadata, content: RecordDict) -> Message:
    """A message with these metadata."""
    return _made(content=content, metadata=metadata)


def error_with(metadata: Metadata, error: Error) -> Message:
    """An error reply with these metadata."""
    return _made(error=error, metadata=metadata)


def packed(record: RecordDict) -> bytes:
    """As Flower's own wire has it."""
    data: bytes = recorddict_to_proto(record).SerializeToString()
    return data


def unpacked(data: bytes) -> RecordDict:
    """The inverse of `packed`; no bytes are an empty record."""
    return recorddict_from_proto(RecordDictProto.FromString(data)) if data else RecordDict()
