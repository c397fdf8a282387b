"""The `Client` objects that are alive in one process: the least recently used one goes when there are too many."""

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import State
from umbel.aggregation.plans.tensors import TensorRules
from umbel.client.app import Client
from umbel.client.errors import WorkRefused
from umbel.client.training.probe import memory_free_bytes
from umbel.client.training.shared_state import SharedState
from umbel.sim.engines.clients.app import ClientApp, ClientShare
from umbel.sim.engines.work import EngineError

_SHARE_OF_MEMORY, _BYTES_MAX = 4, 1 << 30  # clients get at most a quarter of the free memory, and 1 GiB
_OBJECTS_MAX = 200_000  # that are looked at for a client's size


@dataclass(frozen=True, slots=True)
class LiveClient:
    """A client in memory. `first_private`: its private tensors as they were made."""

    number: int
    app: Client
    shared: SharedState
    first_private: State


class LiveClients:
    """Makes clients when they are needed, and keeps as many as fit.

    `n_alive`: the number of clients to keep. None: as many as fit into a quarter of the free memory and into 1 GiB. The
    size of the second client is measured for this. `n_processes`: the number of processes that share this memory.
    `free_bytes`: returns the free memory, or None if it is unknown.
    """

    def __init__(
        self,
        app: ClientApp,
        n_alive: int | None,
        n_processes: int = 1,
        free_bytes: Callable[[], int | None] = memory_free_bytes,
    ) -> None:
        self._app, self._n_alive, self._n_processes, self._free_bytes = app, n_alive, n_processes, free_bytes
        self._clients = OrderedDict[int, LiveClient]()
        self._seen: set[int] | None = set()  # what is known of sizes; None once they are measured
        self._bytes_each, self._bytes_gone = 0, 0

    def __len__(self) -> int:
        return len(self._clients)

    def of(self, number: int, share: Callable[[], ClientShare | None]) -> LiveClient:
        """The client of this number; `share` gives its data if it must be made. Raises `EngineError`."""
        if (found := self._clients.get(number)) is not None:
            self._clients.move_to_end(number)
            return found
        made = self._app.make(number, share())
        shared = SharedState(made)
        found = LiveClient(number, made, shared, shared.private())
        self._make_room(made)
        self._clients[number] = found
        return found

    def under(self, rules: TensorRules | None, layout: Layout, found: LiveClient) -> LiveClient:
        """The client in a run with these rules and this layout. Raises `EngineError` if its model does not fit them."""
        if found.shared.rules != rules:
            try:
                shared = found.shared.under(rules)
            except WorkRefused as error:
                raise EngineError(f"client {found.number}: {error}") from error
            found = self._clients[found.number] = LiveClient(found.number, found.app, shared, shared.private())
        if found.shared.layout != layout and (difference := layout.difference(found.shared.layout)):
            raise EngineError(other_model(self._app, found.number, difference))
        return found

    def _make_room(self, made: Client) -> None:
        if self._n_alive is None and self._seen is not None:
            self._measure(made)
        while self._clients and self._n_alive is not None and len(self._clients) >= self._n_alive:
            self._clients.popitem(last=False)
            self._bytes_gone += self._bytes_each
        if self._bytes_gone > _BYTES_MAX:  # cycles of objects would otherwise stay for long
            gc.collect()
            self._bytes_gone = 0

    def _measure(self, made: Client) -> None:
        """Count the bytes of the first client, and then what the second has beside what both share."""
        assert self._seen is not None
        self._bytes_each = bytes_of(made, self._seen)
        if not self._clients:
            return
        self._seen = None
        free = self._free_bytes()
        room = _BYTES_MAX if free is None else min(_BYTES_MAX, free // _SHARE_OF_MEMORY)
        self._n_alive = max(1, room // self._n_processes // max(1, self._bytes_each))


def other_model(app: ClientApp, number: int, difference: str) -> str:
    """Why clients of different models cannot be simulated, in words."""
    return (
        f"the model of client {number} is not the model of client 0: {difference}; all clients of {app.name} must have "
        "the same tensors, because the coordinator averages them"
    )


def bytes_of(client: object, seen: set[int]) -> int:
    """The memory of an object and of all that it refers to, in bytes, without what is in `seen`; adds it to `seen`.

    Modules, classes and the globals of functions are not followed. Memory of other libraries' objects is not counted.
    """
    waiting, n_bytes, n_left = [client], 0, _OBJECTS_MAX
    while waiting and n_left:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, ModuleType | type | BuiltinFunctionType):
            continue
        seen.add(id(one))
        n_left -= 1
        n_bytes += _own_bytes(one, seen)
        waiting.extend(_parts_of(one))
    return n_bytes


def _own_bytes(one: Any, seen: set[int]) -> int:
    if isinstance(one, torch.Tensor):
        storage = one.untyped_storage()
        if storage.device.type == "meta" or storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()
    if isinstance(one, np.ndarray) and one.base is None:
        return int(one.nbytes)
    return sys.getsizeof(one, 0)


def _parts_of(one: object) -> list[Any]:
    if isinstance(one, FunctionType):
        return [*(cell for cell in one.__closure__ or ()), *(one.__defaults__ or ())]
    return gc.get_referents(one)
