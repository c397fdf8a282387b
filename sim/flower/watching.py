"""Sees what a ServerApp keeps to itself: the model that it ends with, and what it measures of each round's model.

Nobody passes these on: a Flower strategy returns them to the app's own code. So Flower's `start`, and the methods of
its older `Server` and `History`, are replaced while the app runs, by ones that do the same and tell it here.

The older `Server` also sends its messages one by one from several threads. As messages of one round they are sent at
once here, because they are one attempt. And it waits for nodes in real time, while another thread looks for them. Here
the wait itself looks, so that virtual time passes.
"""

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, Message, MessageType, MetricRecord
from flwr.compat.common import recorddict_compat as legacy
from flwr.compat.common.typing import Code
from flwr.server import server as legacy_server
from flwr.server.client_manager import SimpleClientManager
from flwr.server.history import History
from flwr.server.server import Server
from flwr.serverapp.strategy import Strategy

from umbel.sim.flower.attempts import is_metric
from umbel.sim.flower.grid import SimulatedGrid

Scored = Callable[[int, dict[str, float]], None]


@dataclass(slots=True)
class Observed:
    """`scored`, `expected`: are told of measured models, and of the number of rounds. `arrays`: of the model that the
    ServerApp has ended with, if it showed one.
    """

    scored: Scored
    expected: Callable[[int], None]
    arrays: ArrayRecord | None = None


@contextmanager
def watching(grid: SimulatedGrid, seen: Observed) -> Generator[None]:
    """See, inside."""
    starts, legacy_fit = Strategy.start, Server.fit
    add_loss, add_metrics = History.add_loss_centralized, History.add_metrics_centralized
    losses = dict[int, float]()

    def begins(n_rounds: object) -> int:
        n_before = grid.begin_strategy()
        if isinstance(n_rounds, int):  # else Flower will complain
            seen.expected(n_before + n_rounds)
        return n_before

    def start(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(starts).bind(*args, **kwargs)
        given.apply_defaults()
        n_before, evaluate_fn = begins(given.arguments["num_rounds"]), given.arguments["evaluate_fn"]
        if evaluate_fn is not None:
            given.arguments["evaluate_fn"] = _told(evaluate_fn, seen.scored, n_before)
        result = starts(*given.args, **given.kwargs)
        seen.arrays = result.arrays
        return result

    def fit(self: Server, num_rounds: int, *args: Any, **kwargs: Any) -> Any:
        begins(num_rounds)
        result = legacy_fit(self, num_rounds, *args, **kwargs)
        seen.arrays = legacy.parameters_to_arrayrecord(self.parameters, keep_input=True)
        return result

    def loss(self: History, server_round: int, loss: float) -> None:
        losses[server_round] = loss
        add_loss(self, server_round, loss)

    def metrics(self: History, server_round: int, metrics: Any) -> None:
        found = {"loss": losses.get(server_round), **metrics}
        seen.scored(server_round, _numbers(found))
        add_metrics(self, server_round, metrics)

    with ExitStack() as stack:
        for owner, name, replacement in (
            (Strategy, "start", start),
            (Server, "fit", fit),
            (History, "add_loss_centralized", loss),
            (History, "add_metrics_centralized", metrics),
            (SimpleClientManager, "wait_for", _waiting(grid)),
            (legacy_server, "fit_clients", _at_once(grid, MessageType.TRAIN)),
            (legacy_server, "evaluate_clients", _at_once(grid, MessageType.EVALUATE)),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield


def _told(
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None], scored: Scored, n_before: int
) -> Callable[..., Any]:
    def told(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        found = evaluate_fn(server_round, arrays)
        if found is not None:
            scored(n_before + server_round, _numbers(found))
        return found

    return told


def _numbers(metrics: Any) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if is_metric(value, name)}


def _waiting(grid: SimulatedGrid) -> Callable[..., bool]:
    """What stands in for `SimpleClientManager.wait_for`. `timeout`: virtual seconds."""

    def wait_for(self: SimpleClientManager, num_clients: int, timeout: float = 86_400) -> bool:
        began = grid.now_s
        while self.num_available() < num_clients:  # Flower's thread has made this ask the grid
            if grid.now_s - began > timeout:
                return False
        return True

    return wait_for


def _at_once(grid: SimulatedGrid, kind: str) -> Callable[..., Any]:
    """What stands in for `fit_clients` or `evaluate_clients` of Flower's older server."""
    packed: Any = {
        MessageType.TRAIN: legacy.fitins_to_recorddict,
        MessageType.EVALUATE: legacy.evaluateins_to_recorddict,
    }[kind]

    def sent(client_instructions: Sequence[Any], max_workers: Any, timeout: float | None, group_id: int) -> Any:
        contents = {id(ins): packed(ins, keep_input=True) for _, ins in client_instructions}  # most share one
        messages = [
            Message(contents[id(ins)], proxy.node_id, kind, group_id=str(group_id))
            for proxy, ins in client_instructions
        ]
        proxies = {proxy.node_id: proxy for proxy, _ in client_instructions}
        return _results(grid.send_and_receive(messages, timeout=timeout), proxies, kind)

    return sent


def _results(replies: Iterable[Message], proxies: Mapping[int, Any], kind: str) -> tuple[list[Any], list[Any]]:
    """Results and failures, as the older strategies take them."""
    results, failures = list[Any](), list[Any]()
    for reply in replies:
        if reply.has_error():
            failures.append(ValueError(reply.error.reason))
            continue
        if kind == MessageType.TRAIN:
            found: Any = legacy.recorddict_to_fitres(reply.content, keep_input=False)
        else:
            found = legacy.recorddict_to_evaluateres(reply.content)
        (results if found.status.code is Code.OK else failures).append((proxies[reply.metadata.src_node_id], found))
    return results, failures
