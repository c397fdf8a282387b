"""The Flower mod that compresses what a training returns."""

import logging

from flwr.app import Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode

from umbel.aggregation.codec.update_codec import UpdateCodec
from umbel.aggregation.errors import LayoutError, NonFiniteUpdate, UpdateOutOfRange
from umbel.client.flower.codec.arrays import StartArrays
from umbel.client.flower.codec.terms import RECORD, Terms, taken_out, written

log = logging.getLogger("umbel.client")


def compressing(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Reply with the weight change, compressed as the strategy `Compressed` asks; without its terms, change nothing.

    Put it first in `mods`: the mods after it, and the app, see an ordinary message and reply with ordinary arrays. The
    context is left alone. A model that cannot be compressed, or a change that is not finite, becomes an error reply.
    """
    try:
        if (terms := taken_out(message.content)) is None:
            return call_next(message, context)
        start = _start_of(message)
        codec = terms.codec(start.layout)
    except ValueError as error:
        return _refused(message, str(error))
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    return _compressed(message, reply, start, codec, terms)


def _compressed(message: Message, reply: Message, start: StartArrays, codec: UpdateCodec, terms: Terms) -> Message:
    """The reply with the update in place of its arrays, or an error reply."""
    records = reply.content.array_records
    if len(records) != 1:
        return _refused(message, f"the reply of the training has {len(records)} ArrayRecords; it must have one")
    ((name, local),) = records.items()
    try:
        update = b"".join(codec.encode(lambda: start.changes(local), terms.rank))
    except NonFiniteUpdate:
        return _refused(
            message, "the weights that the training returned hold a NaN or an infinity: try a smaller learning rate"
        )
    except UpdateOutOfRange as error:
        log.info("%s", error)  # it quotes a value, so only the node's log has it
        return _refused(
            message,
            f"a weight changed by more than max_abs, {terms.max_abs:g}: try a smaller learning rate, or give "
            "Compressed a larger max_abs",
        )
    except (LayoutError, ValueError) as error:
        return _refused(message, str(error))
    reply.content[name] = written(update)
    return reply


def _start_of(message: Message) -> StartArrays:
    records = message.content.array_records
    if len(records) != 1:
        raise ValueError(f"the message has {len(records)} ArrayRecords; the record {RECORD} needs one beside it")
    return StartArrays.of(*records.values())


def _refused(message: Message, why: str) -> Message:
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, f"umbel's compression: {why}"), reply_to=message)
