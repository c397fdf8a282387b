"""A Flower `Grid` in this process, and how a ServerApp is run over it."""

import threading
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Sequence

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from umbel.client.flower.project import Config
from umbel.client.flower.records import SERVER_NODE

RUN_NUMBER = 1


class LocalGrid(Grid):
    """A grid whose nodes have answered when `push_messages` returns.

    A message without an answer: `send_and_receive` leaves it out, as after its timeout; `pull_messages` has an error,
    because a ServerApp may pull until it has an answer to each message.

    A ServerApp may have several threads: their messages are answered one push after another. After `close`, a push
    raises `RuntimeError`.
    """

    def __init__(self) -> None:
        self._run = Run.create_empty(run_id=RUN_NUMBER)
        self._waiting: dict[str, Message] = {}
        self._answering = threading.RLock()
        self._is_closed = False

    @abstractmethod
    def answers(self, messages: Sequence[Message], *, timeout_s: float | None) -> Sequence[Message | None]:
        """What each message is answered with; None: nothing comes."""

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return (NodeInfo(node_id=node) for node in self.get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = [*messages]
        replies = self._replies_to(sent, None)
        lost = Error(ErrorCode.NODE_UNAVAILABLE, "the node did not answer in time")
        for message, reply in zip(sent, replies, strict=True):
            self._waiting[message.metadata.message_id] = reply or Message(lost, reply_to=message)
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = (self._waiting.pop(name, None) for name in message_ids)
        return [message for message in found if message is not None]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return [reply for reply in self._replies_to([*messages], timeout) if reply is not None]

    def _replies_to(self, messages: Sequence[Message], timeout_s: float | None) -> Sequence[Message | None]:
        for message in messages:  # as Flower's own grids do
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
        with self._answering:
            self.require_open()
            return self.answers(messages, timeout_s=timeout_s)

    def require_open(self) -> None:
        """Raise `RuntimeError` after `close`. A grid whose answers take long asks this between them."""
        if self._is_closed:
            raise RuntimeError(
                "the run is over, so its nodes answer no more: a ServerApp must wait for its own threads before its "
                "main function returns"
            )

    def close(self) -> None:
        """Refuse further messages, and wait until a thread whose messages are being answered has stopped."""
        self._is_closed = True
        with self._answering:
            return


def run_server_app(app: ServerApp, grid: Grid, run_config: Config) -> None:
    """Run the app to its end, as Flower's own process for it does. Raises whatever the app raises."""
    # Messages can be made only where a task is known.
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_NUMBER, SERVER_NODE, 0
    app(grid, Context(RUN_NUMBER, SERVER_NODE, {}, RecordDict(), dict(run_config)))
