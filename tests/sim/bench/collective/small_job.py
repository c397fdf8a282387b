"""A job that takes seconds: a small perceptron with every method, and samples for it."""

import torch

from umbel.sim.bench.collective.job import METHODS, HookJob
from umbel.sim.data.data_set import SampleSet

SMALL = HookJob(
    n_ranks=2,
    methods=tuple(METHODS),
    widths=(16, 256, 4),
    batch_size=16,
    learning_rate=0.1,
    momentum=0.0,
    blocks=2,
    steps=10,
    warm_up=3,
    seed=4,
)
N_VALUES = 16 * 256 + 256 + 256 * 4 + 4
LIMIT_S = 240.0


def samples() -> SampleSet:
    inputs = torch.randn(200, 16, generator=torch.Generator().manual_seed(7))
    return SampleSet(inputs, inputs[:, :4].argmax(1))
