"""Stacked training of any module whose samples do not mix: torch differentiates it for one client, and the resulting
calls are recorded once, for any number of clients.

`vmap(grad_and_value(...))` decides at every step what to call for a stack of clients, which takes longer than the calls
of a small model. So its calls are recorded on fake tensors (`make_fx`) for a number of clients that is a large prime.
A multiple of this prime in a recorded shape stands for the number of clients and is replaced by it. Calls that change
nothing are removed.

A trial decides whether a module can be stacked: a few steps must give what the module itself gives, one client after
another. Batch normalization, dropout and the like fail, and are refused with that reason. The trial is on the CPU,
whatever trains: a GPU's convolutions are too inexact to tell a mixing module from rounding.
"""

import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx import Graph, GraphModule, Node

from umbel.sim.engines.stacked.lockstep import decompositions, log_softmax, log_softmax_backward
from umbel.sim.engines.work import EngineError

Loss = Callable[[Tensor, Tensor], Tensor]
Gradients = Callable[[Mapping[str, Tensor], Tensor, Tensor, Tensor], tuple[dict[str, Tensor], Tensor]]
_PRIME = 7919  # clients in the recording: unlikely to divide a shape of a model
_TRIED = (1, 3)
_TOLERANCE = 1e-5
_aten = torch.ops.aten


def client_loss(model: nn.Module, loss: Loss) -> Callable[[Mapping[str, Tensor], Tensor, Tensor, Tensor], Tensor]:
    """The loss of one client's batch. `loss`: of each sample, (W, ...); `shares`: (W,), of a sample in the mean."""

    def of_batch(parameters: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        losses = loss(functional_call(model, dict(parameters), (inputs,)), targets)
        return (losses.reshape(len(shares), -1).mean(1) * shares).sum()

    return of_batch


def stacked_gradients(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> Gradients:
    """A function of weights (m, ...) by name, inputs (m, W, ...), targets (m, W, ...) and shares (m, W): the gradients
    of m clients' losses by name, and the losses (m,).

    `inputs`, `targets`: an example of W samples. Raises `EngineError`, with the reason, if the module cannot be
    stacked.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch only warns when it loops over a call that it cannot stack
            recorded = _record(model, loss, inputs, targets)
            if inputs.device.type == "cpu":
                _try_out(recorded, model, loss, inputs, targets)
            else:
                here, *example = deepcopy(model).to("cpu"), inputs.to("cpu"), targets.to("cpu")
                _try_out(_record(here, loss, *example), here, loss, *example)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"{type(model).__name__} cannot be stacked: {_reason(error)}") from error
    return recorded


def _reason(error: Exception) -> str:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "random operation" in first_line:  # torch's own text names its flags
        return "it draws random numbers while it trains, as dropout does, and each client needs its own"
    if "data-dependent control flow" in first_line:
        return "it branches (`if`, `while`) on the values of a tensor, and these differ from client to client"
    if "performance drop" in first_line and (operation := re.search(r"aten::(\w+)", first_line)):
        return f"torch cannot compute {operation[1]} for many clients at once"
    return first_line


def _look(of_stack: Callable[..., Any], model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Run once with two clients, to find calls that torch would loop over thousands of times."""
    names = [name for name, _ in model.named_parameters()]
    *weights, given, wanted, shares = _stack_of(2, model, inputs, targets)
    of_stack(dict(zip(names, weights, strict=True)), given, wanted, shares)


def _record(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> Gradients:
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

    of_stack = vmap(grad_and_value(client_loss(model, loss)))
    _look(of_stack, model, inputs, targets)
    names = [name for name, _ in model.named_parameters()]

    def flat(*tensors: Tensor) -> list[Tensor]:
        *weights, given, wanted, shares = tensors
        gradients, losses = of_stack(dict(zip(names, weights, strict=True)), given, wanted, shares)
        return [*(gradients[name] for name in names), losses]

    examples = _stack_of(_PRIME, model, inputs, targets)
    graph_module = make_fx(flat, decompositions(), tracing_mode="fake")(*examples)
    _replace_softmax(graph_module.graph)
    for_any_number(graph_module)

    def gradients(
        weights: Mapping[str, Tensor], given: Tensor, wanted: Tensor, shares: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        tensors = [*(weights[name] for name in names), given, wanted, shares]
        if len(shares) == 1:  # torch computes the convolution of a single client differently, with other bits
            tensors = [torch.cat([one, one]) for one in tensors]
        *found, losses = (one[: len(shares)] for one in cast(list[Tensor], graph_module.forward(*tensors)))
        return dict(zip(names, found, strict=True)), losses

    return gradients


def _stack_of(n: int, model: nn.Module, inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """Weights, inputs, targets and shares of n clients; expanded, since only their shapes matter."""
    for parameter in model.parameters():
        yield parameter.detach().expand(n, *parameter.shape)
    yield inputs.expand(n, *inputs.shape)
    yield targets.expand(n, *targets.shape)
    yield torch.full((n, len(inputs)), 1 / len(inputs), device=inputs.device)


# --- the recording ----------------------------------------------------------------------------------------------------


def _replace_softmax(graph: Graph) -> None:
    """Use our own softmax over the last dimension of float32."""
    for node in graph.nodes:
        if node.target not in (_aten._log_softmax.default, _aten._log_softmax_backward_data.default):
            continue
        value, n_tensors = node.meta["val"], 1 + (node.target is _aten._log_softmax_backward_data.default)
        if value.dtype is torch.float32 and node.args[n_tensors] in (-1, value.ndim - 1):
            node.target = (log_softmax, log_softmax_backward)[n_tensors - 1]
            node.args = node.args[:n_tensors]


def for_any_number(module: GraphModule) -> None:
    """Replace multiples of the prime by the number of clients, and remove calls that change nothing."""
    graph = module.graph
    _remove_no_ops(graph)
    first = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        number = graph.call_function(_aten.sym_size.int, (first, 0))
        multiples = {1: number}
        for factor in sorted(set(_multiples(graph)) - {1}):
            multiples[factor] = graph.call_function(operator.mul, (number, factor))

    def meant(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(meant(one) for one in value)
        return multiples[value // _PRIME] if _is_multiple(value) else value

    for node in graph.nodes:
        if node.op == "call_function" and node not in multiples.values():
            node.args = meant(node.args)
            node.kwargs = {name: meant(value) for name, value in node.kwargs.items()}
    graph.eliminate_dead_code()
    module.recompile()


def _multiples(graph: Graph) -> Iterator[int]:
    def within(value: Any) -> Iterator[int]:
        if isinstance(value, list | tuple):
            for one in value:
                yield from within(one)
        elif _is_multiple(value):
            yield value // _PRIME

    for node in graph.nodes:
        yield from within(node.args)
        yield from within(tuple(node.kwargs.values()))


def _is_multiple(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0 and value % _PRIME == 0


def _remove_no_ops(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and (same := _same_as(node)) is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _same_as(node: Node) -> Node | None:
    """The node with the same value, if this one changes nothing."""
    before = node.args[0] if node.args else None
    if not isinstance(before, Node):
        return None
    match node.target:
        case _aten.detach.default | _aten.alias.default:
            return before
        case _aten.view.default | _aten._unsafe_view.default | _aten.expand.default:
            return before if _shape(before) == _shape(node) else None
        case _aten.mul.Scalar | _aten.mul.Tensor if node.args[1] == 1:
            return before
        case _aten.transpose.int if before.target is _aten.transpose.int and set(before.args[1:]) == set(node.args[1:]):
            return cast(Node, before.args[0])
        case _:
            return None


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


# --- trying it out ----------------------------------------------------------------------------------------------------


@torch.enable_grad()
def _try_out(recorded: Gradients, model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    """Raise `EngineError` unless it gives what the module gives for each client alone, also for incomplete batches:
    then no sample affects another's gradient.
    """
    draw = torch.Generator().manual_seed(0)
    for n in _TRIED:
        weights = {
            name: torch.stack([p.detach() * (1 + 0.1 * torch.randn((), generator=draw)) for _ in range(n)])
            for name, p in model.named_parameters()
        }
        filled = [max(1, len(inputs) - i) for i in range(n)]
        shares = torch.zeros(n, len(inputs), device=inputs.device)
        for i, many in enumerate(filled):
            shares[i, :many] = 1 / many
        gradients, losses = recorded(
            weights, inputs.expand(n, *inputs.shape), targets.expand(n, *targets.shape), shares
        )
        for i, many in enumerate(filled):
            alone = {name: weights[name][i].clone().requires_grad_() for name in weights}
            own = loss(functional_call(model, alone, (inputs[:many],)), targets[:many]).mean()
            wanted = torch.autograd.grad(own, list(alone.values()), materialize_grads=True)
            found = [gradients[name][i] for name in alone]
            for one, other in zip((*wanted, own.detach()), (*found, losses[i]), strict=True):
                if not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * (1 + float(one.abs().max()))):
                    raise EngineError(
                        f"{type(model).__name__} cannot be stacked: samples of one batch affect each other's "
                        "gradients (batch normalization), or it draws random numbers (dropout)"
                    )
