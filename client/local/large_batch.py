"""LARS and LAMB: optimizers for large batches, which make each layer's step as long as suits the layer's weights.

torch has neither. Weights of a sharded model (DTensor) are moved by their shards, with norms of the whole tensors.

Biases, gains of normalization and other tensors of less than two dimensions take the plain step, without weight decay,
as in the published code of LAMB's authors: their norms say little, and a bias often begins with 0.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_ADAPTED_DIMENSIONS = 2  # and more


class _Layerwise(Optimizer):
    """Moves each parameter that has a gradient by `_move`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as in torch
        """Make one step, and return the loss if `closure` computes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self._move(weights, weights.grad, group)
        return loss

    def _move(self, weights: Tensor, gradient: Tensor, terms: dict[str, float]) -> None:
        raise NotImplementedError


class Lars(_Layerwise):
    """You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1.

        rate_l = trust ||w|| / (||g|| + weight_decay ||w||)
        v <- momentum v + lr rate_l (g + weight_decay w)
        w <- w - v

    `rate_l` is 1 where a norm is 0.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def _move(self, weights: Tensor, gradient: Tensor, terms: dict[str, float]) -> None:
        step = gradient
        if weights.ndim >= _ADAPTED_DIMENSIONS:
            decay, length = terms["weight_decay"], _norm(weights)
            rate = _quotient(terms["trust"] * length, _norm(gradient) + decay * length)
            step = gradient.add(weights, alpha=decay).mul_(rate)
        if terms["momentum"]:
            kept = self.state[weights]
            velocity = kept.get("velocity")
            kept["velocity"] = step = (
                step * terms["lr"]
                if velocity is None
                else velocity.mul_(terms["momentum"]).add_(step, alpha=terms["lr"])
            )
            weights.sub_(step)
        else:
            weights.sub_(step, alpha=terms["lr"])


class Lamb(_Layerwise):
    """You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2, with
    phi(z) = z, as in the authors' code.

        m <- beta1 m + (1 - beta1) g;    v <- beta2 v + (1 - beta2) g^2
        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w
        w <- w - lr ||w|| / ||r|| r

    The quotient is 1 where a norm is 0.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        terms = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, terms)

    def _move(self, weights: Tensor, gradient: Tensor, terms: dict[str, float]) -> None:
        kept, beta1, beta2 = self.state[weights], terms["beta1"], terms["beta2"]
        if not kept:
            kept["step"] = torch.zeros(())
            kept["first"], kept["second"] = torch.zeros_like(weights), torch.zeros_like(weights)
        kept["step"] += 1
        n_steps = int(kept["step"])
        first = kept["first"].lerp_(gradient, 1 - beta1)
        second = kept["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**n_steps)).sqrt_().add_(terms["eps"])
        step, rate = first / (1 - beta1**n_steps) / root, terms["lr"]
        if weights.ndim >= _ADAPTED_DIMENSIONS:
            step.add_(weights, alpha=terms["weight_decay"])
            step.mul_(_quotient(_norm(weights), _norm(step)))
        weights.sub_(step, alpha=rate)


def _norm(tensor: Tensor) -> Tensor:
    """The L2 norm of the whole tensor, also of one of which each rank holds a shard: a scalar, at least float32."""
    found = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    whole: Callable[[], Tensor] | None = getattr(found, "full_tensor", None)  # of a DTensor
    return found if whole is None else whole()


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    """1 where one of both is 0."""
    return torch.where((above > 0) & (below > 0), above / below, 1.0)
