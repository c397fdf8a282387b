"""What a ServerApp sends first: it runs with a grid that keeps the first message of training, and nobody trains."""

import uuid
from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from umbel.client.flower.calls import FirstMessage
from umbel.client.flower.host import AppHost, arrays_of
from umbel.client.flower.project import Config, ConfigValue

_NODES = 10_000  # so that a strategy which waits for enough nodes does not wait
_RUN, _SERVER = 1, 1


class FirstMessageGrid(Grid):
    """`tell`: gets the first message of training, and must not return. `host`: the project's ClientApp, which some
    strategies ask for the first model.
    """

    def __init__(self, tell: Callable[[FirstMessage], None], host: Callable[[], AppHost]) -> None:
        self._tell, self._host = tell, host
        self._run = Run.create_empty(run_id=_RUN)
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return range(2, 2 + _NODES)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return (NodeInfo(node_id=node) for node in self.get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = [*messages]
        for message in sent:
            if message.metadata.message_type.partition(".")[0] == MessageType.TRAIN:
                self._tell(_first(message.content))
        ids = [str(uuid.uuid4()) for _ in sent]
        self._replies |= {name: self._reply(message) for name, message in zip(ids, sent, strict=True)}
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, message: Message) -> Message:
        """What a node answers before any training: its parameters, if the strategy asks for them; else an error."""
        if message.metadata.message_type == "get_parameters":
            return self._host().reply(message)
        nobody = Error(ErrorCode.MESSAGE_UNAVAILABLE, "no node takes part: umbel only asks for the first model")
        return Message(nobody, reply_to=message)


def first_message_of(
    app: ServerApp, run_config: Config, tell: Callable[[FirstMessage], None], host: Callable[[], AppHost]
) -> None:
    """Run the app until it sends its first message of training. Returns if it never does."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = _RUN, _SERVER, 0
    context = Context(run_id=_RUN, node_id=_SERVER, node_config={}, state=RecordDict(), run_config=dict(run_config))
    app(FirstMessageGrid(tell, host), context)


def _first(content: RecordDict) -> FirstMessage:
    records = [*content.array_records.values()]
    arrays = {name: array for record in records for name, array in arrays_of(record).items()}
    config: dict[str, ConfigValue] = {}
    for record in content.config_records.values():
        config |= {key: value for key, value in record.items() if isinstance(value, bool | int | float | str)}
    return FirstMessage(arrays, config)
