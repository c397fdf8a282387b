"""Calls a ClientApp in this process, for one simulated node after another."""

import logging
import traceback
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from umbel.client.flower.calls import AppFailed
from umbel.client.flower.host import load_object
from umbel.client.flower.records import message_with, packed, unpacked
from umbel.client.local.devices import seeded
from umbel.client.user_code import where_raised
from umbel.sim.engines.flower.pieces import pieces_of
from umbel.sim.engines.flower.work import NodeAnswer, NodeApp, NodeCall
from umbel.sim.engines.work import EngineError

log = logging.getLogger("umbel.sim")


class Nodes:
    """The nodes of an app. Raises `EngineError` if the app cannot be made."""

    def __init__(self, app: NodeApp) -> None:
        self._app, self._made = app, _made(app)
        self._logged = set[object]()  # kinds and places of the errors whose traceback is in the log

    def answer(self, call: NodeCall, content: RecordDict) -> tuple[NodeAnswer, list[bytes]]:
        """The app's answer, and the pieces of its content, which are none for an error. `content`: of the message,
        which the app may change. Whatever the app raises or leaves behind is the answer of this node alone.
        """
        metadata = Metadata(**call.metadata)
        context = Context(
            run_id=metadata.run_id,
            node_id=metadata.dst_node_id,
            node_config={"partition-id": call.number, "num-partitions": self._app.n_nodes},
            state=unpacked(call.state),
            run_config=dict(self._app.run_config),
        )
        try:
            with seeded(call.seed, torch.device("cpu")):
                reply: object = self._made(message_with(metadata, content), context)
        except KeyboardInterrupt:  # of the user
            raise
        except BaseException as error:  # whatever the app raises
            self._log(call.number, error)
            return _failed(call, f"its own code failed with {type(error).__name__}: {error}"), []
        if not isinstance(reply, Message):
            return _failed(call, f"it returned a {type(reply).__name__}; a ClientApp returns a Message"), []
        if not isinstance(state := cast(object, context.state), RecordDict):
            return _failed(call, f"its context.state is a {type(state).__name__}; Flower keeps a RecordDict"), []
        try:
            return _answer(reply, context)
        except Exception as error:  # whatever the app has put there
            self._log(call.number, error)
            return _failed(call, f"its reply or state cannot be sent: {type(error).__name__}: {error}"), []

    def _log(self, number: int, error: BaseException) -> None:
        """Log the first error of its kind and place. Each node's own words go to the ServerApp."""
        where, frames = where_raised(error), traceback.extract_tb(error.__traceback__)
        place = type(error), *((one.filename, one.lineno) for one in frames[-1:])
        if place not in self._logged:
            self._logged.add(place)
            text = "".join(traceback.format_exception(error)).rstrip()
            log.error("node %d failed with %s\n%s", number, where, text)


def copied(record: RecordDict) -> RecordDict:
    """A copy that an app may change; the bytes of arrays are shared, because nothing can change them."""
    return RecordDict({name: _copy(one) for name, one in record.items()})


def _copy(one: ArrayRecord | MetricRecord | ConfigRecord) -> ArrayRecord | MetricRecord | ConfigRecord:
    if isinstance(one, ArrayRecord):
        return ArrayRecord({name: replace(array) for name, array in one.items()})
    return MetricRecord(dict(one)) if isinstance(one, MetricRecord) else ConfigRecord(dict(one))


def _answer(reply: Message, context: Context) -> tuple[NodeAnswer, list[bytes]]:
    """Raises whatever Flower raises for records that its wire cannot hold."""
    state = packed(context.state)
    if reply.has_error():
        return NodeAnswer(None, state, (int(reply.error.code), str(reply.error.reason or ""))), []
    return NodeAnswer(reply.content, state), pieces_of(reply.content)


def _made(app: NodeApp) -> ClientApp:
    try:
        found: ClientApp = load_object(app.name, ClientApp, Path(app.folder))
    except AppFailed as error:
        raise EngineError(str(error)) from error
    except KeyboardInterrupt:  # of the user
        raise
    except BaseException as error:  # whatever the import raises
        raise EngineError(f"the ClientApp {app.name} cannot be imported: {where_raised(error)}") from error
    return found


def _failed(call: NodeCall, reason: str) -> NodeAnswer:
    return NodeAnswer(None, call.state, (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason))
