"""What the engine of real clients costs beside their own `train`: workload A with all of its 100 clients in each round.

The bare loop is what a careful person writes around the same `Client` objects: load the weights, call `train` with the
same plan, take the weight change, and add it up. Both sides train the same clients with the same seeds on one thread,
in turns, and must come to the same sum.
"""

import math
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from umbel.aggregation.plans.assignment import Assignment, ModelRef, assignment_id
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.types import client_name
from umbel.client.app import Client
from umbel.client.local.plan import LocalPlan
from umbel.client.rounds.site_code import asked_of_site
from umbel.client.training.trainer import TorchClient
from umbel.sim.bench.measuring import in_child
from umbel.sim.bench.report import BenchRow, Hold
from umbel.sim.bench.simulate.timing import do_nothing, seeds_of
from umbel.sim.bench.simulate.workloads import Workload, workloads
from umbel.sim.engines.clients.app import ClientApp, ClientShare
from umbel.sim.engines.clients.sequential import SequentialClients
from umbel.sim.engines.clients.states import ClientStates
from umbel.sim.engines.clients.work import ClientGroup, ClientsWork, GlobalModel
from umbel.sim.engines.device import one_thread

_OVERHEAD_MAX = 1.10
_MEMORY = Hold(600, of="ours")  # megabytes
_TURNS, _TURNS_QUICK = 15, 5
OWN_WORDS = (
    "clients: workload A with all 100 clients in each round, as `Client` objects (TorchClient); the bare loop calls "
    "the same `train`"
)


def make_client(number: int, of: int, data: ClientShare) -> Client:
    """Client `number` of workload A."""
    return TorchClient(workload_a().recipe.make(), nn.CrossEntropyLoss(), data.train, device="cpu")


def workload_a() -> Workload:
    return next(one for one in workloads() if one.name == "A")


class OwnRounds:
    """Rounds of all clients of workload A, by the engine and by the bare loop."""

    def __init__(self) -> None:
        workload = workload_a()
        self.population = workload.population()
        everyone = np.arange(self.population.n_clients)
        self._seeds = np.array(seeds_of(workload, everyone, 1), dtype=np.uint64)
        self.app = ClientApp.of(f"{__name__}:make_client", len(everyone), 1, {}, has_data=True)
        self._group = ClientGroup.dealt(everyone, self.population)
        self._weights = torch.from_numpy(self.population.sizes(everyone)).float()
        first = ModelState.first(workload.recipe.make().state_dict())
        self._model, self._offer = GlobalModel(first.layout, first.published), _offer(workload, first)
        self._engine = SequentialClients(self.app)
        self._clients = list[Client]()  # of the bare loop

    def engine(self) -> Tensor:
        """The weighted sum of the changes, by the engine."""
        states = ClientStates()
        work = ClientsWork(self._group, self._offer, self._seeds, np.zeros(len(self._group), np.int64), states)
        total = torch.zeros(self._model.layout.n_values)
        for found in self._engine.train(self._model, work):
            total += self._weights[torch.from_numpy(found.positions)] @ found.values
        states.close()
        return total

    def bare_loop(self) -> Tensor:
        """The same by a plain loop over the same kind of clients."""
        if not self._clients:
            self._clients = [self.app.make(number, self._group.share(number)) for number in range(len(self._group))]
        start = self._model.layout.full_state(self._model.owned)
        total = torch.zeros(self._model.layout.n_values)
        with one_thread():
            for client, seed, weight in zip(self._clients, self._seeds.tolist(), self._weights.tolist(), strict=True):
                client.model.load_state_dict(start)
                client.train(client.model, self._plan(seed))
                total.add_(_change(client.model.state_dict(), start, list(self._model.owned)), alpha=weight)
        return total

    def _plan(self, seed: int) -> LocalPlan:
        return asked_of_site(self._offer.training, seed)


def _offer(workload: Workload, first: ModelState) -> Assignment:
    plan = workload.run_file(1).round_plan(1, 1)
    return Assignment(
        id=assignment_id(plan.run, 1, 1, client_name(0)),
        run=plan.run,
        round=1,
        attempt=1,
        model=ModelRef(0, first.file.sha256, first.file.size_bytes, first.layout.digest),
        training=workload.run_file(1).training_plan(1),
        codec=CodecPlan(),
        grid=plan.grid,
        sample_count_max=plan.sample_count_max,
        seed=1,
        window_s=plan.window_s,
    )


def _change(local: Mapping[str, Tensor], start: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([(local[name].detach() - start[name]).reshape(-1) for name in names])


def one_round() -> None:
    """A round by the engine; for a process of its own."""
    OwnRounds().engine()


def own_clients_rows(*, quick: bool) -> list[BenchRow]:
    """The time of a round of 100 clients, and the memory. Raises `AssertionError` if both sides differ by one bit."""
    rounds = OwnRounds()
    ours, theirs = rounds.engine(), rounds.bare_loop()  # these make the clients, and are not timed
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5, "both sides train the same clients"
    engine_s, loop_s = _least(rounds.engine, rounds.bare_loop, _TURNS_QUICK if quick else _TURNS)
    what, idle, busy = "clients: peak memory", in_child(do_nothing), in_child(one_round)
    return [
        BenchRow(
            "clients: 100 `Client` objects, training",
            1e3 * engine_s,
            "a bare loop over the same train",
            1e3 * loop_s,
            "ms",
            Hold(_OVERHEAD_MAX),
        ),
        BenchRow(what, busy.peak_bytes / 1e6, "torch and the simulator alone", idle.peak_bytes / 1e6, "MB", _MEMORY),
    ]


def _least(ours: Callable[[], object], theirs: Callable[[], object], n_turns: int) -> tuple[float, float]:
    """The least processor time of each, in seconds. They take turns, so that a busy machine slows both."""
    least = [math.inf, math.inf]
    for _ in range(n_turns):
        for i, one in enumerate((ours, theirs)):
            began = time.process_time()
            one()
            least[i] = min(least[i], time.process_time() - began)
    return least[0], least[1]
