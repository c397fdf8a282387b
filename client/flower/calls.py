"""What a ClientApp is asked and what it answers, without any type of Flower's: it travels between two processes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from umbel.client.channel import ChannelMessage
from umbel.client.errors import ClientError
from umbel.client.flower.project import Config
from umbel.client.local.arrays import Array

CallKind: TypeAlias = Literal["train", "evaluate", "query"]
Numbers: TypeAlias = int | float | list[int] | list[float]
StopQuestion: TypeAlias = Callable[[], str | None]  # why to stop, in words; None: go on


@dataclass(frozen=True, slots=True)
class Call:
    """One message to a ClientApp. `state`: its `context.state` as `AppReply` gave it; empty: none yet."""

    kind: CallKind
    config: Config
    arrays: Mapping[str, Array] = field(default_factory=dict[str, Array], repr=False)
    state: bytes = field(default=b"", repr=False)
    run: str = ""
    client: str = ""
    round: int = 1
    seed: int = 0

    def packed(self) -> tuple[dict[str, Any], list[Array]]:
        """The fields and arrays of a message."""
        fields = {"type": self.kind, "config": dict(self.config), "names": [*self.arrays], "run": self.run}
        arrays = [*self.arrays.values(), _bytes(self.state)]
        return {**fields, "client": self.client, "round": self.round, "seed": self.seed}, arrays

    @classmethod
    def of(cls, message: ChannelMessage) -> "Call":
        """The inverse of `packed`."""
        told, (*arrays, state) = message.fields, message.arrays
        named, whose = dict(zip(told["names"], arrays, strict=True)), (told["run"], told["client"])
        return cls(told["type"], told["config"], named, state.tobytes(), *whose, told["round"], told["seed"])


@dataclass(frozen=True, slots=True)
class AppReply:
    """A ClientApp's reply. `metrics`: all but the number of examples. `arrays`: empty unless it trained."""

    sample_count: int | None  # None: the reply does not say it
    metrics: Mapping[str, Numbers]
    arrays: Mapping[str, Array] = field(default_factory=dict[str, Array], repr=False)
    state: bytes = field(default=b"", repr=False)

    def packed(self) -> tuple[dict[str, Any], list[Array]]:
        """The fields and arrays of a message."""
        fields = {"sample_count": self.sample_count, "metrics": dict(self.metrics), "names": [*self.arrays]}
        return fields, [*self.arrays.values(), _bytes(self.state)]

    @classmethod
    def of(cls, message: ChannelMessage) -> "AppReply":
        """The inverse of `packed`."""
        told, (*arrays, state) = message.fields, message.arrays
        named = dict(zip(told["names"], arrays, strict=True))
        return cls(told["sample_count"], told["metrics"], named, state.tobytes())


@dataclass(frozen=True, slots=True)
class FirstMessage:
    """`arrays`: of the first model, in the app's order. `config`: what the strategy tells clients that train.

    `strategy`: the name of its class with the module; empty if the ServerApp has none.
    """

    arrays: Mapping[str, Array] = field(repr=False)
    config: Config
    strategy: str = ""


class AppStopped(ClientError):
    """The call was ended before the app had answered. The text is the reason."""


class AppFailed(Exception):
    """The app raised an error, or its reply cannot be used. `public`: what of it the coordinator may see."""

    def __init__(self, what: str, public: str) -> None:
        super().__init__(what)
        self.public = public


class AppCaller(Protocol):
    """Calls one ClientApp, one call at a time."""

    def call(self, call: Call, should_stop: StopQuestion) -> AppReply:
        """Raises `AppFailed`, and `AppStopped` when `should_stop` gives a reason before the app answers."""
        ...

    def close(self) -> None: ...


def _bytes(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8)
