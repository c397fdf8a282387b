"""The ready trainer: any `nn.Module`, any loss, any map-style data set.

It draws batch order and dropout from the plan's seed. When it must stop, or has no time for the next step, it returns
the steps done so far: partial work. After a kill the training resumes from its checkpoint and gives the same bits. A
loss that becomes NaN does not stop it: the loop declines the update with the reason.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from umbel.client.app import Client
from umbel.client.local.batches import Batch, Data, EndlessBatches, n_batches, n_samples, ordered_batches, to_device
from umbel.client.local.devices import Pace, Precision, autocast, pick_device, pick_precision, seeded
from umbel.client.local.plan import LocalPlan
from umbel.client.local.progress import Means, TrainingProgress
from umbel.client.local.results import Evaluation, TrainResult

EVALUATION_BATCH_SIZE = 256
Loss = Callable[[Any, Any], Tensor]
Metric = Callable[[Any, Any], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter], float], Optimizer]


def _sgd(parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    return SGD(parameters, lr=learning_rate)


class TorchClient(Client):
    """A client made of a model, a loss and data.

    Args:
        model: any module. Inputs that are a tuple or a mapping become its positional or keyword arguments.
        loss: function of (output, target) that returns a mean over the batch, as a scalar.
        train: a data set of (inputs, target) pairs, or a `DataLoader`, which keeps its own batch size.
        holdout: the same, for evaluation.
        optimizer: function of (parameters, learning_rate), called each round; plain SGD by default.
        device: "auto" or a name that torch knows.
        precision: of the forward pass.
        metrics: name -> function of (output, target) that returns a mean over the batch. By default the accuracy, if
            targets are classes. The loss is always among the metrics.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        train: Data,
        holdout: Data | None = None,
        optimizer: OptimizerFactory | None = None,
        device: str = "auto",
        precision: Precision = "auto",
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.device = pick_device(device)
        self.precision = pick_precision(precision, self.device)
        self.model = model.to(self.device)
        self.sample_count = n_samples(train)
        if self.sample_count < 1 or n_batches(train, 1) < 1:
            raise ValueError("the training data are empty; a client needs at least one sample, and one batch")
        self._loss, self._train, self._holdout, self._metrics = loss, train, holdout, metrics
        self._optimizer = optimizer or _sgd

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        """Train for the planned steps, or for as many as there is time for; at least one."""
        n_in_pass = n_batches(self._train, plan.batch_size)
        planned, full = plan.steps_for(n_in_pass), plan.full_steps_for(n_in_pass)
        was_training = model.training
        model.to(self.device).train()
        try:
            with seeded(plan.seed, self.device):
                done, means = self._run_steps(model, plan, planned)
        finally:
            model.train(was_training)
        first, last = means.first("loss"), means.last("loss")
        return TrainResult(self.sample_count, done, planned, means.result(), full, first, last)

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        """Loss and metrics over the held-out data; None without any."""
        if self._holdout is None or n_samples(self._holdout) == 0:
            return None
        means, was_training = Means(), model.training
        model.to(self.device).eval()
        try:
            with torch.no_grad():
                for batch in ordered_batches(self._holdout, EVALUATION_BATCH_SIZE):
                    self._forward(model, batch, means)
        finally:
            model.train(was_training)
        return Evaluation(n_samples(self._holdout), means.result())

    def _run_steps(self, model: nn.Module, plan: LocalPlan, planned: int) -> tuple[int, Means]:
        batches = EndlessBatches(self._train, plan.batch_size, plan.seed, self.device)
        step = _Step(model, self._optimizer, plan, self.device, self.precision)
        training = TrainingProgress(
            model, step.optimizer, step.scaler, Means(), batches, self.device, self._terms(plan, planned)
        )
        done, step_s, pace = training.resume(plan.checkpoint), 0.0, Pace(self.device)
        started = time.perf_counter()
        for batch in batches:
            step.apply(self._forward(model, batch, training.means))
            pace.step_queued()
            done += 1
            now = time.perf_counter()
            started, step_s = now, now - started
            if done >= planned or plan.should_stop() or plan.seconds_left < step_s:
                break
            if plan.checkpoint.is_due():
                training.keep(plan.checkpoint, done)
                started = time.perf_counter()
        return done, training.means

    def _terms(self, plan: LocalPlan, planned: int) -> dict[str, object]:
        """What must be the same to resume from a checkpoint of another process."""
        return {
            "torch": torch.__version__,
            "order": "sample order 1",  # the version of `aggregation/sample_order.py`
            "device": self.device.type,
            "precision": str(self.precision),
            "batch_size": plan.batch_size,
            "sample_count": self.sample_count,
            "steps": planned,
            "learning_rate": plan.learning_rate,
            "proximal_mu": plan.proximal_mu,
            "seed": plan.seed,
        }

    def _forward(self, model: nn.Module, batch: Batch, means: Means) -> Tensor:
        """The batch's loss. Adds it and the metrics to `means`."""
        inputs, target = to_device(batch[0], self.device), to_device(batch[1], self.device)
        with autocast(self.device, self.precision):
            output = _call(model, inputs)
            loss = self._loss(output, target)
        with torch.no_grad():
            means.add({"loss": loss, **self._measure(output, target)}, _batch_size(target))
        return loss

    def _measure(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        if self._metrics is None:
            return _default_metrics(output, target)
        return {name: metric(output, target) for name, metric in self._metrics.items()}


class _Step:
    """Backward, proximal term and optimizer step, with loss scaling if float16 needs it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        plan: LocalPlan,
        device: torch.device,
        precision: torch.dtype,
    ) -> None:
        self.optimizer = optimizer([p for p in model.parameters() if p.requires_grad], plan.learning_rate)
        self._proximal = ProximalTerm(model, plan.proximal_mu)
        named = model.named_parameters(remove_duplicate=False)  # a shared one appears under each of its names
        self._within = [(p, plan.within[n]) for n, p in named if n in plan.within and p.requires_grad]
        # Gradients of a model that is itself float16 cannot be unscaled.
        is_half = any(p.dtype == torch.float16 for p in model.parameters())
        scales = precision == torch.float16 and device.type != "cpu" and not is_half
        self.scaler = torch.amp.GradScaler(device.type, enabled=scales)

    def apply(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self._proximal.add_gradient()
        for parameter, project in self._within:
            if parameter.grad is not None:
                parameter.grad = project(parameter.grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def _call(model: nn.Module, inputs: Any) -> Any:
    match inputs:
        case Mapping():
            return model(**cast(Mapping[str, Any], inputs))
        case list():
            return model(*inputs)
        case _:
            return model(inputs)


def _default_metrics(output: Any, target: Any) -> dict[str, Tensor]:
    """Accuracy where targets are class indices and outputs hold one score a class (dimension 1), else nothing."""
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)) or target.is_floating_point():
        return {}
    if output.dim() < 2 or target.shape != output.shape[:1] + output.shape[2:]:
        return {}
    return {"accuracy": (output.argmax(dim=1) == target).to(torch.float32).mean()}


def _batch_size(target: Any) -> int:
    """The samples in a batch, by its target's first tensor; 1 without one."""
    while isinstance(target, Mapping | list) and target:
        values = cast(Any, target.values() if isinstance(target, Mapping) else target)
        target = next(iter(values))
    return int(target.shape[0]) if isinstance(target, Tensor) and target.dim() else 1


class ProximalTerm:
    """FedProx's proximal term (Li et al. 2020, "Federated Optimization in Heterogeneous Networks", eq. 2).

    The local objective becomes h(w) = F(w) + mu/2 * ||w - w_global||^2 over the trainable parameters. w_global is the
    model when this is made. With mu = 0 it does nothing.
    """

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
