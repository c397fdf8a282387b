"""What a site is asked to do with the model in one round, and what helps its code to do it."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from umbel.aggregation.algorithms.names import Algorithm, ControlVariate
from umbel.aggregation.plans.training import OptimizerName, Option
from umbel.client.local.arrays import Array, ArrayModel, NamedArrays, array_of, require_gradient, tensor_of
from umbel.client.local.batches import WHOLE, BatchPart, Collate, Data
from umbel.client.local.checkpoint import Checkpoint
from umbel.client.local.gradients import GradientRules, Norm, Projection
from umbel.client.local.optimizers import optimizer_of
from umbel.client.local.progress import Keepable
from umbel.client.local.steps import LocalSteps

SHARE_STEPS_MIN = 3  # the first step also loads libraries and data, so it says little about the others
_SAMPLE_ORDER = "sample order 1"  # the version of `aggregation/sample_order.py`


def _never() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What a site is asked to do with the model in this round.

    A site's own loop is short with `drive` and `adjust_gradients`, and loses nothing that the run asks:

    ```
    optimizer = plan.make_optimizer(model)
    steps = plan.drive(self.data, keep={"model": model, "optimizer": optimizer})
    for inputs, target in steps:
        optimizer.zero_grad()
        loss = self.loss(model(inputs), target)
        loss.backward()
        plan.adjust_gradients(model)
        optimizer.step()
        steps.note(loss=loss)
    return steps.result(self.sample_count)
    ```
    """

    epochs: int | None = None  # either epochs or steps is set
    steps: int | None = None
    batch_size: int = 32
    learning_rate: float = 0.01  # of this round, after the run's schedule
    proximal_mu: float = 0.0  # FedProx's mu; 0 for plain averaging
    seed: int = 0
    """For batch order, dropout and the like. Outside secure rounds the same round and client give the same seed."""
    evaluate: bool = False  # whether the model is measured on held-out data before training
    evaluate_after: bool = False  # and after it, as the site's own model
    inexactness: bool = False  # and whether how exactly it was trained (`client/rounds/inexactness.py`)
    is_whole: bool = False  # asks for one step over all samples, in one batch (SCAFFOLD's "gradient", `inexactness`)
    part: BatchPart = WHOLE  # of each batch, that this rank of a silo takes; `drive` applies it
    share: float = 1.0  # the share of the work to do, below 1 in a canary; `steps_for` applies it
    within: Mapping[str, Projection] = field(default_factory=dict[str, Projection], repr=False)
    """By parameter name: projects the gradient onto what the codec can send, if it sends only a part of the model (a
    structured mask, or low rank). `adjust_gradients` applies it; changes outside that part are not sent."""
    deadline: float = float("inf")  # on `clock`: when training must end so that there is time to send
    checkpoint: Checkpoint = field(default_factory=Checkpoint, repr=False)  # `drive` uses it by itself
    told_to_stop: Callable[[], str | None] = field(default=_never, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    run: str = ""  # the run's name
    round: int = 1  # of the run, from 1
    client: str = ""  # this client's name in the run
    optimizer: OptimizerName = "sgd"  # this and the next two are the run file's; `make_optimizer` applies them
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None  # the greatest L2 norm of a gradient; `adjust_gradients` applies it
    algorithm: Algorithm = "fedavg"  # under "fednova" the update is divided by the steps that `train` says it has done
    options: Mapping[str, Option] = field(default_factory=dict[str, Option])  # the run file's [training.options]
    state: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """What this client keeps from one round of this run to the next, also over restarts: change it in place. It may
    hold dicts, lists, tuples, tensors, arrays, numbers and texts, nested. It is kept if the report is accepted."""
    pulls: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor], repr=False)
    """By parameter name: what FedDyn or SCAFFOLD adds to each gradient. `adjust_gradients` applies it."""
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor], repr=False)
    """By parameter name: what the algorithm has had this client keep of earlier rounds (`client/training/kept.py`)."""
    control_variate: ControlVariate = "change"  # under "scaffold": how the client's next one is made
    control_scale: float = 1.0  # by what its change is multiplied before it is sent
    rules: GradientRules = field(default_factory=GradientRules, repr=False)  # behind `adjust_gradients`
    site_applies: set[str] = field(default_factory=set[str], repr=False)  # see `applied_by_site`

    @property
    def remembers_drift(self) -> bool:
        """Whether this client keeps a pull from round to round (FedDyn)."""
        return self.algorithm == "feddyn"

    @property
    def has_control(self) -> bool:
        """Whether control variates travel with the model (SCAFFOLD)."""
        return self.algorithm == "scaffold"

    @property
    def weighs_by_loss(self) -> bool:
        """Whether this client's `training_loss` is measured before it trains (q-FedAvg)."""
        return self.algorithm == "qfedavg"

    @property
    def may_accumulate(self) -> bool:
        """Whether one step over all samples may add up gradients of parts of them, because nothing follows from its
        last bits.
        """
        return self.is_whole and self.inexactness

    def steps_for(self, n_batches: int) -> int:
        """The steps to do if an epoch has `n_batches` batches. A share is at least `SHARE_STEPS_MIN` steps."""
        full = self.full_steps_for(n_batches)
        return min(full, max(SHARE_STEPS_MIN, math.ceil(round(self.share * full, 9))))

    def full_steps_for(self, n_batches: int) -> int:
        """The steps of a whole round's work."""
        return self.steps if self.steps is not None else (self.epochs or 1) * n_batches

    @property
    def seconds_left(self) -> float:
        return self.deadline - self.clock()

    def should_stop(self) -> str | None:
        """Why training should end now, in words, or None. Call it before every step but the first; it is cheap."""
        if reason := self.told_to_stop():
            return reason
        return "the deadline is near" if self.seconds_left <= 0 else None

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer that the run file asks for, over the model's trainable parameters."""
        return optimizer_of(self, model)

    def adjust_gradients(self, model: nn.Module) -> None:
        """Do to the model's gradients what the run asks: add FedProx's term and the algorithm's pull, keep the part
        that the codec can send, and clip. Call it after `backward` and before the optimizer's step.

        Raises `ValueError` for a model that does not have the parameters of the client's own.
        """
        if not self.rules.is_bound:
            self._bind(model)
        self.rules.apply(model)

    def adjust_arrays(self, gradients: NamedArrays, weights: NamedArrays) -> dict[str, Array]:
        """The gradients after what `adjust_gradients` does to a model's: by name, as new numpy arrays.

        Args:
            gradients: of the mean loss over a batch, as numpy, JAX or TensorFlow compute them. They get the dtypes of
                their weights. A frozen array needs none.
            weights: the arrays at which these are the gradients.

        Raises `ValueError` for a gradient of an array that is not among the weights, or of another shape than its
        weight, or of integers.
        """
        if not self.rules.is_bound:
            self._bind(ArrayModel(weights))
        values = {name: tensor_of(weights[name], name) for name in gradients if name in weights}
        found = {name: tensor_of(gradient, name) for name, gradient in gradients.items()}
        for name, gradient in found.items():
            require_gradient(name, gradient, values.get(name))
        adjusted = self.rules.applied_to(found, values)
        return {name: array_of(one, np.asarray(weights[name]).dtype) for name, one in adjusted.items()}

    def adjust_step(self, before: NamedArrays, after: NamedArrays) -> dict[str, Array]:
        """Correct a step whose gradients the site's code cannot reach, as in scikit-learn. Returns the arrays as they
        would be if `adjust_arrays` had changed the gradients of the step.

        The result is exact if the step was plain gradient descent with the rate `learning_rate`, because its change is
        then the gradient times this rate. For another optimizer that does what the run asks by itself, call
        `applied_by_site` instead.

        Args:
            before: the arrays before the step.
            after: the arrays after it. Those that are no floating point are returned as they are.

        Raises `ValueError` as `adjust_arrays` does.
        """
        moved, old = _as_numpy(after), _as_numpy(before)
        rate = self.learning_rate
        if not (self._asked and rate):
            self.rules.is_applied = True
            return moved
        changed = [name for name, one in moved.items() if name in old and one.dtype.kind not in "iub"]
        gradients = {name: (old[name] - moved[name]) / rate for name in changed}
        adjusted = self.adjust_arrays(gradients, old)
        found = {name: old[name] - rate * gradient for name, gradient in adjusted.items()}
        return moved | {name: one.astype(moved[name].dtype, copy=False) for name, one in found.items()}

    def applied_by_site(self, *keys: str) -> None:
        """State that the site's own code applies these keys by itself: "proximal_mu", "codec", "clip_norm", and
        "feddyn" or "scaffold" (it adds `pulls` to the gradients). Without this or an `adjust_...`, the work of a round
        that asks for them is declined.

        Raises `ValueError` for another key.
        """
        if unknown := set(keys) - {"proximal_mu", "codec", "clip_norm", "feddyn", "scaffold"}:
            known = '"proximal_mu", "codec", "clip_norm", "feddyn" and "scaffold"'
            raise ValueError(f"keys must be among {known}, not {sorted(unknown)[0]!r}")
        self.site_applies.update(keys)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The keys that the run asks for, and that nobody has applied."""
        if self.rules.is_applied:
            return ()
        return tuple(key for key in self._asked if key not in self.site_applies)

    @property
    def _asked(self) -> tuple[str, ...]:
        """What the run asks of gradients."""
        asked = {"proximal_mu": self.proximal_mu, "codec": self.within, "clip_norm": self.clip_norm is not None}
        asked |= {"feddyn": self.remembers_drift, "scaffold": self.has_control}
        return tuple(key for key, is_asked in asked.items() if is_asked)

    def drive(
        self,
        data: Data,
        keep: Mapping[str, Keepable] | None = None,
        *,
        collate: Collate | None = None,
        accumulate: int = 1,
        device: torch.device | str = "cpu",
        terms: Mapping[str, object] | None = None,
    ) -> LocalSteps:
        """The local steps of this round: iterate over them, and take one step of the optimizer for each.

        They end when the planned steps are done, when the client is told to stop, or when no time is left. A training
        that was killed resumes after the last saved step, with the same bits. Batch order, dropout and the like follow
        from the plan's seed, and the process-wide generators are restored at the end.

        Args:
            data: a data set, whose batches are drawn in an order that is the same on every machine; a `DataLoader`,
                which keeps its own batch size; or anything that can be iterated again and gives batches. Data without a
                length need a plan with steps.
            keep: what a step changes, by name, such as model and optimizer: anything with `state_dict` and
                `load_state_dict`, or a dict of numpy arrays, whose entries are replaced. It is saved and restored. A
                training without it begins anew after a kill.
            collate: makes a batch of a list of samples; by default as torch does.
            accumulate: the batches in one step. Each item is then a list of them: parts of the plan's batch for a data
                set, and consecutive batches otherwise.
            device: where the model is.
            terms: further settings that must be the same when a training resumes, as JSON can carry them.
        """
        return LocalSteps(self, data, keep or {}, collate, accumulate, torch.device(device), terms or {})

    def terms(self, n_steps: int) -> dict[str, object]:
        """The settings that must be the same when a training resumes from a checkpoint of another process."""
        found: dict[str, object] = {
            "torch": torch.__version__,
            "order": _SAMPLE_ORDER,
            "batch_size": self.batch_size,
            "steps": n_steps,
            "learning_rate": self.learning_rate,
            "proximal_mu": self.proximal_mu,
            "seed": self.seed,
        }
        usual = LocalPlan()
        later = ("optimizer", "momentum", "weight_decay", "clip_norm", "options")
        changed = {name: getattr(self, name) for name in later if getattr(self, name) != getattr(usual, name)}
        return found | {name: dict(value) if name == "options" else value for name, value in changed.items()}

    def bound_to(self, model: nn.Module, own: Collection[str] = (), norm: Norm | None = None) -> "LocalPlan":
        """This plan with its gradient rules, made for a model that has the global weights now.

        `own`: parameters that stay at the site, which FedProx does not pull. `norm`: the norm of the whole model's
        gradient, if this process has only a part of the model.
        """
        bound = replace(self, rules=GradientRules())
        bound._bind(model, own, norm)
        bound.rules.is_fixed = True
        return bound

    def begin(self, *models: nn.Module) -> None:
        """Begin a training of these models. Their present weights count as the global ones, unless the client's loop
        has already bound the global weights (`bound_to`).
        """
        if self.rules.is_fixed:
            return
        self.rules.forget()
        for model in models:
            self._bind(model)

    def _bind(self, model: nn.Module, own: Collection[str] = (), norm: Norm | None = None) -> None:
        self.rules.bind(model, self.proximal_mu, self.within, self.clip_norm, own, self.pulls, norm)


def _as_numpy(arrays: NamedArrays) -> dict[str, Array]:
    return {name: np.asarray(one) for name, one in arrays.items()}
