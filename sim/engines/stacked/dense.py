"""Stacked training of a chain of linear layers: gradients by hand, a dozen calls a step however many clients.

With m clients, W places in a batch, weights W_l (m, out, in), biases b_l (m, 1, out), and share s of a place in its
batch's mean (zero for an empty place), the loss of a client is sum_w s_w * cross_entropy(z_w, y_w), so that

    dz = s (softmax(z) - onehot(y)),    dW_l = dz^T a_{l-1},    db_l = sum_w dz,    da_{l-1} = dz W_l,

and an activation multiplies by its derivative, a function of its output. Each client's part is a product of its own
matrices (`bmm`), so it does not depend on the other clients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from umbel.aggregation.model.layout import Layout
from umbel.sim.data.data_set import SampleSet
from umbel.sim.engines.stacked.lockstep import Lockstep, StackedSteps, is_plain, pulls_of, sigmoid, whole_vectors
from umbel.sim.engines.work import CohortWork

_RUN_VALUES = 1 << 19  # of inputs and outputs: what is gathered for some steps stays in the caches
_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}
_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda errors, outputs: torch.ops.aten.threshold_backward(errors, outputs, 0),
    "tanh": torch.ops.aten.tanh_backward,
    "sigmoid": torch.ops.aten.sigmoid_backward,
}


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer, the places of its tensors in the flat model (`bias_at` None: no bias), and its activation."""

    n_in: int
    n_out: int
    weight_at: int
    bias_at: int | None
    activation: str = ""


def dense_chain(model: nn.Module) -> tuple[Dense, ...] | None:
    """The layers of a chain of linear layers and activations, at the places of its layout; None for any other model.

    `nn.Flatten` may come first. A model with a hook, a parametrization or a frozen weight is not such a chain.
    """
    offsets = {spec.name: spec.offset for spec in Layout.of_state(model.state_dict()).owners()}
    places = {id(parameter): offsets[name] for name, parameter in model.named_parameters()}
    layers = list[Dense]()
    for number, module in enumerate(_flat(model)):
        if not _is_bare(module):
            return None
        if type(module) is nn.Linear:
            bias_at = None if module.bias is None else places[id(module.bias)]  # pyright: ignore[reportUnnecessaryComparison]
            layers.append(Dense(module.in_features, module.out_features, places[id(module.weight)], bias_at))
        elif type(module) in _ACTIVATIONS and layers and not layers[-1].activation:
            last = layers[-1]
            layers[-1] = Dense(last.n_in, last.n_out, last.weight_at, last.bias_at, _ACTIVATIONS[type(module)])
        elif not (type(module) is nn.Identity or (type(module) is nn.Flatten and number == 0)):
            return None
    n_tensors = sum(1 + (layer.bias_at is not None) for layer in layers)
    if not layers or layers[-1].activation or n_tensors != len(places):  # fewer, if two layers share one
        return None
    return tuple(layers)


def train_dense(layers: Sequence[Dense], start: Tensor, work: CohortWork, steps: Lockstep, weights: Tensor) -> Tensor:
    """Train the clients of `steps` from `start`; the mean loss of each batch, float32, in the order of the batches.

    `weights`: float32 (m, n_values), gets their final weights.
    """
    training = _Training(layers, start, work, steps, weights)
    losses, done = torch.empty(int(steps.active.sum()), device=weights.device), 0
    with torch.no_grad():
        for n_active, n_steps in _runs(steps, layers[0].n_in + layers[-1].n_out):
            last = done + n_active * n_steps
            places = slice(done * steps.width, last * steps.width)
            shape = (n_steps, n_active, steps.width)
            losses[done:last] = training.run(steps.rows[places].view(shape), steps.shares[places].view(shape))
            done = last
    return losses


def _runs(steps: Lockstep, n_values: int) -> Iterator[tuple[int, int]]:
    """Numbers of clients and steps whose inputs are gathered at once. `n_values`: of a place in a batch."""
    numbers, lengths = np.unique(-steps.active, return_counts=True)
    for n_active, n_left in zip((-numbers).tolist(), lengths.tolist(), strict=True):
        most = max(1, _RUN_VALUES // (n_active * steps.width * n_values))
        yield from ((n_active, min(most, n_left - first)) for first in range(0, n_left, most))


@dataclass(frozen=True, slots=True)
class _Views:
    """Of the active clients: matrices (n, out, in), biases (n, 1, out), and memory for products like the matrices."""

    matrices: Tensor
    biases: Tensor | None
    products: Tensor


class _Training:
    def __init__(
        self, layers: Sequence[Dense], start: Tensor, work: CohortWork, steps: Lockstep, weights: Tensor
    ) -> None:
        weights[:] = start
        self._samples = _flat_inputs(work.data.samples)
        self._learning_rate = work.plan.learning_rate
        self._layers = layers
        self._matrices, self._biases = _views(layers, weights)
        self._products = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in self._matrices]
        self._steps: StackedSteps | None = None
        if not is_plain(work):
            gradients = torch.empty_like(weights)
            self._steps = StackedSteps(start, weights, gradients, work.plan, pulls_of(work, steps))
            self._matrix_gradients, self._bias_gradients = _views(layers, gradients)

    def run(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Some steps of the first clients: (steps, clients, places). The mean loss of each batch."""
        n_steps, n_active, width = rows.shape
        n_places, n_classes = n_active * width, self._layers[-1].n_out
        inputs = self._samples.inputs.index_select(0, rows.view(-1)).view(n_steps, n_active, width, -1)
        targets = self._samples.targets.index_select(0, rows.view(-1)).view(n_steps, 1, n_places)
        shares = shares.view(n_steps, 1, n_places)
        # Transposed and padded to whole vectors: see `lockstep.py`.
        n_columns = whole_vectors(n_places)
        in_mean = shares.new_zeros(n_steps, 1, n_columns)
        in_mean[:, :, :n_places] = shares
        wanted = shares.new_zeros(n_steps, n_classes, n_columns)
        wanted[:, :, :n_places].scatter_(1, targets, shares)
        logs = torch.empty_like(wanted)
        answers = wanted.new_zeros(n_classes, n_columns)
        seen = answers[:, :n_places].view(n_classes, n_active, width).transpose(0, 1)
        views = self._of(n_active)
        steps = zip(*(of_all.unbind(0) for of_all in (inputs, in_mean, wanted, logs)), strict=True)
        for values, in_mean_now, wanted_now, logs_now in steps:
            into, made = self._forward(views, values)
            seen.copy_(made)
            torch.log_softmax(answers, 0, out=logs_now)
            torch.exp(logs_now, out=answers).mul_(in_mean_now).sub_(wanted_now)
            self._back(views, seen.transpose(1, 2), into)
            if self._steps is not None:
                self._steps.take(n_active)
        right = logs[:, :, :n_places].gather(1, targets)
        return right.mul_(shares).view(-1, width).sum(1).neg_()

    def _of(self, n_active: int) -> list[_Views]:
        return [
            _Views(matrices[:n_active], None if biases is None else biases[:n_active], products[:n_active])
            for matrices, biases, products in zip(self._matrices, self._biases, self._products, strict=True)
        ]

    def _forward(self, views: Sequence[_Views], inputs: Tensor) -> tuple[list[Tensor], Tensor]:
        """The inputs of each layer, (n, places, in), and the output of the last, (n, classes, places)."""
        into = [inputs]
        for layer, view in zip(self._layers[:-1], views, strict=False):
            into.append(_activated(layer.activation, _products(view.biases, into[-1], view.matrices.transpose(1, 2))))
        last = views[-1]
        biases = None if last.biases is None else last.biases.transpose(1, 2)
        return into, _products(biases, last.matrices, into[-1].transpose(1, 2))

    def _back(self, views: Sequence[_Views], errors: Tensor, into: Sequence[Tensor]) -> None:
        for number in range(len(views) - 1, -1, -1):
            inputs, view = into[number], views[number]
            before = torch.bmm(errors, view.matrices) if number else None
            self._descend(number, view, errors, inputs)
            if before is not None:
                errors = _passed_back(self._layers[number - 1].activation, before, inputs)

    def _descend(self, number: int, view: _Views, errors: Tensor, inputs: Tensor) -> None:
        """Store the gradient for the optimizer; for plain SGD, take the step at once."""
        # `baddbmm_` into rows of the flat model takes four times as long as this
        gradient = torch.bmm(errors.transpose(1, 2), inputs, out=view.products)
        if self._steps is None:
            view.matrices.sub_(gradient, alpha=self._learning_rate)
            if view.biases is not None:
                view.biases.sub_(errors.sum(1, keepdim=True), alpha=self._learning_rate)
            return
        n_active = len(gradient)
        self._matrix_gradients[number][:n_active] = gradient
        if (gradients := self._bias_gradients[number]) is not None:
            torch.sum(errors, 1, keepdim=True, out=gradients[:n_active])


def _views(layers: Sequence[Dense], flat: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
    """The matrices (m, out, in) and biases (m, 1, out) as views of the flat models."""
    matrices, biases = list[Tensor](), list[Tensor | None]()
    for layer in layers:
        weight = flat[:, layer.weight_at : layer.weight_at + layer.n_in * layer.n_out]
        matrices.append(weight.view(-1, layer.n_out, layer.n_in))
        at = layer.bias_at
        biases.append(None if at is None else flat[:, at : at + layer.n_out].view(-1, 1, layer.n_out))
    return matrices, biases


def _products(sums: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left, right) if sums is None else torch.baddbmm(sums, left, right)


def _activated(activation: str, values: Tensor) -> Tensor:
    match activation:
        case "relu":
            return values.relu_()
        case "tanh":
            return values.tanh_()
        case "sigmoid":
            return sigmoid(values)
        case _:
            return values


def _passed_back(activation: str, errors: Tensor, outputs: Tensor) -> Tensor:
    """Multiply by the derivative of the activation, which for these is a function of its output."""
    backward = _BACKWARD.get(activation)
    return errors if backward is None else backward(errors, outputs)


def _flat_inputs(samples: SampleSet) -> SampleSet:
    return SampleSet(samples.inputs.reshape(len(samples), -1), samples.targets)


def _flat(model: nn.Module) -> list[nn.Module]:
    if type(model) is nn.Sequential and _is_bare(model):
        return [module for part in model for module in _flat(part)]
    return [model]


def _is_bare(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
    return not any(hooks) and all(p.requires_grad and p.dtype is torch.float32 for p in module.parameters())
