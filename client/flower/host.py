"""Calls a ClientApp as Flower would: builds its messages and its context, and reads its replies."""

import importlib
import logging
import sys
import time
import uuid
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import DEFAULT_ACTION
from flwr.common.constant import MessageTypeLegacy
from flwr.compat.common import recorddict_compat as legacy
from flwr.compat.common.typing import EvaluateIns, FitIns, GetPropertiesIns, Parameters

from umbel.aggregation.seeds import derive_seed
from umbel.client.flower.calls import AppFailed, AppReply, Call, CallKind, Numbers
from umbel.client.flower.project import Config
from umbel.client.flower.records import SAMPLES, SERVER_NODE, TTL_S, message_with, packed, unpacked
from umbel.client.local.arrays import Array
from umbel.client.local.devices import seeded

ARRAYS, CONFIG = "arrays", "config"  # the names of Flower's own strategies
log = logging.getLogger("umbel.client")
_KINDS: tuple[CallKind, ...] = ("train", "evaluate", "query")


class AppHost:
    """One ClientApp in this process."""

    def __init__(self, app: ClientApp, run_config: Config, node_config: Config) -> None:
        self._app = app
        self._run_config, self._node_config = dict(run_config), dict(node_config)
        self._is_legacy = app._call is not None

    def answer(self, call: Call) -> AppReply:
        """Raises `AppFailed` for a reply that cannot be used, and whatever the app raises."""
        context = self._context(call.run, call.client, call.state)
        with seeded(derive_seed(call.seed, "flower", call.kind), torch.device("cpu")):
            reply: object = self._app(self._message(call), context)
        if not isinstance(reply, Message):
            raise _unusable(f"{call.kind} returned a {type(reply).__name__}; a ClientApp returns a Message")
        if reply.has_error():
            raise _unusable(f"{call.kind} replied with the error {reply.error.code}: {reply.error.reason}")
        return _answer(call, reply.content, packed(context.state), is_legacy=self._is_legacy)

    def _context(self, run: str, client: str, state: bytes) -> Context:
        return Context(
            run_id=number_of(run),
            node_id=number_of(client),
            node_config=dict(self._node_config),
            state=_state_of(state),
            run_config=dict(self._run_config),
        )

    @property
    def kinds(self) -> list[CallKind]:
        """What the app can be asked."""
        if self._is_legacy:
            return ["train", "evaluate", "query"]
        return [kind for kind in _KINDS if f"{kind}.{DEFAULT_ACTION}" in self._app._registered_funcs]

    def reply(self, message: Message) -> Message:
        """The app's reply to a message of a strategy, before any training."""
        return self._app(message, self._context("", "", b""))

    def _message(self, call: Call) -> Message:
        is_properties = self._is_legacy and call.kind == "query"
        metadata = Metadata(
            run_id=number_of(call.run),
            message_id=str(uuid.uuid4()),
            src_node_id=SERVER_NODE,
            dst_node_id=number_of(call.client),
            reply_to_message_id="",
            group_id=str(call.round),
            created_at=time.time(),
            ttl=TTL_S,
            message_type=MessageTypeLegacy.GET_PROPERTIES if is_properties else call.kind,
        )
        return message_with(metadata, _content(call, is_legacy=self._is_legacy))


@contextmanager
def modules_of(folder: Path, specs: Iterable[str]) -> Generator[None]:
    """Import an app's modules anew inside, and forget them after it: another app may have modules of the same names."""
    names = {spec.partition(":")[0].partition(".")[0] for spec in specs}
    others = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in names}
    before = {*sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in {*sys.modules} - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(folder):
                del sys.modules[name]
        sys.modules.update(others)


def load_object(spec: str, kind: type, folder: Path) -> Any:
    """What `spec` names among the modules of the app's folder.

    Raises `AppFailed` if it is no `kind`, and whatever the import raises.
    """
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))
    module, _, attributes = spec.partition(":")
    _forget_others(module.partition(".")[0], folder)
    found: object = importlib.import_module(module)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise _unusable(f"{spec}: module {module!r} has no {attributes!r}")
        found = getattr(found, attribute)
    if not isinstance(found, kind):
        raise _unusable(f"{spec} is a {type(found).__name__}; it must be a flwr {kind.__name__}")
    return found


def _forget_others(package: str, folder: Path) -> None:
    """Forget modules of another app with this name, if the app in `folder` has its own."""
    known = getattr(sys.modules.get(package), "__file__", None)
    is_here = (folder / package).is_dir() or (folder / f"{package}.py").is_file()
    if known is not None and is_here and not Path(known).is_relative_to(folder):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def number_of(name: str) -> int:
    """A number of 63 bits for a name: Flower's ids of nodes and runs are numbers."""
    return derive_seed(0, "flower id", name)


def array_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    return ArrayRecord({name: FlowerArray(np.asarray(array, order="C")) for name, array in arrays.items()})


def arrays_of(record: ArrayRecord) -> dict[str, Array]:
    return {name: array.numpy() for name, array in record.items()}


def _content(call: Call, *, is_legacy: bool) -> RecordDict:
    """The content of the message. For a legacy app as Flower's own bridge makes it."""
    if not is_legacy:
        content = RecordDict({CONFIG: ConfigRecord(dict(call.config))})
        if call.kind != "query":
            content[ARRAYS] = array_record(call.arrays)
        return content
    config: dict[str, Any] = dict(call.config)
    parameters = legacy.arrayrecord_to_parameters(array_record(call.arrays), keep_input=True)
    match call.kind:
        case "train":
            return legacy.fitins_to_recorddict(FitIns(parameters, config), keep_input=True)
        case "evaluate":
            return legacy.evaluateins_to_recorddict(EvaluateIns(parameters, config), keep_input=True)
        case "query":
            return legacy.getpropertiesins_to_recorddict(GetPropertiesIns(config))


def _answer(call: Call, content: RecordDict, state: bytes, *, is_legacy: bool) -> AppReply:
    if is_legacy:
        return _legacy_answer(call, content, state)
    metrics = [*content.metric_records.values()]
    if call.kind != "query" and len(metrics) != 1:
        raise _unusable(
            f"the reply of {call.kind} has {len(metrics)} MetricRecords; it must have one, with {SAMPLES!r}"
        )
    found: dict[str, Numbers] = {}
    for record in metrics:
        found |= {key: [*value] if isinstance(value, list) else value for key, value in record.items()}
    count = found.pop(SAMPLES, None)
    if call.kind != "query" and not isinstance(count, int):
        raise _unusable(f"the MetricRecord of {call.kind} has no whole number {SAMPLES!r}, which weights the client")
    new = _new_arrays(content) if call.kind == "train" else dict[str, Array]()
    return AppReply(count if isinstance(count, int) else None, found, new, state)


def _new_arrays(content: RecordDict) -> dict[str, Array]:
    records = [*content.array_records.values()]
    if len(records) != 1:
        raise _unusable(f"the reply of train has {len(records)} ArrayRecords; it must have one, with the new arrays")
    return arrays_of(records[0])


def _legacy_answer(call: Call, content: RecordDict, state: bytes) -> AppReply:
    match call.kind:
        case "train":
            fit = legacy.recorddict_to_fitres(content, keep_input=True)
            new = _named(fit.parameters, [*call.arrays])
            return AppReply(fit.num_examples, _numbers(fit.metrics), new, state)
        case "evaluate":
            evaluation = legacy.recorddict_to_evaluateres(content)
            metrics = {"loss": float(evaluation.loss), **_numbers(evaluation.metrics)}
            return AppReply(evaluation.num_examples, metrics, {}, state)
        case "query":
            properties = legacy.recorddict_to_getpropertiesres(content).properties
            count = properties.get(SAMPLES, properties.get("num_examples"))
            return AppReply(count if isinstance(count, int) else None, _numbers(properties), {}, state)


def _named(parameters: Parameters, names: list[str]) -> dict[str, Array]:
    """A legacy client's list of arrays, by the names in whose order it got them."""
    record = legacy.parameters_to_arrayrecord(parameters, keep_input=True)
    arrays = [*arrays_of(record).values()]
    if len(arrays) != len(names):
        raise _unusable(f"fit returned {len(arrays)} arrays, and the model has {len(names)}")
    return dict(zip(names, arrays, strict=True))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Numbers]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def _state_of(kept: bytes) -> RecordDict:
    try:
        return unpacked(kept)
    except Exception as error:  # protobuf's, or whatever Flower makes of other bytes
        log.warning(
            "the context.state that was kept for this run cannot be read (%s): the app starts with an empty one",
            type(error).__name__,
        )
        return RecordDict()


def _unusable(what: str) -> AppFailed:
    return AppFailed(what, "the Flower app's answer cannot be used; see the client's log")
