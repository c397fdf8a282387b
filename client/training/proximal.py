"""FedProx's proximal term (Li et al. 2020, "Federated Optimization in Heterogeneous Networks", eq. 2).

The local objective becomes h(w) = F(w) + mu/2 * ||w - w_global||^2 over the trainable parameters. Its gradient is
added in place, mu * (w - w_global), which costs one pass over the weights and keeps no graph.
"""

import torch
from torch import nn


class ProximalTerm:
    """Holds w_global as the model is when this is made. With mu = 0 it holds and does nothing."""

    def __init__(self, model: nn.Module, mu: float) -> None:
        self._mu = mu
        trainable = [p for p in model.parameters() if p.requires_grad] if mu else []
        self._pairs = [(p, p.detach().clone()) for p in trainable]

    @torch.no_grad()
    def add_gradient(self) -> None:
        """Add mu * (w - w_global) to every `.grad`, after `backward` and before the optimizer's step."""
        for parameter, anchor in self._pairs:
            pull = (parameter - anchor).mul_(self._mu)
            if parameter.grad is None:
                parameter.grad = pull
            else:
                parameter.grad.add_(pull)
