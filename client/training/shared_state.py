"""What of a client's model travels: the only place in the client that reads and writes the model's state dict.

The run file says the kind of a tensor (`aggregation/plans/tensors.py`). `Client.shares` may say more: a site can keep a
tensor to itself, and can declare a tensor that the run file does not list. Any other difference is refused. A frozen
parameter that neither of them mentions is global: sent down, never up. If clients sent its change of zero, the noise of
the run's codec would move it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, get_args

import torch
from torch import Tensor, nn

from umbel.aggregation.algorithms.fednova import normalised
from umbel.aggregation.algorithms.qfedavg import weighed
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.base import base_sha256
from umbel.aggregation.model.layout import CONTROL_PREFIX, Layout
from umbel.aggregation.model.state import State, weight_change
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.tensors import KINDS_KEPT, TensorKind, TensorRules
from umbel.aggregation.stated_order import norm_of_pieces
from umbel.client.app import Client
from umbel.client.errors import TrainingFailed, WorkRefused
from umbel.client.local.bare_names import bare_name
from umbel.client.training.encoding_device import CPU, encoding_device

Shares = Callable[[str], TensorKind | None]
_KINDS: frozenset[str] = frozenset(get_args(TensorKind)) - {"control"}  # that a site's code may declare


class HasControl(Protocol):
    """Terms of a training that say whether control variates travel with the model (SCAFFOLD)."""

    @property
    def has_control(self) -> bool: ...


class SentControl(Protocol):
    """What a client sends of its control variate."""

    def piece(self, weight: str, piece: slice, device: torch.device) -> Tensor: ...


class SharedState:
    """The tensors of a model by kind. It reads and writes the model itself, and holds no copy.

    Raises `LayoutError` for tensors that no layout can hold, for rules and `shares` that contradict each other, and for
    a pattern that matches no tensor.
    """

    def __init__(
        self, app: Client | nn.Module, rules: TensorRules | None = None, frozen: frozenset[str] | None = None
    ) -> None:
        """`app`: a client, or a module that declares no kinds. `rules`: of the run. `frozen`: names of parameters that
        are global by default; None: those that are frozen now.
        """
        self._app, self.rules = app, rules
        self._frozen = frozen_parameters(self.model) if frozen is None else frozen
        state, shares = self._tensors(), _shares_of(app)
        if rules is not None and (pattern := rules.unmatched(state)):
            raise LayoutError(
                f"the run's pattern {pattern!r} in [tensors] matches no tensor of this model, so a tensor that should "
                "stay here could be sent: both sides need the same version of the model's code, or the run file needs "
                "another pattern"
            )
        self._kinds: dict[str, TensorKind] = {
            name: _kind_of(name, shares, rules) or ("global" if name in self._frozen else "mean") for name in state
        }
        self.kept = frozenset(name for name, kind in self._kinds.items() if kind in KINDS_KEPT)  # names
        self.layout = Layout.of_state(state, self._kinds.__getitem__)
        # The tensors that the server's step moves, by name.
        self.stepped = {spec.name: spec for spec in self.layout.owners() if spec.is_stepped}
        self._checked_places: tuple[object, ...] | None = None  # of the tensors that had the layout last
        self._checked_base: tuple[object, ...] | None = None  # the identity of base tensors whose hash was right

    @property
    def model(self) -> nn.Module:
        """The model as it is now: the site's own code may have put another one in its place."""
        return self._app if isinstance(self._app, nn.Module) else self._app.model

    def _tensors(self) -> dict[str, Tensor]:
        """The state dict of the model, by the names that the run knows."""
        return {bare_name(name): tensor for name, tensor in self.model.state_dict().items()}

    def under(self, rules: TensorRules | None) -> "SharedState":
        """The same model in a run with these rules. Raises `WorkRefused` if they do not fit it."""
        try:
            return SharedState(self._app, rules, self._frozen)
        except LayoutError as error:
            raise WorkRefused(str(error)) from error

    def sending_frozen(self) -> "SharedState":
        """The same model in a run whose clients send the changes of frozen parameters too."""
        return SharedState(self._app, self.rules, frozenset())

    def names_of(self, kind: TensorKind) -> list[str]:
        """The names of the tensors of this kind, in the order of the state dict."""
        return [name for name, one in self._kinds.items() if one == kind]

    def layout_in(self, terms: HasControl) -> Layout:
        """The layout of model files in a round on these terms."""
        return self.layout.with_control if terms.has_control else self.layout

    # --- what travels -------------------------------------------------------------------------------------------------

    def shared(self) -> dict[str, Tensor]:
        """The tensors that the coordinator has, as the model has them now, without copies."""
        return {name: tensor for name, tensor in self._tensors().items() if name not in self.kept}

    def load(self, weights: State) -> None:
        """Load the run's weights into the model, without control variates. Private and base tensors keep their values.

        Raises `TrainingFailed` if the site's own code has changed the model's tensors.
        """
        model, own = self.model, {name: tensor for name, tensor in weights.items() if not self._is_control(name)}
        wrapped = {bare: name for name in model.state_dict() if (bare := bare_name(name)) != name}
        try:
            found = model.load_state_dict(
                {wrapped.get(name, name): one for name, one in own.items()}, strict=not self.kept
            )
            if lost := {bare_name(name) for name in found.missing_keys} - self.kept or set(found.unexpected_keys):
                raise ValueError(f"tensor {min(lost)!r} is in only one of the run's and the client's model")
        except Exception as error:
            raise TrainingFailed("the run's weights do not fit the client's own model; see the client's log") from error

    @property
    def encoding_device(self) -> torch.device:
        """The device on which the model's update is encoded."""
        return encoding_device(self.model)

    def changes(
        self,
        before: State,
        device: torch.device = CPU,
        *,
        per_steps: int | None = None,
        weight: float | None = None,
        control: SentControl | None = None,
    ) -> Iterator[Tensor]:
        """The change since the weights `before` of all tensors that clients send: float32, in pieces, on `device`.

        `per_steps`: the steps done, by which FedNova divides what the server's optimizer moves; None: nothing is.
        `weight`: by which q-FedAvg multiplies it; None: nothing is.
        `control`: SCAFFOLD's, which travels beside the weights.
        Memory does not hold the whole change. Nothing is yielded inside `torch.no_grad`: it would apply to the reader
        too, and for ever if the reader stops early. Raises `LayoutError` if training has changed the model's tensors,
        or has unfrozen a parameter that this client does not send.
        """
        self._require_frozen()
        local = self.shared()
        self._require_layout(local)
        layout = self.layout if control is None else self.layout.with_control
        for spec, piece in layout.update.pieces():
            if control is not None and spec.controls is not None:
                yield control.piece(spec.controls, piece, device)
                continue
            values, start_values = local[spec.name].detach().reshape(-1), before[spec.name].reshape(-1)
            change = weight_change(spec, values[piece].to(device), start_values[piece].to(device))
            if spec.is_stepped and per_steps is not None:
                change = normalised(change, per_steps)
            yield change if weight is None or not spec.is_stepped else weighed(change, weight)

    def change_norm(self, before: State) -> float:
        """The L2 norm of the change since the weights `before`, of what the server's optimizer moves."""
        specs = (spec for spec, _ in self.layout.update.pieces())
        changes = zip(specs, self.changes(before), strict=True)
        return norm_of_pieces(change for spec, change in changes if spec.is_stepped)

    def stepped_changes(self, before: State) -> Iterator[tuple[str, Tensor]]:
        """The change of each stepped tensor since the weights `before`, by name: float32, on the CPU."""
        local = self.shared()
        for name, spec in self.stepped.items():
            change = weight_change(spec, local[name].detach().reshape(-1), before[name].reshape(-1))
            yield name, change.to("cpu").view(spec.shape)

    def require_kept(self, kept: State, algorithm: str) -> None:
        """Raise `LayoutError` unless the algorithm can have had this client keep these tensors: none, or of all shapes
        of the stepped ones.
        """
        shapes = {name: spec.shape for name, spec in self.stepped.items()}
        if kept and {name: tuple(one.shape) for name, one in kept.items()} != shapes:
            raise LayoutError(
                f'what this client has kept of this run\'s earlier rounds (algorithm = "{algorithm}") does not fit its '
                "model: use the model's code as it was, or join again with an empty state directory"
            )

    def _is_control(self, name: str) -> bool:
        return name.startswith(CONTROL_PREFIX) and name.removeprefix(CONTROL_PREFIX) in self.stepped

    def _require_layout(self, local: State) -> None:
        """Raise `LayoutError` unless these tensors have the layout. Tensors at the places of the last ones that had it
        are not compared, because the layout of a small model takes as long as a training step.
        """
        is_dense = all(one.layout is torch.strided for one in local.values())
        places = (
            tuple((name, one.data_ptr(), one.shape, one.dtype) for name, one in local.items()) if is_dense else None
        )
        if places is None or places != self._checked_places:
            self.layout.require(local, "the trained model")
            self._checked_places = places

    def _require_frozen(self) -> None:
        """Raise `LayoutError` if a parameter trains now that is not sent because it was frozen."""
        named = ((bare_name(name), one) for name, one in self.model.named_parameters())
        trains = [name for name, one in named if one.requires_grad and name in self._frozen]
        if unsent := [name for name in trains if self._kinds[name] == "global"]:
            raise LayoutError(
                f"parameter {unsent[0]!r} trains now, but it was frozen when the client started, so its change is not "
                "sent: let the client's `shares` return \"mean\" for it, and make the run's model with `umbel model "
                "init --app`; or keep it frozen"
            )

    # --- what stays ---------------------------------------------------------------------------------------------------

    def private(self) -> dict[str, Tensor]:
        """Copies of the private tensors, on the CPU."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._of_kind("private").items()}

    def set_private(self, values: State) -> None:
        """Overwrite the private tensors, in place. Raises `LayoutError` for other names, shapes or dtypes."""
        here = self._of_kind("private")
        if difference := Layout.of_state(here).difference(Layout.of_state(values)):
            raise LayoutError(f"the stored private tensors do not fit the model: {difference}")
        with torch.no_grad():
            for name, tensor in here.items():
                tensor.copy_(values[name])

    def require_base(self) -> None:
        """Raise `WorkRefused` unless the base tensors are those of the run. Call it before each training.

        They are hashed again only if an operation has changed them since.
        """
        base, expected = self.base(), "" if self.rules is None else self.rules.base_sha256
        if not base and not expected:
            return
        identity = tuple((name, tensor.data_ptr(), tensor._version) for name, tensor in base.items())
        if identity == self._checked_base:
            return
        found = base_sha256(base)
        if found != expected:
            raise WorkRefused(_other_base(found, expected, self._checked_base is not None, len(base)))
        self._checked_base = identity

    def base(self) -> Mapping[str, Tensor]:
        """The base tensors, without copies."""
        return self._of_kind("base")

    def _of_kind(self, kind: TensorKind) -> Mapping[str, Tensor]:
        if kind not in self._kinds.values():
            return {}
        state = self._tensors()
        return {name: state[name] for name in self.names_of(kind)}


def _shares_of(app: Client | nn.Module) -> Shares:
    return (lambda _name: None) if isinstance(app, nn.Module) else app.shares


def frozen_parameters(model: nn.Module) -> frozenset[str]:
    """The names of floating-point parameters that do not train: `requires_grad` is false, and another's is true.

    (A model of which no parameter requires gradients is trained by other means.)
    """
    named = [(bare_name(name), one) for name, one in model.named_parameters(remove_duplicate=False)]
    if not any(one.requires_grad for _, one in named):
        return frozenset()
    return frozenset(name for name, one in named if not one.requires_grad and one.is_floating_point())


def _kind_of(name: str, shares: Shares, rules: TensorRules | None) -> TensorKind | None:
    """The kind of a tensor in this run at this site; None if neither declares one. Raises `LayoutError` for two that
    contradict each other.
    """
    try:
        listed = None if rules is None else rules.kind_of(name)
    except ValueError as error:
        raise LayoutError(str(error)) from error
    own = shares(name)
    if own is not None and own not in _KINDS:
        raise LayoutError(
            f"shares({name!r}) of the client returned {own!r:.40}: return one of {', '.join(sorted(_KINDS))}, or None "
            "for what the run file says"
        )
    if own is None or own == listed:
        return listed
    if listed is None or (own in KINDS_KEPT and listed not in KINDS_KEPT):
        return own
    raise LayoutError(
        f"tensor {name!r} has the kind {own} by this client's `shares`, but the kind {listed} in the run's [tensors]: "
        "change one of them. Only private and base may differ from the run file, because a site may keep more to itself"
    )


def _other_base(found: str, expected: str, was_right: bool, n_tensors: int) -> str:
    if was_right:
        return (
            "training has changed base tensors of this client's model, which must be the same at every site: freeze "
            "them (requires_grad = False, and eval() for layers with running statistics), and start the client again"
        )
    if not expected:
        return (
            f"this client's model has {counted(n_tensors, 'base tensor')}, but the run names no base_sha256, so "
            f'other sites may have other ones: ask the operator for a run whose file has base_sha256 = "{found}"'
        )
    if not n_tensors:
        return (
            f"the run is for a model with base tensors (base_sha256 {expected[:12]}…), but this client's model has "
            "none: list them under `base` in the run file's [tensors], or return \"base\" from the client's `shares`"
        )
    return (
        f"the base tensors of this client's model hash to {found[:12]}…, but the run is for "
        f"{expected[:12]}… (base_sha256): load the base model that the run was made with, in the same dtype"
    )
