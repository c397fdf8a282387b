"""The ready trainer: any `nn.Module`, any batches, the run's optimizer or one's own, and hooks for the rest.

It draws batch order and dropout from the plan's seed. When it must stop, or has no time for the next step, it returns
the steps done so far: partial work. After a kill the training resumes from its checkpoint and gives the same bits. A
loss that becomes NaN does not stop it: the loop declines the update with the reason.
"""

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from umbel.client.app import Client
from umbel.client.local.batches import (
    WHOLE,
    BatchPart,
    Collate,
    Data,
    n_batches,
    n_samples,
    ordered_batches,
    samples_in,
    to_device,
)
from umbel.client.local.devices import Precision, autocast, pick_device, pick_precision, whole_float32
from umbel.client.local.plan import LocalPlan
from umbel.client.local.progress import CountSums, HasState, Means, note_measured
from umbel.client.local.results import Evaluation, TrainResult, WeightedMean
from umbel.client.local.steps import LocalSteps
from umbel.client.training.losses import Loss, LossName, Measure, accuracy_of_classes, named_loss

EVALUATION_BATCH_SIZE = 256
Metric: TypeAlias = Callable[[Any, Any], Tensor | WeightedMean]
OptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter], float], Optimizer]
Measured: TypeAlias = Mapping[str, Tensor | WeightedMean]
"""What a step measures: a floating-point tensor is a mean over the batch, a `WeightedMean` over other things, and
an integer tensor adds up.
"""
StepLoss: TypeAlias = Tensor | tuple[Tensor, Measured]
Configured: TypeAlias = (
    Optimizer | Sequence[Optimizer] | tuple[Optimizer | Sequence[Optimizer], LRScheduler | Sequence[LRScheduler]]
)
_TARGETS = ("labels", "label", "target", "targets")  # in a batch that is a mapping


class TorchClient(Client):
    """A client made of a model, a loss and data. Override a hook where an argument does not suffice:

    - `training_step(model, batch)` returns the loss, or the loss and what else was measured. With several optimizers
      that take turns it yields one loss for each of them.
    - `configure(model, plan)` returns the optimizer, or the optimizer and its schedule over the steps.
    - `evaluation_step(model, batch)` returns what was measured.

    Args:
        model: any module. Inputs that are a tuple or a mapping become its positional or keyword arguments.
        loss: function of (output, target) that returns a mean over the batch, as a scalar; or the name of one:
            "classes" (also of pixels), "tokens", "one-logit", "multi-label", "regression" (`losses.py`). None: the
            model returns an output with a `loss`, as models of Hugging Face do.
        train: a data set, or a `DataLoader`, which keeps its own batch size, or anything that gives batches. A batch is
            (inputs, target), (input, ..., target), or a mapping with the target as "labels", "label", "target" or
            "targets".
        holdout: the same, for evaluation.
        optimizer: function of (parameters, learning_rate), called each round; by default what the run file asks for.
        device: "auto" or a name that torch knows.
        precision: of the forward pass. "float32" also on GPUs, without TF32; "auto" takes bfloat16 or float16 there.
        metrics: name -> function of (output, target) that returns a mean over the batch, as a tensor, or over something
            else, such as its positive samples, as a `WeightedMean`. By default the accuracy, where
            the loss or the shapes tell what that is. The loss is always among the metrics.
        counts: name -> function of (output, target) that returns integers which add up over batches and clients, such
            as `confusion_counts` and `score_histogram`.
        collate: makes a batch of a list of samples; by default as torch does.
        accumulate: the parts in which a step computes the gradient of its batch, one after another, to save memory.
        evaluation_batch_size: samples that are evaluated at once.
        sample_count: the number of samples in `train`, if `train` does not tell it.
        part: in a silo of several ranks, which part of each batch this rank takes (`umbel.datacenter.rank_part`).
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | LossName | None,
        train: Data,
        holdout: Data | None = None,
        optimizer: OptimizerFactory | None = None,
        device: str = "auto",
        precision: Precision = "float32",
        metrics: Mapping[str, Metric] | None = None,
        *,
        counts: Mapping[str, Metric] | None = None,
        collate: Collate | None = None,
        accumulate: int = 1,
        evaluation_batch_size: int = EVALUATION_BATCH_SIZE,
        sample_count: int | None = None,
        part: BatchPart = WHOLE,
    ) -> None:
        self.part = part
        self.device = pick_device(device)
        self.precision = pick_precision(precision, self.device)
        self.model = model.to(self.device)
        self.sample_count = _count_of(train, sample_count)
        self._train, self._holdout, self._optimizer = train, holdout, optimizer
        self._collate, self._accumulate, self._evaluation_batch_size = collate, accumulate, evaluation_batch_size
        named = named_loss(loss) if isinstance(loss, str) else None
        self._loss = named.loss if named else cast("Loss | None", loss)
        self._measure = _measures(metrics, named.measure if named else accuracy_of_classes, counts or {})

    @property
    def train_data(self) -> Data:
        """What it trains on, as it was given."""
        return self._train

    def on_one_batch(self, batch_size: int) -> "TorchClient":
        """The same client, but trained on one batch again and again, so that its steps wait for no data.

        Data sets give a batch of `batch_size` samples, or of the part of it in which the client accumulates gradients;
        a rank of a silo takes its part of that.
        """
        data, size = self._train, max(1, batch_size // self._accumulate)
        found = copy.copy(self)
        found._train = _Repeated(next(iter(ordered_batches(data, size, self._collate, self.part)))[0])
        return found

    # --- hooks --------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, batch: Any) -> StepLoss | Iterator[StepLoss]:
        """The loss of a batch, which is on the client's device. Raises `ValueError` for a batch without a target."""
        return self._forward(model, batch)

    def evaluation_step(self, model: nn.Module, batch: Any) -> Measured:
        """What is measured of a batch, which is on the client's device, without gradients."""
        loss, measured = self._forward(model, batch)
        return {"loss": loss, **measured}

    def configure(self, model: nn.Module, plan: LocalPlan) -> Configured:
        """The optimizer or optimizers of this round; or a pair of these and schedules, which advance at each step."""
        if self._optimizer is None:
            return plan.make_optimizer(model)
        return self._optimizer([p for p in model.parameters() if p.requires_grad], plan.learning_rate)

    # --- the client ---------------------------------------------------------------------------------------------------

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        """Train for the planned steps, or for as many as there is time for; at least one."""
        with _mode(model.to(self.device), is_training=True), self._whole_precision():
            step, n_parts = _Step(self, model, plan), self._parts_of_step(plan)
            terms = {"device": self.device.type, "precision": str(self.precision), "sample_count": self.sample_count}
            steps = plan.drive(
                self._train,
                step.kept(),
                collate=self._collate,
                accumulate=n_parts,
                device=self.device,
                terms=terms,
            )
            for item in steps:
                step.take(item if n_parts > 1 else [item], steps)
        return steps.result(self.sample_count)

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        """What `evaluation_step` measures over the held-out data; None without any."""
        if self._holdout is None or n_samples(self._holdout) == 0:
            return None
        return self._measured_over(model, self._holdout, self.part)

    def training_loss(self, model: nn.Module) -> float | None:
        """The mean of the loss that `evaluation_step` measures, over the training data; None if it measures no loss."""
        return self._measured_over(model, self._train).metrics.get("loss")

    def _parts_of_step(self, plan: LocalPlan) -> int:
        """The batches in one step: a step over all samples may need more of them, so that the memory suffices."""
        n_parts = n_batches(self._train, self._evaluation_batch_size) if plan.may_accumulate else None
        return max(self._accumulate, n_parts or 1)

    def _measured_over(self, model: nn.Module, data: Data, part: BatchPart = WHOLE) -> Evaluation:
        means, counts, n_seen = Means(), CountSums(), 0
        with _mode(model.to(self.device), is_training=False), self._whole_precision(), torch.no_grad():
            for batch, share in ordered_batches(data, self._evaluation_batch_size, self._collate, part):
                with autocast(self.device, self.precision):
                    measured = self.evaluation_step(model, to_device(batch, self.device))
                if not share:
                    continue
                n_in_batch = _n_measured(batch)
                note_measured(measured, n_in_batch, means, counts)
                n_seen += n_in_batch
        n = n_samples(data)
        return Evaluation(n_seen if n is None or part.count > 1 else n, means.result(), counts=counts.result())

    def _forward(self, model: nn.Module, batch: Any) -> tuple[Tensor, Measured]:
        if self._loss is None:
            return _own_loss(_called(model, batch)), {}
        inputs, target = _split(batch)
        output = _called(model, inputs)
        loss = self._loss(output, target)
        with torch.no_grad():
            return loss, self._measure(output, target)

    def _whole_precision(self) -> AbstractContextManager[None]:
        return whole_float32(self.device) if self.precision == torch.float32 else nullcontext()


class _Step:
    """Steps of the optimizers: backward, what the run asks of gradients, and loss scaling if float16 needs it."""

    def __init__(self, client: TorchClient, model: nn.Module, plan: LocalPlan) -> None:
        self._client, self._model, self._plan = client, model, plan
        self._optimizers, self._schedules = _configured(client.configure(model, plan))
        # Gradients of a model that is itself float16 cannot be unscaled.
        is_half = any(p.dtype == torch.float16 for p in model.parameters())
        device = client.device
        scales = client.precision == torch.float16 and device.type != "cpu" and not is_half
        self._scaler = torch.amp.GradScaler(device.type, enabled=scales)

    def kept(self) -> dict[str, HasState]:
        """What a step changes, by the names that checkpoints have."""
        found: dict[str, HasState] = {"model": self._model, "optimizer": self._optimizers[0], "scaler": self._scaler}
        found |= {f"optimizer_{i}": one for i, one in enumerate(self._optimizers[1:], 2)}
        return found | {f"schedule_{i}": one for i, one in enumerate(self._schedules, 1)}

    def take(self, batches: Sequence[Any], steps: LocalSteps) -> None:
        """One step with the mean gradient of these parts of a batch."""
        sizes = [_n_measured(batch) for batch in batches]
        self._zero()
        for batch, size in zip(batches, sizes, strict=True):
            found = self._found(batch)
            if not isinstance(found, (tuple, Tensor)):
                self._take_turns(found, size, steps, len(batches))
                break
            self._scaler.scale(self._noted(found, size, steps, steps.share * size / sum(sizes))).backward()
        else:
            self._move(self._optimizers)
        for schedule in self._schedules:
            schedule.step()

    def _take_turns(self, losses: Iterator[StepLoss], size: int, steps: LocalSteps, n_parts: int) -> None:
        """One step of each optimizer with a loss of its own, which is computed after the previous optimizer's step."""
        if n_parts > 1:
            raise ValueError("a training_step that yields losses cannot accumulate gradients: set accumulate = 1")
        optimizers = iter(self._optimizers)
        while True:
            with autocast(self._client.device, self._client.precision):
                found = next(losses, None)
            if found is None:
                break
            if (optimizer := next(optimizers, None)) is None:
                raise ValueError(
                    f"training_step yields more losses than configure returns optimizers ({len(self._optimizers)})"
                )
            self._zero()
            self._scaler.scale(self._noted(found, size, steps, steps.share)).backward()
            self._move([optimizer])

    def _found(self, batch: Any) -> StepLoss | Iterator[StepLoss]:
        client = self._client
        with autocast(client.device, client.precision):
            return client.training_step(self._model, to_device(batch, client.device))

    def _noted(self, found: StepLoss, size: int, steps: LocalSteps, share: float) -> Tensor:
        """The loss times `share`, after it was noted with what else was measured."""
        loss, measured = found if isinstance(found, tuple) else (found, {})
        steps.note_measured({"loss": loss, **measured}, size)
        return loss if share == 1.0 else loss * share

    def _zero(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _move(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self._scaler.unscale_(optimizer)
        self._plan.adjust_gradients(self._model)
        for optimizer in optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()


class _Repeated:
    """Data without end: one batch."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        return repeat(self._batch)


def _configured(configured: Configured) -> tuple[list[Optimizer], list[LRScheduler]]:
    """The optimizers and schedules. Raises `TypeError` for something else."""
    optimizers: Any = configured
    schedules: Any = ()
    if isinstance(configured, tuple) and len(configured) == 2 and not isinstance(configured[1], Optimizer):
        optimizers, schedules = configured
    found = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    planned = [schedules] if isinstance(schedules, LRScheduler) else list(schedules)
    if not found or not all(isinstance(one, Optimizer) for one in found):
        raise TypeError("configure must return an optimizer, or several, or a pair of optimizers and schedules")
    if not all(isinstance(one, LRScheduler) for one in planned):
        raise TypeError("the second value that configure returns must be a schedule of torch.optim.lr_scheduler")
    return found, planned


def _called(model: nn.Module, inputs: Any) -> Any:
    match inputs:
        case Mapping():
            return model(**cast(Mapping[str, Any], inputs))
        case list() | tuple():
            return model(*cast(Sequence[Any], inputs))
        case _:
            return model(inputs)


def _split(batch: Any) -> tuple[Any, Any]:
    """Inputs and target. Raises `ValueError` for a batch of another form."""
    if isinstance(batch, Mapping):
        named = cast(Mapping[str, Any], batch)
        if (key := next((name for name in _TARGETS if name in named), None)) is not None:
            return {name: value for name, value in named.items() if name != key}, named[key]
        raise ValueError(
            f"a batch has the keys {', '.join(sorted(map(str, named)))[:200]}, and no target: name the target "
            f'"{_TARGETS[0]}", or override training_step and evaluation_step'
        )
    if isinstance(batch, list | tuple) and len(cast(Sequence[Any], batch)) >= 2:
        *inputs, target = cast(Sequence[Any], batch)
        return inputs[0] if len(inputs) == 1 else inputs, target
    raise ValueError(
        f"a batch is a {type(batch).__name__}, in which nothing shows what the target is: give (inputs, target) or a "
        "mapping, or override training_step and evaluation_step"
    )


def _own_loss(output: Any) -> Tensor:
    """The loss in a model's output. Raises `ValueError` without one."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise ValueError(
            f"the model returned a {type(output).__name__} without a loss: give TorchClient a loss, or batches with "
            "the labels that the model computes its loss from"
        )
    return found


def _measures(
    metrics: Mapping[str, Metric] | None, usual: Measure, counts: Mapping[str, Metric]
) -> Callable[[Any, Any], Measured]:
    def measured(output: Any, target: Any) -> Measured:
        means: Measured = (
            usual(output, target) if metrics is None else {n: one(output, target) for n, one in metrics.items()}
        )
        return {**means, **{name: count(output, target) for name, count in counts.items()}}

    return measured


def _n_measured(batch: Any) -> int:
    """The samples in a batch: by its target if it has one, because inputs may be lists of anything."""
    try:
        return samples_in(_split(batch)[1])
    except ValueError:
        return samples_in(batch)


def _count_of(train: Data, told: int | None) -> int:
    """The number of samples. Raises `TypeError` for data that do not tell, `ValueError` for data without any."""
    found = n_samples(train) if told is None else told
    if found is None:
        raise TypeError(
            "the data do not tell how many samples they hold, and this number weights the client's update: set "
            "sample_count, or give a torch Dataset with a length (__len__). Other data, such as a list, are taken as "
            "batches"
        )
    if found < 1 or n_batches(train, 1) == 0:
        raise ValueError("the training data are empty; a client needs at least one sample, and one batch")
    return found


@contextmanager
def _mode(model: nn.Module, *, is_training: bool) -> Generator[None]:
    """The model in training mode or not; restored at the end."""
    before = model.training
    model.train(is_training)
    try:
        yield
    finally:
        model.train(before)
