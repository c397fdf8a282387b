r"""A hospital whose training is its own: one logit, a weighted loss, batches that are dicts, and private normalization.

The records are UCI's of four hospitals (heart disease, CC BY 4.0); HEART_DATA names the folder of the four files. The
same `Hospital` takes part in a run, and in a simulation of it:

    HEART_DATA=DIR HOSPITAL=va umbel join --server URL --token TOKEN --run heart --app examples.heart_hospital:client
    HEART_DATA=DIR umbel simulate examples/heart_hospitals.toml --app examples.heart_hospital:make_client \
        --set clients.count=4
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import Dataset

from umbel.client import LocalPlan, TorchClient
from umbel.client.training.counts import confusion_counts, score_histogram
from umbel.client.training.trainer import Configured, Measured, StepLoss

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
_KEPT = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13)  # the other columns are rarely known
_HELD_OUT = 3  # each third record is held out


class Records(Dataset[dict[str, Tensor]]):
    """Records as dicts."""

    def __init__(self, values: np.ndarray, diseased: np.ndarray) -> None:
        self._values = torch.from_numpy(values.astype(np.float32))
        self._diseased = torch.from_numpy(diseased.astype(np.float32))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"values": self._values[index], "diseased": self._diseased[index]}


class RiskModel(nn.Module):
    """The logit of heart disease. The normalization is private: each hospital measures in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, values: Tensor) -> Tensor:
        logits: Tensor = self.layers(self.norm(values))
        return logits.squeeze(1)


class Hospital(TorchClient):
    """A hospital with its records: (n, 10) values, and (n,) whether the patient has the disease."""

    def __init__(self, values: np.ndarray, diseased: np.ndarray) -> None:
        is_held = np.arange(len(values)) % _HELD_OUT == 0
        train, held = (Records(values[some], diseased[some]) for some in (~is_held, is_held))
        with torch.random.fork_rng():
            torch.manual_seed(0)  # all hospitals make the same model
            model = RiskModel()
        super().__init__(model, None, train, held, device="cpu")
        n_sick = int(diseased[~is_held].sum())
        self._weight = torch.tensor(max(len(train) - n_sick, 1) / max(n_sick, 1))

    def training_step(self, model: nn.Module, batch: Any) -> StepLoss:
        logits = model(batch["values"])
        return binary_cross_entropy_with_logits(logits, batch["diseased"], pos_weight=self._weight)

    def evaluation_step(self, model: nn.Module, batch: Any) -> Measured:
        logits, diseased = model(batch["values"]), batch["diseased"]
        return {
            "loss": binary_cross_entropy_with_logits(logits, diseased, pos_weight=self._weight),
            "confusion": confusion_counts(logits, diseased),
            "scores": score_histogram(logits.sigmoid(), diseased, 32),
        }

    def configure(self, model: nn.Module, plan: LocalPlan) -> Configured:
        optimizer = plan.make_optimizer(model)  # AdamW, by the run file
        steps = plan.steps or 1
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=steps)


def hospital(name: str) -> Hospital:
    """The client of this hospital, with the complete records of its file."""
    path = Path(os.environ["HEART_DATA"]) / f"processed.{name}.data"
    rows = [line.split(",") for line in path.read_text(encoding="ascii", errors="replace").split()]
    records = np.array([[np.nan if value == "?" else float(value) for value in row] for row in rows])[:, _KEPT]
    records = records[np.isfinite(records).all(1)]
    return Hospital(records[:, :-1], records[:, -1] > 0)


def client() -> Hospital:
    """For `umbel join`."""
    return hospital(os.environ["HOSPITAL"])


def make_client(number: int, of: int) -> Hospital:
    """For `umbel simulate`: hospital `number` of four."""
    if of != len(HOSPITALS):
        raise ValueError(f"there are {len(HOSPITALS)} hospitals, not {of}: set count = {len(HOSPITALS)} in [clients]")
    return hospital(HOSPITALS[number])
