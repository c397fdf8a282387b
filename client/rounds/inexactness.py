"""How exactly a client has minimized FedProx's local objective: the smallest gamma of which its work is gamma-inexact.

    h(w)  = F(w) + mu/2 ||w - w_t||^2
    gamma = ||grad h(w*)|| / ||grad h(w_t)|| = ||grad F(w*) + mu (w* - w_t)|| / ||grad F(w_t)||

Li et al. 2020, "Federated Optimization in Heterogeneous Networks", definition 2. F is the mean loss over all of the
client's training samples, without the optimizer's weight decay; w_t is the round's model, w* the one that the client
has trained. 0: a stationary point of h. 1: as far from one as the round's model. With mu = 0 it is FedAvg's objective.

Both gradients are measured after the training, each by one step of the site's own code over all samples, as
`plan.adjust_gradients` sees them. So the site's optimizer does not matter. A gradient is that of the tensors which the
server moves, and of the part of them that the codec can send, because the client minimizes only over this part.
"""

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from umbel.aggregation.model.state import State
from umbel.aggregation.types import METRIC_ABS_MAX
from umbel.client.app import Client
from umbel.client.errors import CannotGoOn, ClientError
from umbel.client.local.devices import generators, set_generators
from umbel.client.local.gradients import Projection
from umbel.client.local.plan import LocalPlan
from umbel.client.training.shared_state import SharedState
from umbel.client.user_code import where_raised

_TOO_NEAR = "the round's deadline is too near"
log = logging.getLogger("umbel.client")


class _NotMeasured(Exception):
    """Says why there is no gamma."""


class MissingGamma:
    """Why this client has rounds without a gamma. The log says each reason once for a run."""

    def __init__(self) -> None:
        self._told = set[tuple[str, str]]()

    def tell(self, plan: LocalPlan, why: object) -> None:
        """Log why the round of this plan has none, unless an earlier round of its run had the same reason."""
        reason = f"{why}"
        if (plan.run, reason) in self._told:
            return
        self._told.add((plan.run, reason))
        log.warning(
            "gamma (inexactness) is not measured in round %d: %s. The log does not say so again if later rounds have "
            "the same reason",
            plan.round,
            reason,
        )


def measured_gamma(
    app: Client,
    shared: SharedState,
    weights: State,
    private: State,
    plan: LocalPlan,
    step_s: float,
    was_stopped: bool,
    missing: MissingGamma,
) -> float | None:
    """The gamma of the model as it is now, after a training from `weights`; None if it is not measured, and `missing`
    is told why. The model, and the process-wide generators, are then as before.

    `private`: the private tensors as the training began. `step_s`: of one step of the training. `was_stopped`: whether
    the training was told to stop.
    """
    if why := _why_not(app, plan, step_s, was_stopped):
        missing.tell(plan, why)
        return None
    with _restored(shared):
        try:
            return _gamma(app, shared, weights, private, plan)
        except CannotGoOn:
            raise
        except (_NotMeasured, ClientError) as error:
            missing.tell(plan, error)
        except (Exception, SystemExit) as error:
            missing.tell(plan, where_raised(error))
    return None


def _gamma(app: Client, shared: SharedState, weights: State, private: State, plan: LocalPlan) -> float:
    """Raises `_NotMeasured`, and what the site's code raises."""
    mu, began = plan.proximal_mu, plan.clock()
    pulls = {name: change * mu for name, change in shared.stepped_changes(weights)} if mu else {}
    reached = _gradient_norm(app, shared, plan, pulls)
    if plan.seconds_left <= plan.clock() - began:
        raise _NotMeasured(_TOO_NEAR)
    shared.load(weights)
    if private:
        shared.set_private(private)
    first = _gradient_norm(app, shared, plan, {})
    if not first:
        raise _NotMeasured("the gradient at the round's model is 0")
    gamma = reached / first
    if not gamma <= METRIC_ABS_MAX:  # also refuses a NaN
        raise _NotMeasured(f"it is {gamma:g}, because the training or the round's model has diverged")
    return gamma


def _why_not(app: Client, plan: LocalPlan, step_s: float, was_stopped: bool) -> str:
    """Why the client does not even try, because it cannot or would miss the round's deadline; empty if it does."""
    if app.trains_in_one_call:
        return "a training in one call shows no gradient"
    if math.isinf(plan.deadline):  # a simulated device: its time does not pass now
        return ""
    if was_stopped:
        return "the training was told to stop, or had no time for all steps"
    n_steps = math.ceil(app.sample_count / plan.batch_size)  # of one pass over the data
    return _TOO_NEAR if plan.seconds_left <= 2 * n_steps * step_s else ""


@dataclass(frozen=True, slots=True)
class _Squares:
    """Notes the squared norms of gradients that pass by. `pulls`: what is added to each first, by tensor."""

    pulls: State
    by_name: dict[str, list[float]] = field(default_factory=lambda: defaultdict[str, list[float]](list))

    def noting(self, name: str, project: Projection | None) -> Projection:
        """A projection like `project` that notes its result."""

        def noted(gradient: Tensor) -> Tensor:
            found = gradient if project is None else project(gradient)
            whole = found.detach().to("cpu", torch.float64)
            if (pull := self.pulls.get(name)) is not None:
                whole = whole + pull
            self.by_name[name].append(float(whole.square().sum()))
            return found

        return noted

    def norm(self) -> float:
        """The L2 norm of all. Raises `_NotMeasured` unless each was noted once."""
        if not self.by_name:
            raise _NotMeasured(
                "train shows no gradient: call plan.adjust_gradients(model) after backward and before each step of the "
                "optimizer (an ArrayClient: plan.adjust_arrays or plan.adjust_step)"
            )
        if any(len(squares) > 1 for squares in self.by_name.values()):
            raise _NotMeasured("train shows several gradients in the place of one over all samples")
        return math.sqrt(math.fsum(square for squares in self.by_name.values() for square in squares))


def _gradient_norm(app: Client, shared: SharedState, plan: LocalPlan, pulls: State) -> float:
    """The norm of the gradient of all samples at the model as it is, plus `pulls`. Changes the model.

    Raises `_NotMeasured` for code that does not take one step, and what that code raises.
    """
    usual, squares = LocalPlan(), _Squares(pulls)
    asked = replace(
        plan,
        epochs=None,
        steps=1,
        batch_size=app.sample_count,
        is_whole=True,
        share=1.0,
        proximal_mu=usual.proximal_mu,
        clip_norm=usual.clip_norm,
        within={name: squares.noting(name, plan.within.get(name)) for name in shared.stepped},
        evaluate=False,
        evaluate_after=False,
        state=copy.deepcopy(plan.state),
        checkpoint=usual.checkpoint,
        told_to_stop=usual.told_to_stop,
    )
    steps = app.train(app.model, asked.bound_to(app.model, shared.kept)).steps_done
    if steps != 1:
        raise _NotMeasured(f"train took {steps} steps in the place of one: follow plan.steps and plan.batch_size")
    return squares.norm()


@contextmanager
def _restored(shared: SharedState) -> Generator[None]:
    """Give the model back as it was, with its gradients and modes, and so the process-wide generators."""
    model = shared.model
    trained = {name: one.detach().to("cpu", copy=True) for name, one in shared.shared().items()}
    private, modes = shared.private(), [(module, module.training) for module in model.modules()]
    unsaved = [(one, one.detach().clone()) for one in _unsaved_buffers(model)]
    gradients = [(one, one.grad) for one in model.parameters()]
    device = gradients[0][0].device if gradients else torch.device("cpu")
    drawn = generators(device)
    for one, _ in gradients:
        one.grad = None
    try:
        yield
    finally:
        shared.load(trained)
        if private:
            shared.set_private(private)
        for buffer, value in unsaved:
            buffer.copy_(value)
        _set_again(modes, gradients)
        set_generators(drawn, device)


def _unsaved_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that are not in the state dict."""
    saved = {id(one) for one in model.state_dict(keep_vars=True).values()}
    return [one for one in model.buffers() if id(one) not in saved]


def _set_again(modes: list[tuple[nn.Module, bool]], gradients: list[tuple[nn.Parameter, Tensor | None]]) -> None:
    for module, is_training in modes:
        module.training = is_training
    for one, gradient in gradients:
        one.grad = gradient
