"""Messages, contents and ClientApps for the tests of the codec, and a grid whose nodes run one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.supercore.task_identity import TaskIdentity

from umbel.client.flower.local_grid import LocalGrid
from umbel.client.flower.records import message_with, packed, unpacked

Arrays = Mapping[str, npt.NDArray[Any]]
Training = Callable[[Arrays, int], Arrays]
Spoiling = Callable[[int, RecordDict], RecordDict]
FIRST: Arrays = {
    "w.weight": np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30),
    "w.bias": np.zeros(20, dtype=np.float32),
    "n": np.array(3, dtype=np.int64),
}


def record_of(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(one)) for name, one in arrays.items()})


def arrays_in(record: ArrayRecord) -> dict[str, npt.NDArray[Any]]:
    return {name: one.numpy() for name, one in record.items()}


def message_of(content: RecordDict, kind: str = "train") -> Message:
    """As a node gets it."""
    metadata = Metadata(1, "m", 1, 2, "", "", 0.0, 1e9, kind)
    return message_with(metadata, content)


def context_of(node: int = 0) -> Context:
    return Context(1, node, {"partition-id": node}, RecordDict(), {})


def moved(arrays: Arrays, node: int) -> Arrays:
    """What a node trains: Gaussian steps of its own, and a counter that counts four batches more."""
    draws = np.random.default_rng(node)
    return {
        name: one + draws.normal(0, 0.01, one.shape).astype(one.dtype) if one.dtype.kind == "f" else one + 4
        for name, one in arrays.items()
    }


def app_of(train: Training = moved, mods: Sequence[Mod] = ()) -> ClientApp:
    """A ClientApp that trains so, and says at each evaluation the mean of what it got."""
    app = ClientApp(mods=[*mods])

    @app.train()
    def _(message: Message, context: Context) -> Message:
        new = train(arrays_in(message.content["arrays"]), int(context.node_config["partition-id"]))
        metrics = MetricRecord({"num-examples": 10, "train_loss": 0.5})
        return Message(RecordDict({"arrays": record_of(new), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def _(message: Message, context: Context) -> Message:
        mean = float(np.mean(message.content["arrays"]["w.weight"].numpy()))
        metrics = MetricRecord({"num-examples": 10, "mean": mean})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def over_the_wire(content: RecordDict) -> RecordDict:
    """As the other end reads it."""
    return unpacked(packed(content))


class AppGrid(LocalGrid):
    """A node for each app; contexts stay. `spoil`: what becomes of a node's reply on its way."""

    def __init__(self, apps: Sequence[ClientApp], spoil: Spoiling = lambda _node, content: content) -> None:
        super().__init__()
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 0  # messages can be made only so
        self._apps, self._spoil = apps, spoil
        self.contexts = [context_of(node) for node in range(len(apps))]
        self.sent = list[RecordDict]()
        self.replies = list[RecordDict]()

    def get_node_ids(self) -> Iterable[int]:
        return range(2, 2 + len(self._apps))

    def answers(self, messages: Sequence[Message], *, timeout_s: float | None) -> Sequence[Message | None]:
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id - 2
        self.sent.append(message.content)
        here = message_with(message.metadata, over_the_wire(message.content))
        reply = self._apps[node](here, self.contexts[node])
        if reply.has_error():
            return Message(reply.error, reply_to=message)
        self.replies.append(reply.content)
        return Message(self._spoil(node, over_the_wire(reply.content)), reply_to=message)


def arrays_bytes(content: RecordDict) -> int:
    return sum(len(one.data) for record in content.array_records.values() for one in record.values())


def train_content(arrays: Arrays = FIRST, **more: Any) -> RecordDict:
    return RecordDict({"arrays": record_of(arrays), "config": ConfigRecord({"server-round": 1, **more})})
