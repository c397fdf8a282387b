"""What a run does to every gradient of local training: FedProx's term, FedDyn's pull, the codec's part, the clip."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from umbel.client.local.bare_names import bare_name

Projection = Callable[[Tensor], Tensor]
Norm = Callable[[Sequence[Tensor]], Tensor]
"""The L2 norm of the gradients of these parameters, as a tensor of no dimension."""
_WRAPPERS = ("module.", "_module.")  # the prefixes of DDP and Opacus


@dataclass(slots=True)
class _Rule:
    """What is done to one parameter's gradient. `anchor`: its global value, if FedProx pulls towards it. `pull`: what
    the client adds to it in each step.
    """

    anchor: Tensor | None
    project: Projection | None
    pull: Tensor | None = None


class GradientRules:
    """The rules of one training: bind them to the model while that has the global weights, and apply them in each step.

    FedProx (Li et al. 2020, "Federated Optimization in Heterogeneous Networks", eq. 2): the local objective becomes
    h(w) = F(w) + mu/2 * ||w - w_global||^2 over the trainable parameters, so their gradient gains mu (w - w_global).
    """

    def __init__(self) -> None:
        self.forget()
        self.is_fixed = False  # whether the client's loop has bound them
        self.is_applied = False  # whether `apply` was ever called

    def forget(self) -> None:
        """Let go of every model."""
        self._mu, self._clip_norm, self._norm = 0.0, cast("float | None", None), cast(Norm, _norm_of)
        self._by_name: dict[str, _Rule] = {}
        self.own = frozenset[str]()  # the names of parameters that have no global value
        self._by_parameter: dict[int, _Rule] = {}
        self._parameters: list[nn.Parameter] = []  # which keeps the ids of `_by_parameter` in use
        self._last: tuple[nn.Module, list[nn.Parameter], list[tuple[nn.Parameter, _Rule]]] | None = None
        self.is_bound = False

    def bind(
        self,
        model: nn.Module,
        mu: float,
        within: Mapping[str, Projection],
        clip_norm: float | None,
        own: Collection[str] = (),
        pulls: Mapping[str, Tensor] | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Take the model's present weights for the global ones. Memory with FedProx: one copy of them.

        `mu`: FedProx's. `within`: by parameter name, the projection of a gradient onto what the codec can send.
        `clip_norm`: the greatest L2 norm of the gradient after that; None: it is not clipped. `own`: parameters that
        have no global value, so nothing pulls them. `pulls`: by parameter name, what is added to each gradient, as the
        client has kept it. `norm`: how the norm is found that is clipped, if this process has only a part of the model.
        """
        pulls, self.own, self._norm = pulls or {}, frozenset(own), norm or _norm_of
        self._mu, self._clip_norm, self.is_bound = mu, clip_norm, True
        if not (mu or within or clip_norm is not None or pulls):
            return
        named = model.named_parameters(remove_duplicate=False)  # a shared one appears under each of its names
        for name, parameter in ((bare_name(name), one) for name, one in named):
            if not parameter.requires_grad:
                continue
            rule = self._by_parameter.get(id(parameter))
            if rule is None:
                rule = _Rule(parameter.detach().clone() if mu and name not in own else None, None)
                self._parameters.append(parameter)
                self._by_parameter[id(parameter)] = rule
            rule.project = within.get(name, rule.project)
            rule.pull = pulls.get(name, rule.pull)
            self._by_name[name] = rule

    def pull_by(self, pulls: Mapping[str, Tensor]) -> None:
        """Let other values be added to each gradient, as those of another client of a simulation."""
        for name, rule in self._by_name.items():
            rule.pull = pulls.get(name)

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Change every `.grad` of the model, after `backward` and before the optimizer's step.

        Raises `ValueError` for a model that does not have the parameters of the bound one.
        """
        self.is_applied = True
        if not self._parameters:
            return
        if self._last is None or self._last[0] is not model:
            parameters = [p for p in model.parameters() if p.requires_grad]
            self._last = model, parameters, self._rules_of(model, parameters)
        _, parameters, rules = self._last
        for parameter, rule in rules:
            _change(parameter, rule, self._mu)
        if self._clip_norm is not None:
            _clip(parameters, self._clip_norm, self._norm)

    @torch.no_grad()
    def applied_to(self, gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `apply` makes of these gradients at these weights, both by name: new tensors of the weights' dtypes."""
        self.is_applied = True
        found = {name: weights[name].detach() for name in gradients}  # other tensors over the same values
        for name, weight in found.items():
            weight.grad = gradients[name].to(weight.dtype, copy=True)
            if (rule := self._by_name.get(name)) is not None:
                _change(weight, rule, self._mu)
        if self._clip_norm is not None:
            # In the order of the model, so that the norm has the same bits as in `apply`.
            ordered = {name: found[name] for name in self._by_name if name in found} | found
            _clip([*ordered.values()], self._clip_norm, self._norm)
        return {name: cast(Tensor, weight.grad) for name, weight in found.items()}

    def _rules_of(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, _Rule]]:
        found = [(p, rule) for p in parameters if (rule := self._by_parameter.get(id(p))) is not None]
        if not found:  # a copy or a wrapper of the model
            named = ((_bare(name), p) for name, p in model.named_parameters() if p.requires_grad)
            found = [(p, rule) for name, p in named if (rule := self._by_name.get(name)) is not None]
        if not found:
            raise ValueError(
                "plan.adjust_gradients was given a model without any parameter of the client's own model: give it the "
                "model that train was called with"
            )
        return found


def _norm_of(parameters: Sequence[Tensor]) -> Tensor:
    return get_total_norm([one.grad for one in parameters if one.grad is not None])


def _clip(parameters: Sequence[Tensor], clip_norm: float, norm: Norm) -> None:
    clip_grads_with_norm_(parameters, clip_norm, norm(parameters))


def _change(parameter: Tensor, rule: _Rule, mu: float) -> None:
    if rule.anchor is not None:
        if rule.anchor.device != parameter.device:  # the model has moved since
            rule.anchor = rule.anchor.to(parameter.device)
        pull = (parameter - rule.anchor).mul_(mu)
        if parameter.grad is None:
            parameter.grad = pull
        else:
            parameter.grad.add_(pull)
    if rule.pull is not None and parameter.grad is not None:
        rule.pull = rule.pull.to(parameter.device, parameter.dtype)
        parameter.grad.add_(rule.pull)
    if rule.project is not None and parameter.grad is not None:
        parameter.grad = rule.project(parameter.grad)


def _bare(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    name = bare_name(name)
    for prefix in _WRAPPERS:
        if name.startswith(prefix):
            return _bare(name.removeprefix(prefix))
    return name
