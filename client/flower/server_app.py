"""What a ServerApp sends first: it runs with a grid that keeps the first message of training, and nobody trains."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from flwr.app import Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.server.server import Server
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Strategy

from umbel.client.flower.calls import FirstMessage
from umbel.client.flower.host import AppHost, arrays_of
from umbel.client.flower.local_grid import LocalGrid, run_server_app
from umbel.client.flower.project import Config, ConfigValue

_NODES = 10_000  # so that a strategy which waits for enough nodes does not wait


class FirstMessageGrid(LocalGrid):
    """`tell`: gets the content of the first message of training, and must not return. `host`: the project's ClientApp,
    which some strategies ask for the first model.
    """

    def __init__(self, tell: Callable[[RecordDict], None], host: Callable[[], AppHost]) -> None:
        super().__init__()
        self._tell, self._host = tell, host

    def get_node_ids(self) -> Iterable[int]:
        return range(2, 2 + _NODES)

    def answers(self, messages: Sequence[Message], *, timeout_s: float | None) -> Sequence[Message | None]:
        for message in messages:
            if message.metadata.message_type.partition(".")[0] == MessageType.TRAIN:
                self._tell(message.content)
        return [self._reply(message) for message in messages]

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
    strategies = list[str]()
    with _naming(strategies):
        grid = FirstMessageGrid(lambda content: tell(_first(content, (strategies or [""])[-1])), host)
        run_server_app(app, grid, run_config)


@contextmanager
def _naming(names: list[str]) -> Generator[None]:
    """Note the class of each strategy that starts: nothing that it sends tells it."""
    start, fit = Strategy.start, Server.fit

    def noted(strategy: object) -> None:
        names.append(f"{type(strategy).__module__}.{type(strategy).__qualname__}")

    def started(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        noted(self)
        return start(self, *args, **kwargs)

    def fitted(self: Server, *args: Any, **kwargs: Any) -> Any:
        noted(self.strategy)
        return fit(self, *args, **kwargs)

    Strategy.start, Server.fit = started, fitted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Strategy.start, Server.fit = start, fit  # type: ignore[method-assign]


def _first(content: RecordDict, strategy: str) -> FirstMessage:
    records = [*content.array_records.values()]
    arrays = {name: array for record in records for name, array in arrays_of(record).items()}
    config: dict[str, ConfigValue] = {}
    for record in content.config_records.values():
        config |= {key: value for key, value in record.items() if isinstance(value, bool | int | float | str)}
    return FirstMessage(arrays, config, strategy)
