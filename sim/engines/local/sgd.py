"""Torch's SGD without its optimizer class, which takes as long for its bookkeeping as for the step, and whose first use
imports torch's compiler: 1.7 s, and 130 MB. The function behind the class does the arithmetic here too: the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from umbel.aggregation.plans.round import TrainingPlan
from umbel.sim.engines.work import LocalOptimizer


class Sgd:
    """`torch.optim.SGD` over these parameters. `is_fused`: one call for all of them, with fewer roundings."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], plan: TrainingPlan, optimizer: LocalOptimizer, *, is_fused: bool
    ) -> None:
        self._parameters, self._plan, self._optimizer = parameters, plan, optimizer
        self._is_fused = is_fused or None  # None: as torch chooses
        self.restart()

    def restart(self) -> None:
        """Forget all momentum, as for another client."""
        self._velocities: list[Tensor | None] = [None] * len(self._parameters)

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        used = [i for i, parameter in enumerate(self._parameters) if parameter.grad is not None]
        gradients = [gradient for p in self._parameters if (gradient := p.grad) is not None]
        velocities = [self._velocities[i] for i in used]
        sgd(
            [self._parameters[i] for i in used],
            gradients,
            velocities,
            has_sparse_grad=any(gradient.is_sparse for gradient in gradients),
            fused=self._is_fused,
            weight_decay=self._optimizer.weight_decay,
            momentum=self._optimizer.momentum,
            lr=self._plan.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if self._optimizer.momentum:
            for i, velocity in zip(used, velocities, strict=True):
                self._velocities[i] = velocity
