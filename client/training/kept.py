"""What the run's algorithm adds to a client's gradients, and has the client keep from round to round.

- FedDyn (`algorithms/feddyn.py`): its pull.
- SCAFFOLD (`algorithms/scaffold.py`): its control variate c_i. The global one, c, comes with the model's weights.

Both have a float32 for each value of a *stepped* tensor, one that the server's step moves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from umbel.aggregation.algorithms import scaffold
from umbel.aggregation.algorithms.feddyn import next_pull
from umbel.aggregation.algorithms.scaffold import control_after, scaled
from umbel.aggregation.model.layout import CONTROL_PREFIX, Layout
from umbel.aggregation.model.state import State
from umbel.client.local.plan import LocalPlan
from umbel.client.training.shared_state import SharedState

Kept = Mapping[str, Tensor]
"""By the names of the stepped tensors, float32 on the CPU; empty before a client's first training."""


@dataclass(frozen=True, slots=True)
class ControlChange:
    """What a client sends of its control variate. `scale`: by what the change is multiplied."""

    before: Kept
    after: Kept
    scale: float

    def piece(self, weight: str, piece: slice, device: torch.device) -> Tensor:
        """Some values for the weight of this name: float32, (n,), on `device`."""
        after = self.after[weight].reshape(-1)[piece].to(device)
        before = self.before.get(weight)
        return scaled(
            after, torch.zeros_like(after) if before is None else before.reshape(-1)[piece].to(device), self.scale
        )


def control_as_read(layout: Layout, scale: float, read: Callable[[int, int], Tensor], before: Kept) -> Kept:
    """The control variate that a client keeps. `layout`: of the update. `before`: what it has kept until now.

    `read`: coordinates of its update, from one to before another, as the coordinator reads them: float64.
    """
    found = dict[str, Tensor]()
    for spec in layout.owners():
        if spec.controls is not None:
            start = before[spec.controls].reshape(-1) if before else torch.zeros(spec.n_values)
            sent = read(spec.place.start, spec.place.stop)
            found[spec.controls] = scaffold.kept(start, sent, scale).view(spec.shape)
    return found


def with_pulls(plan: LocalPlan, shared: SharedState, weights: State) -> LocalPlan:
    """The plan with what is added to each gradient of a training from these weights of the run."""
    if plan.remembers_drift:
        return replace(plan, pulls=plan.kept)
    if not plan.has_control:
        return plan
    return replace(plan, pulls={name: _offset(plan, name, weights) for name in shared.stepped})


def kept_after(plan: LocalPlan, shared: SharedState, weights: State, steps_done: int) -> Kept:
    """What the client keeps after a training from these weights; empty if the algorithm has it keep nothing.

    `plan`: with its pulls. `weights`: of the run, as the training began.
    """
    if plan.remembers_drift:
        return {
            name: next_pull(plan.pulls.get(name, torch.zeros_like(change)), change, plan.proximal_mu)
            for name, change in shared.stepped_changes(weights)
        }
    if plan.has_control:
        walked = steps_done * plan.learning_rate
        return {
            name: control_after(plan.pulls[name], change, walked)
            if walked
            else plan.kept.get(name, torch.zeros_like(change))
            for name, change in shared.stepped_changes(weights)
        }
    return {}


def _offset(plan: LocalPlan, name: str, weights: State) -> Tensor:
    """c - c_i of a weight."""
    of_all = weights[CONTROL_PREFIX + name]
    return of_all - plan.kept[name] if name in plan.kept else of_all.clone()
