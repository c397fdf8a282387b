"""The ready trainer's training in progress: all that its next step depends on, saved and resumed to the bit.

That is weights and buffers, the optimizer, the loss scale, the place in the data, the generators, and the sums of the
metrics. Other state of the user's objects, such as a schedule in a data set, is not saved.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from umbel.client.local.batches import EndlessBatches
from umbel.client.local.devices import generators, set_generators
from umbel.client.local.plan import Checkpoint

log = logging.getLogger("umbel.client")


class Means:
    """Running means of named batch means, weighted by samples; summed on the device, and read once at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._first: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}

    def add(self, batch_means: Mapping[str, Tensor], n_samples: int) -> None:
        for name, mean in batch_means.items():
            term = mean.detach().to(torch.float32) * n_samples
            self._sums[name] = self._sums[name] + term if name in self._sums else term
            self._counts[name] = self._counts.get(name, 0) + n_samples
            self._first.setdefault(name, mean.detach())
            self._last[name] = mean.detach()

    def first(self, name: str) -> float | None:
        """The mean over the first batch; None if there was none."""
        return self._first[name].item() if name in self._first else None

    def last(self, name: str) -> float | None:
        """The mean over the last batch; None if there was none."""
        return self._last[name].item() if name in self._last else None

    def state(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "counts": dict(self._counts), "first": dict(self._first)}

    def set_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._sums = {name: total.to(device) for name, total in state["sums"].items()}
        self._counts = dict(state["counts"])
        self._first = dict(state["first"])

    def result(self) -> dict[str, float]:
        return {name: total.item() / self._counts[name] for name, total in self._sums.items()}


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state of a training. `terms`: what must be the same when it is resumed."""

    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    means: Means
    batches: EndlessBatches
    device: torch.device
    terms: dict[str, object]

    def keep(self, checkpoint: Checkpoint, steps_done: int) -> None:
        checkpoint.save(
            {
                "terms": self.terms,
                "steps_done": steps_done,
                "model": dict(_values_of(self.model)),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "means": self.means.state(),
                "place": self.batches.place,
                "generators": generators(self.device),
            }
        )

    def resume(self, checkpoint: Checkpoint) -> int:
        """Resume from a checkpoint that fits; returns the steps done, or 0 if training starts anew."""
        kept = checkpoint.load()
        if kept is None:
            return 0
        if misfit := self._misfit(kept):
            log.warning(
                "the checkpoint of an earlier training does not fit (%s); training starts from the beginning", misfit
            )
            return 0
        with torch.no_grad():
            for name, value in _values_of(self.model):
                value.copy_(kept["model"][name])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.scaler.load_state_dict(kept["scaler"])
        self.means.set_state(kept["means"], self.device)
        self.batches.go_to(kept["place"])
        set_generators(kept["generators"], self.device)  # last, because finding the place draws from them
        log.info("training resumes after step %d, from the checkpoint of an earlier process", kept["steps_done"])
        return int(kept["steps_done"])

    def _misfit(self, kept: Mapping[str, Any]) -> str:
        """Why the checkpoint does not fit; empty if it does. Nothing is changed yet."""
        if kept.get("terms") != self.terms:
            return "its settings differ"
        if _shapes(kept["model"]) != _shapes(dict(_values_of(self.model))):
            return "it is of another model"
        if _groups(kept["optimizer"]) != _groups(self.optimizer.state_dict()):
            return "it is of another optimizer"
        return ""


def _values_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, also those outside the state dict; each once, even with several names."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _groups(optimizer_state: Mapping[str, Any]) -> list[tuple[set[str], int]]:
    """The optimizer's groups: the names of their settings, and the number of parameters."""
    return [(set(group), len(group["params"])) for group in optimizer_state["param_groups"]]
