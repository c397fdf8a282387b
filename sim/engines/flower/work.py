"""What the nodes of a simulated Flower app are asked, and what they answer."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from flwr.app import Array, RecordDict

from umbel.client.flower.project import Config
from umbel.sim.engines.flower.pieces import SharedPieces, pieces_of


@dataclass(frozen=True, slots=True)
class NodeApp:
    """Which ClientApp the nodes have. `folder`: of its project; `name`: "module:attribute"."""

    folder: str
    name: str
    run_config: Config
    n_nodes: int

    def to_json(self) -> dict[str, Any]:
        return {"folder": self.folder, "name": self.name, "run_config": dict(self.run_config), "n_nodes": self.n_nodes}


@dataclass(eq=False)
class SentContent:
    """The content of messages, which several nodes get. `number`: no other content of the run has it."""

    number: int
    record: RecordDict = field(repr=False)

    @cached_property
    def shared(self) -> SharedPieces:
        """Its pieces, in memory that other processes can read."""
        return SharedPieces(pieces_of(self.record))

    def close(self) -> None:
        """Release `shared`, which is made again when it is asked for again."""
        if (made := self.__dict__.pop("shared", None)) is not None:
            made.close()

    @cached_property
    def n_bytes(self) -> int:
        """Its length on a wire."""
        return bytes_of(self.record)


@dataclass(frozen=True, slots=True)
class NodeCall:
    """A message to a node. `number`: of the node, from 0. `metadata`: of the message, but for what is equal for all.

    `state`: what the node keeps, as its last answer gave it; empty: none yet.
    """

    number: int
    content: SentContent
    metadata: Mapping[str, Any]
    seed: int
    state: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """A node's reply. `error`: Flower's code and the reason, if there is no content."""

    content: RecordDict | None = field(repr=False)
    state: bytes = field(repr=False)
    error: tuple[int, str] | None = None


class FlowerEngine(Protocol):
    """Calls the ClientApps of nodes. `name`: as in an experiment's file; `why`: why it was chosen, in words.

    The same calls give the same answers, however they are divided among processes.
    """

    @property
    def name(self) -> str: ...
    @property
    def why(self) -> str: ...

    def run(self, calls: Sequence[NodeCall]) -> Generator[tuple[int, NodeAnswer]]:
        """Make all calls, each to another node; the answers with their positions, in any order.

        An error that the app raises is an answer. Raises `EngineError` if the app cannot be made, or its process dies
        again and again.
        """
        ...

    def close(self) -> None:
        """Release processes and memory."""
        ...


def bytes_of(record: RecordDict) -> int:
    """Roughly the length on a wire: the bytes of arrays and texts, and some for each name and number."""
    total = 0
    for name, one in record.items():
        total += len(name)
        for key, value in one.items():
            total += len(key) + _bytes_of_value(value.data if isinstance(value, Array) else value)
    return total


_NUMBER_BYTES = 12  # with its field, as protobuf writes it


def _bytes_of_value(value: object) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    return sum(map(_bytes_of_value, value)) if isinstance(value, list) else _NUMBER_BYTES
