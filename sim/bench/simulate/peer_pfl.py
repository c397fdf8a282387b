"""How pfl-research does the work of `umbel bench simulate`: its FederatedAveraging over its own federated data set.

In one process, or in several under `torchrun`, with or without its scheduling of users by size. The program runs in the
interpreter that has `pfl`, beside `peer_work.py`. Written for pfl 0.6, whose federated data sets ask a sampler for one
user after another: here a user is a turn. A `Dataset` of pfl keeps its batches and never shuffles them, so the one here
takes its batches from the work.
"""

from collections.abc import Mapping, Sequence

from umbel.sim.bench.simulate.peer_run import Setup
from umbel.sim.engines.schedule import n_cores

_FILE_NAME = "pfl_driver.py"
_PROGRAM = '''
import time
from pathlib import Path

import numpy as np
import torch
from peer_work import Work, write_report
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


class Turn(Dataset):
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
    work, noted = Work(FOLDER), Times()
    work.load(work.start)
    model = PyTorchModel(with_loss(work.model), torch.optim.SGD, torch.optim.SGD(work.model.parameters(), lr=1.0))
    weights = dict(enumerate(work.sizes.tolist())) if work.words["by_size"] else None
    users = FederatedDataset(lambda turn: Turn(work, turn), InTurn(work.clients.numel()), weights)
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
    return (_setup(versions, 1), *((_setup(versions, n), _setup(versions, n, by_size=True)) if n > 1 else ()))


def _setup(versions: Mapping[str, str], n_processes: int, *, by_size: bool = False) -> Setup:
    how = "1 process" if n_processes == 1 else f"{n_processes} processes"
    title = f"pfl {versions['pfl']}, {how}{', users by size' if by_size else ''}"
    return Setup(title, _FILE_NAME, _PROGRAM, {"by_size": by_size}, n_processes if n_processes > 1 else 0)
