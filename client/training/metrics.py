"""Means over samples, summed on the device, with one transfer at the end instead of one each step."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Metric = Callable[[Any, Any], Tensor]


class Means:
    """Running means of named batch means, each batch weighted by its number of samples."""

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


def default_metrics(output: Any, target: Any) -> dict[str, Tensor]:
    """Accuracy where targets are class indices and outputs hold one score a class (dimension 1), else nothing."""
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)) or target.is_floating_point():
        return {}
    if output.dim() < 2 or target.shape != output.shape[:1] + output.shape[2:]:
        return {}
    return {"accuracy": (output.argmax(dim=1) == target).to(torch.float32).mean()}
