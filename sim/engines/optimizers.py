"""The run file's optimizers for engines that train one client after another: torch's own steps on state that restarts.

Making an optimizer of torch for every client takes longer than a step of a small model.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from umbel.aggregation.plans.training import TrainingPlan
from umbel.client.local.optimizers import optimizer_of

_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # torch's defaults


class RestartableOptimizer(Protocol):
    """An optimizer over fixed parameters."""

    def restart(self) -> None:
        """Forget everything, for the next client."""
        ...

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        ...


def restartable(module: nn.Module, plan: TrainingPlan, *, is_fused: bool) -> RestartableOptimizer:
    """The optimizer that the plan asks for, over the module's trainable parameters. `is_fused`: one call for all
    parameters, with fewer roundings.
    """
    parameters = [one for one in module.parameters() if one.requires_grad]
    match plan.optimizer:
        case "sgd":
            return Sgd(parameters, plan, is_fused=is_fused)
        case "adam" | "adamw":
            return Adam(parameters, plan, is_fused=is_fused)
        case "lars" | "lamb" | "muon":
            return SdkOptimizer(module, plan)


class SdkOptimizer:
    """The SDK's own optimizer, made for each client: its step takes longer than making it."""

    def __init__(self, module: nn.Module, plan: TrainingPlan) -> None:
        self._module, self._plan = module, plan
        self.restart()

    def restart(self) -> None:
        self._made = optimizer_of(self._plan, self._module)

    def step(self) -> None:
        self._made.step()


class Sgd:
    """`torch.optim.SGD`."""

    def __init__(self, parameters: Sequence[nn.Parameter], plan: TrainingPlan, *, is_fused: bool) -> None:
        self._parameters, self._plan = parameters, plan
        self._is_fused = is_fused or None  # None: as torch chooses
        self.restart()

    def restart(self) -> None:
        self._velocities: list[Tensor | None] = [None] * len(self._parameters)

    @torch.no_grad()
    def step(self) -> None:
        used, gradients = _with_gradients(self._parameters)
        velocities = [self._velocities[i] for i in used]
        sgd(
            [self._parameters[i] for i in used],
            gradients,
            velocities,
            has_sparse_grad=any(gradient.is_sparse for gradient in gradients),
            fused=self._is_fused,
            weight_decay=self._plan.weight_decay,
            momentum=self._plan.momentum,
            lr=self._plan.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if self._plan.momentum:
            for i, velocity in zip(used, velocities, strict=True):
                self._velocities[i] = velocity


class Adam:
    """`torch.optim.Adam` or, with optimizer = "adamw", `torch.optim.AdamW`."""

    def __init__(self, parameters: Sequence[nn.Parameter], plan: TrainingPlan, *, is_fused: bool) -> None:
        self._parameters, self._plan = parameters, plan
        self._is_fused = is_fused or None
        self._moments = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
        self._n_steps = [torch.zeros(()) for _ in parameters]

    def restart(self) -> None:
        for tensor in (*self._moments[0], *self._moments[1], *self._n_steps):
            tensor.zero_()

    @torch.no_grad()
    def step(self) -> None:
        used, gradients = _with_gradients(self._parameters)
        parameters, first, second, n_steps = (
            [tensors[i] for i in used] for tensors in (self._parameters, *self._moments, self._n_steps)
        )
        adam_steps(self._plan, parameters, gradients, first, second, n_steps, is_fused=self._is_fused)


def adam_steps(
    plan: TrainingPlan,
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    n_steps: list[Tensor],
    *,
    is_fused: bool | None = None,
) -> None:
    """One step of Adam for these tensors (Kingma and Ba 2015), or of AdamW (Loshchilov and Hutter 2019), in place.

    `first`, `second`: the moments; `n_steps`: steps taken before, scalars.
    """
    adam(
        parameters,
        gradients,
        first,
        second,
        [],
        n_steps,
        fused=is_fused,
        decoupled_weight_decay=plan.optimizer == "adamw",
        amsgrad=False,
        beta1=_BETAS[0],
        beta2=_BETAS[1],
        lr=plan.learning_rate,
        weight_decay=plan.weight_decay,
        eps=_EPSILON,
        maximize=False,
    )


def _with_gradients(parameters: Sequence[nn.Parameter]) -> tuple[list[int], list[Tensor]]:
    used = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
    return used, [gradient for p in parameters if (gradient := p.grad) is not None]
