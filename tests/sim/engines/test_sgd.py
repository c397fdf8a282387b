"""SGD without torch's optimizer class is torch's SGD."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.repository import ROOT
from umbel.aggregation.plans.training import TrainingPlan
from umbel.sim.engines.optimizers import Sgd

SHAPES = [(33, 17), (129,), (5, 3, 3, 3)]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)])
def test_steps_are_torchs_to_the_bit_and_a_restart_forgets(
    is_fused: bool, momentum: float, weight_decay: float
) -> None:
    ours = parameters()
    sgd = Sgd(ours, TrainingPlan(learning_rate=0.3, momentum=momentum, weight_decay=weight_decay), is_fused=is_fused)
    for _ in range(2):
        theirs = [nn.Parameter(p.detach().clone()) for p in ours]
        reference = SGD(theirs, lr=0.3, momentum=momentum, weight_decay=weight_decay, fused=is_fused or None)
        sgd.restart()
        for step in range(4):
            for mine, other, gradient in zip(ours, theirs, gradients(step), strict=True):
                mine.grad, other.grad = gradient.clone(), gradient.clone()
            sgd.step()
            reference.step()
            assert all(map(torch.equal, ours, theirs))


def test_a_parameter_without_a_gradient_stays_and_keeps_its_momentum() -> None:
    ours = parameters()
    theirs = parameters()
    sgd = Sgd(ours, TrainingPlan(learning_rate=0.3, momentum=0.9), is_fused=False)
    reference = SGD(theirs, lr=0.3, momentum=0.9)
    for step in range(5):
        for i, (mine, other, gradient) in enumerate(zip(ours, theirs, gradients(step), strict=True)):
            mine.grad, other.grad = (None, None) if (i + step) % 3 == 0 else (gradient.clone(), gradient.clone())
        sgd.step()
        reference.step()
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.nightly
def test_training_does_not_load_torchs_compiler() -> None:
    program = """
import sys
from tests.sim.engines.cohorts import all_changes, recipe, start_of, work_of
from umbel.sim.engines.training import SequentialEngine

for name in ("convolutions", "with_dropout"):
    work = work_of([8, 8], [3, 3], proximal_mu=0.1, optimizer={"momentum": 0.9, "weight_decay": 0.1, "clip_norm": 1.0})
    all_changes(SequentialEngine(recipe(name)), start_of(recipe(name)), work)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
