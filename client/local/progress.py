"""A training in progress: all that its next step depends on, saved and resumed to the bit.

The saved state is what the caller names (a model, an optimizer, a schedule, a loss scale), the place in the data,
the generators, the client's state across rounds, and the sums of the metrics. Other state of the user's objects, such
as a schedule in a data set, is not saved.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from umbel.aggregation.types import require_metric_name
from umbel.client.local.arrays import array_of, tensor_of
from umbel.client.local.batches import EndlessBatches
from umbel.client.local.checkpoint import Checkpoint
from umbel.client.local.devices import generators, set_generators
from umbel.client.local.results import WeightedMean

log = logging.getLogger("umbel.client")


@runtime_checkable
class HasState(Protocol):
    """What can be saved and restored: a module, an optimizer, a schedule, a loss scale, or an object of one's own."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


Keepable: TypeAlias = HasState | dict[str, Any]
"""What `plan.drive` keeps: such an object, or numpy arrays by name in a dict, which is changed in place."""


class Means:
    """Running means of named batch means, weighted by samples or, of a `WeightedMean`, by its own weight; summed on the
    device, and read once at the end.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._first: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._has_own_weight: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(self, batch_means: Mapping[str, Tensor | WeightedMean], n_samples: int) -> None:
        """Raises `ValueError` for a name that no metric may have, or that has a weight of its own in some batches and
        none in others.
        """
        for name, mean in batch_means.items():
            if name not in self._has_own_weight:
                require_metric_name(name)  # now, because a whole training would be lost at its end
            has_own = isinstance(mean, WeightedMean)
            if self._has_own_weight.setdefault(name, has_own) is not has_own:
                raise ValueError(
                    f"the metric {name!r} is a WeightedMean in some batches and not in others; return it in each "
                    "batch, with the weight 0 if there is nothing to measure"
                )
            if isinstance(mean, WeightedMean):
                value = float(mean) if mean.weight else 0.0  # it may be no number, where nothing was measured
                self._add(name, torch.tensor(value, dtype=torch.float64), mean.weight)
            else:
                self._add(name, mean.detach().to(torch.float32), n_samples)
                self._first.setdefault(name, mean.detach())
                self._last[name] = mean.detach()

    def _add(self, name: str, mean: Tensor, weight: int) -> None:
        term = mean * weight
        self._sums[name] = self._sums[name] + term if name in self._sums else term
        self._counts[name] = self._counts.get(name, 0) + weight

    @property
    def n_samples(self) -> int:
        """Of all batches."""
        return max((n for name, n in self._counts.items() if not self._has_own_weight[name]), default=0)

    def first(self, name: str) -> float | None:
        """The mean over the first batch; None if there was none."""
        return self._first[name].item() if name in self._first else None

    def last(self, name: str) -> float | None:
        """The mean over the last batch; None if there was none."""
        return self._last[name].item() if name in self._last else None

    def state(self) -> dict[str, Any]:
        state = {"sums": dict(self._sums), "counts": dict(self._counts), "first": dict(self._first)}
        return {**state, "own": [name for name, has_own in self._has_own_weight.items() if has_own]}

    def set_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._sums = {name: total.to(device) for name, total in state["sums"].items()}
        self._counts = dict(state["counts"])
        self._first = dict(state["first"])
        own = state.get("own", ())  # checkpoints of earlier versions have none
        self._has_own_weight = {name: name in own for name in self._sums}

    def result(self) -> dict[str, float]:
        """The means; those with weights of their own as `WeightedMean`."""
        found = dict[str, float]()
        for name, total in self._sums.items():
            weight = self._counts[name]
            if self._has_own_weight[name]:
                found[name] = WeightedMean(total.item() / max(weight, 1), weight)
            else:
                found[name] = total.item() / weight
        return found


class CountSums:
    """Sums of named integer tensors, such as confusion matrices; summed on the device, and read once at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, batch_counts: Mapping[str, Tensor]) -> None:
        """Raises `ValueError` for a name that no metric may have, for counts that are no integers, and for those whose
        shape differs from the batches before.
        """
        for name, counts in batch_counts.items():
            if counts.is_floating_point() or counts.is_complex():
                raise ValueError(f"the counts {name!r} must be integers, not {counts.dtype}")
            before = self._sums.get(name)
            if before is None:
                require_metric_name(name)
            if before is not None and before.shape != counts.shape:
                raise ValueError(
                    f"the counts {name!r} have shape {tuple(counts.shape)}, but {tuple(before.shape)} in an earlier "
                    "batch; counts of all batches must have one shape"
                )
            term = counts.detach().to(torch.int64)
            self._sums[name] = term if before is None else before + term

    def state(self) -> dict[str, Any]:
        return dict(self._sums)

    def set_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._sums = {name: total.to(device) for name, total in state.items()}

    def result(self) -> dict[str, Tensor]:
        """One dimension each, on the CPU."""
        return {name: total.cpu().reshape(-1) for name, total in self._sums.items()}


def note_measured(
    measured: Mapping[str, Tensor | WeightedMean], n_samples: int, means: Means, counts: CountSums
) -> None:
    """Add what was measured of a batch: a `WeightedMean` or a floating-point tensor is a mean, an integer tensor adds
    up.
    """
    means.add({name: one for name, one in measured.items() if _is_mean(one)}, n_samples)
    counts.add({name: one for name, one in measured.items() if isinstance(one, Tensor) and not _is_mean(one)})


def _is_mean(measured: Tensor | WeightedMean) -> bool:
    return isinstance(measured, WeightedMean) or measured.is_floating_point()


def measured_so_far(saves: Sequence[Mapping[str, Any]], *, takes_sums: bool) -> dict[str, Any]:
    """What a process resumes with, of what several have measured of different samples until they saved after the same
    step: the entries of a save that differ. `takes_sums`: whether it is the one that goes on with the sums.
    """
    means: list[Mapping[str, Any]] = [one["means"] for one in saves]
    first = {name: [one["first"][name] for one in means if name in one["first"]] for name in _names(means, "first")}
    found: dict[str, Any] = {
        "sums": _added_up(means, "sums") if takes_sums else {},
        "counts": _added_up(means, "counts") if takes_sums else {},
        "first": {name: sum(values) / len(values) for name, values in first.items()},
        "own": sorted({name for one in means for name in one["own"]}),
    }
    return {"means": found, "counts": _added_up(saves, "counts") if takes_sums else {}}


def _names(states: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    return [*dict.fromkeys(name for one in states for name in one.get(key, ()))]


def _added_up(states: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """By name, the sums of the numbers or tensors that the states have under this key."""
    return {name: sum(one[key][name] for one in states if name in one.get(key, ())) for name in _names(states, key)}


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state of a training. `kept`: what its steps change, by name. `terms`: what must be the same when it is
    resumed. `site_state`: what the client keeps across rounds; it is changed in place.
    """

    kept: Mapping[str, Keepable]
    means: Means
    counts: CountSums
    batches: EndlessBatches
    device: torch.device
    terms: dict[str, object]
    site_state: dict[str, Any]

    def __post_init__(self) -> None:
        if taken := sorted(_OWN & self.kept.keys()):
            raise ValueError(
                f"what is kept cannot have the name {taken[0]!r}, which the checkpoint uses itself: choose another name"
            )
        for name, one in self.kept.items():
            _require_keepable(name, one)

    def keep(self, checkpoint: Checkpoint, steps_done: int) -> None:
        later = {"counts": self.counts.state(), "state": self.site_state}
        checkpoint.save(
            {
                "terms": self.terms,
                "steps_done": steps_done,
                **{name: _state_of(one) for name, one in self.kept.items()},
                "means": self.means.state(),
                "place": self.batches.place,
                "generators": generators(self.device),
                **{name: value for name, value in later.items() if value},
            }
        )

    def resume(self, checkpoint: Checkpoint) -> int:
        """Resume from a checkpoint that fits; returns the steps done, or 0 if training starts anew."""
        found = checkpoint.load() if self.kept else None
        if found is None:
            return 0
        misfit = self._misfit(found)
        if not checkpoint.fits_all(not misfit):
            why = misfit or "it does not fit another rank"
            log.warning(
                "the checkpoint of an earlier training does not fit (%s); training starts from the beginning", why
            )
            return 0
        for name, one in self.kept.items():
            _restore(one, found[name])
        self.means.set_state(found["means"], self.device)
        self.counts.set_state(found.get("counts", {}), self.device)
        if "state" in found:
            self.site_state.clear()
            self.site_state.update(found["state"])
        self.batches.go_to(found["place"])
        set_generators(found["generators"], self.device)  # last, because finding the place draws from them
        log.info("training resumes after step %d, from the checkpoint of an earlier process", found["steps_done"])
        return int(found["steps_done"])

    def _misfit(self, found: Mapping[str, Any]) -> str:
        """Why the checkpoint does not fit; empty if it does. Nothing is changed yet."""
        if found.get("terms") != self.terms:
            return "its settings differ"
        if set(found) - _OWN != set(self.kept):
            return "it holds other names than `keep` now has"
        for name, one in self.kept.items():
            if isinstance(one, nn.Module | dict) and _shapes(found[name]) != _shapes(_state_of(one)):
                return "it is of another model"
            if isinstance(one, torch.optim.Optimizer) and _groups(found[name]) != _groups(one.state_dict()):
                return "it is of another optimizer"
        return ""


_OWN = {"terms", "steps_done", "means", "counts", "state", "place", "generators"}


def _require_keepable(name: str, one: object) -> None:
    """Raise `TypeError` or `ValueError` for what cannot be saved and restored as it is."""
    if isinstance(one, dict):
        for key, array in cast(dict[str, Any], one).items():
            if isinstance(array, Tensor):
                raise TypeError(f"{key!r} in {name!r} is a tensor: a dict that is kept holds numpy arrays")
            tensor_of(array, key)
    elif not isinstance(one, HasState):
        raise TypeError(
            f"what is kept as {name!r} is a {type(one).__name__}, without state_dict and load_state_dict; only a dict "
            "of arrays needs neither"
        )


def _state_of(one: Keepable) -> Any:
    if isinstance(one, dict):
        return {name: tensor_of(array, name) for name, array in one.items()}
    return dict(_values_of(one)) if isinstance(one, nn.Module) else one.state_dict()


@torch.no_grad()
def _restore(one: Keepable, state: Any) -> None:
    if isinstance(one, dict):
        one.update({name: array_of(state[name], np.asarray(array).dtype) for name, array in one.items()})
    elif isinstance(one, nn.Module):
        for name, value in _values_of(one):
            value.copy_(state[name])
    else:
        one.load_state_dict(state)


def _values_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, also those outside the state dict; each once, even with several names."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _groups(optimizer_state: Mapping[str, Any]) -> list[tuple[set[str], int]]:
    """The optimizer's groups: the names of their settings, and the number of parameters."""
    return [(set(group), len(group["params"])) for group in optimizer_state["param_groups"]]
