"""One step of SGD of many clients at once: weights and gradients as rows of one matrix each, element by element.

What each line does to a row is what `torch.optim.SGD` does to one client's weights, after the proximal term of FedProx
(Li et al. 2020, eq. 2) and clipping (Pascanu, Mikolov and Bengio 2013, algorithm 1) of that client's gradient alone.
"""

import torch
from torch import Tensor

from umbel.aggregation.plans.round import TrainingPlan
from umbel.sim.engines.work import LocalOptimizer

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def is_plain(plan: TrainingPlan, optimizer: LocalOptimizer) -> bool:
    """Whether a step is nothing but the gradient times the learning rate."""
    return not (plan.proximal_mu or optimizer.momentum or optimizer.weight_decay or optimizer.clip_norm is not None)


class StackedSteps:
    """The optimizers of a group of clients. `start`: float32 (n,); `weights`, `gradients`: float32 (m, n), kept by the
    caller, who puts the gradients of the first so many clients into their rows.
    """

    def __init__(
        self, start: Tensor, weights: Tensor, gradients: Tensor, plan: TrainingPlan, optimizer: LocalOptimizer
    ) -> None:
        self._start, self._weights, self._gradients = start, weights, gradients
        self._plan, self._optimizer = plan, optimizer
        self._pull = torch.empty_like(weights) if plan.proximal_mu else None
        self._velocity = torch.zeros_like(weights) if optimizer.momentum else None

    def take(self, n_active: int) -> None:
        """Move the first `n_active` rows; the gradients are overwritten."""
        weights, gradients, optimizer = self._weights[:n_active], self._gradients[:n_active], self._optimizer
        if self._pull is not None:
            pull = torch.sub(weights, self._start, out=self._pull[:n_active])
            gradients.add_(pull.mul_(self._plan.proximal_mu))
        if optimizer.clip_norm is not None:
            norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            gradients.mul_((optimizer.clip_norm / (norms + _CLIP_EPSILON)).clamp_(max=1.0))
        if optimizer.weight_decay:
            gradients.add_(weights, alpha=optimizer.weight_decay)
        if self._velocity is not None:
            gradients = self._velocity[:n_active].mul_(optimizer.momentum).add_(gradients)
        weights.add_(gradients, alpha=-self._plan.learning_rate)
