"""The programs by which Flower and pfl-research do the work of `umbel bench simulate`, each in its own interpreter.

*Flower* (written for flwr 1.41, with Ray): its message API and FedAvg, one actor for each core, which is its best
configuration here (by default a client takes two cores). The program imports itself, so that Ray finds the client's
function by its name and does not carry it in each message.

*pfl* (written for pfl 0.6): FederatedAveraging over its federated data set, in one process or in several under
`torchrun`, with or without its scheduling of users by size. Its data sets ask a sampler for one user after
another; here a user is a turn. A `Dataset` of pfl keeps its batches and never shuffles them, so the one here takes its
batches from the work.
"""

from collections.abc import Mapping, Sequence

from umbel.sim.bench.simulate.peer_run import Setup
from umbel.sim.engines.device import n_cores

_FLOWER_FILE = "flower_driver.py"
_FLOWER_PROGRAM = '''
import functools
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer_work import PeerWork, write_report

FOLDER = Path(__file__).parent
client_app, server_app = ClientApp(), ServerApp()


@functools.cache
def resident():
    """Once in each actor: data are not sent with messages."""
    torch.set_num_threads(1)
    return PeerWork(FOLDER)


@client_app.train()
def train(message, context):
    work, turn = resident(), message.content["config"]["turn"]
    start = torch.from_numpy(message.content["arrays"].to_numpy_ndarrays()[0].copy())
    arrays = ArrayRecord([work.trained(start, turn).numpy()])
    metrics = MetricRecord({"num-examples": int(work.sizes[turn])})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class SameClients(FedAvg):
    """FedAvg that asks whom it is told to ask, and notes the time after each round."""

    def __init__(self, work):
        super().__init__(fraction_evaluate=0.0)
        self.work, self.times = work, []

    def configure_train(self, server_round, arrays, config, grid):
        while len(nodes := sorted(grid.get_node_ids())) < self.work.words["n_clients"]:
            time.sleep(0.1)  # they register one after another, which may last into the first round
        self.times = self.times or [time.time()]
        first = (server_round - 1) * self.work.n_asked
        return [
            Message(
                content=RecordDict({"arrays": arrays, "config": ConfigRecord({"turn": first + position})}),
                message_type=MessageType.TRAIN,
                dst_node_id=nodes[client],
            )
            for position, client in enumerate(self.work.clients[server_round - 1].tolist())
        ]

    def aggregate_evaluate(self, server_round, replies):
        """The last that is called in a round."""
        self.times.append(time.time())


@server_app.main()
def serve(grid, context):
    work = PeerWork(FOLDER)
    strategy = SameClients(work)
    found = strategy.start(grid=grid, initial_arrays=ArrayRecord([work.start.numpy()]), num_rounds=work.n_rounds)
    write_report(FOLDER, strategy.times, torch.from_numpy(found.arrays.to_numpy_ndarrays()[0].copy()))


def main():
    work = PeerWork(FOLDER)
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=work.words["n_clients"],
        backend_config={
            "init_args": {"num_cpus": work.words["n_processes"]},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    import flower_driver

    flower_driver.main()
'''


def flower_setups(versions: Mapping[str, str]) -> Sequence[Setup]:
    """The one; none where the packages are missing."""
    if not {"flwr", "ray"} <= versions.keys():
        return ()
    title = f"Flower {versions['flwr']} on Ray {versions['ray']}, {n_cores()} actors"
    return (Setup(title, _FLOWER_FILE, _FLOWER_PROGRAM, {"n_processes": n_cores()}),)


_PFL_FILE = "pfl_driver.py"
_PFL_PROGRAM = '''
import time
from pathlib import Path

import numpy as np
import torch
from peer_work import PeerWork, write_report
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional

FOLDER = Path(__file__).parent
SETTLED_S = 5.0


class TurnData(Dataset):
    def __init__(self, work, turn):
        super().__init__(raw_data=(), user_id=str(turn))
        self._work, self._turn = work, turn

    def __len__(self):
        return int(self._work.sizes[self._turn])

    def iter(self, batch_size):
        return self._work.batches(self._turn)


class InTurn:
    """A user sampler: 0, 1, 2, ... and from the beginning, for pfl draws ahead of what it needs."""

    def __init__(self, n_turns):
        self._n_turns, self._next = n_turns, 0

    def __call__(self):
        turn, self._next = self._next, (self._next + 1) % self._n_turns
        return turn


class Times(TrainingProcessCallback):
    def __init__(self):
        self.times = []

    def on_train_begin(self, *, model):
        self.times.append(time.time())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.times.append(time.time())
        return False, Metrics()


def with_loss(module):
    """pfl asks a module for its loss and for metrics; these it takes before the first round alone."""
    module.loss = lambda inputs, targets: functional.cross_entropy(module(inputs), targets)
    module.metrics = lambda inputs, targets: {"samples": Weighted(len(targets), 1)}
    return module


def main():
    torch.set_num_threads(1)
    np.random.seed(0)  # the same in all processes
    work, noted = PeerWork(FOLDER), Times()
    work.load(work.start)
    model = PyTorchModel(with_loss(work.model), torch.optim.SGD, torch.optim.SGD(work.model.parameters(), lr=1.0))
    weights = dict(enumerate(work.sizes.tolist())) if work.words["by_size"] else None
    users = FederatedDataset(lambda turn: TurnData(work, turn), InTurn(work.clients.numel()), weights)
    if weights is not None:
        time.sleep(SETTLED_S)  # until its sampler's process has drawn its first ten thousand
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=work.n_rounds,
            evaluation_frequency=work.n_rounds + 1,
            train_cohort_size=work.n_asked,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=users, val_data=None, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_batch_size=work.words["batch_size"],
            local_num_epochs=1,  # batches of all epochs are one list
            local_learning_rate=work.words["learning_rate"],
        ),
        callbacks=[noted],
        send_metrics_to_platform=False,
    )
    if get_framework_module().distributed.global_rank == 0:
        write_report(FOLDER, noted.times, work.weights())


if __name__ == "__main__":
    main()
'''


def pfl_setups(versions: Mapping[str, str], n_asked: int) -> Sequence[Setup]:
    """In one process, and in one a core, or as many as divide the users among them; none where it is missing."""
    if "pfl" not in versions:
        return ()
    n = max(n for n in range(1, n_cores() + 1) if n_asked % n == 0)
    return (
        _pfl_setup(versions, 1),
        *((_pfl_setup(versions, n), _pfl_setup(versions, n, by_size=True)) if n > 1 else ()),
    )


def _pfl_setup(versions: Mapping[str, str], n_processes: int, *, by_size: bool = False) -> Setup:
    how = "1 process" if n_processes == 1 else f"{n_processes} processes"
    title = f"pfl {versions['pfl']}, {how}{', users by size' if by_size else ''}"
    return Setup(title, _PFL_FILE, _PFL_PROGRAM, {"by_size": by_size}, n_processes if n_processes > 1 else 0)
