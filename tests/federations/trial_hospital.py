"""The own client of the hospitals in a trial: dict batches, a weighted loss on one logit, a sensitivity of its own."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import Subset

from umbel.client import Evaluation, LocalPlan, TorchClient, TrainResult, WeightedMean
from umbel.client.training.trainer import StepLoss

SITES = ("basel", "bern", "chur", "genf")


def records_of(site: str, *, held_out: bool) -> tuple[Tensor, Tensor]:
    """A site's patients: values, float32 (n, 4), and whether they are ill, float32 (n,)."""
    number = SITES.index(site)
    generator, n_patients = torch.Generator().manual_seed(2 * number + held_out), 30 + 15 * number
    values = torch.randn(n_patients, 4, generator=generator)
    return values, (values.sum(1) + torch.randn(n_patients, generator=generator) > 1.0 + 0.3 * number).float()


def model_of_all() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))


class Hospital(TorchClient):
    """Notes each training in a file of the working directory, and trains while a file `hold-SITE-ROUND` is there."""

    def __init__(self) -> None:
        self.site = os.environ["SITE"]
        values, ill = records_of(self.site, held_out=False)
        patients = [{"values": x, "ill": y} for x, y in zip(values, ill, strict=True)]
        super().__init__(model_of_all(), None, Subset(patients, range(len(patients))))  # type: ignore[arg-type]
        self.pos_weight = (len(ill) - ill.sum()) / ill.sum()

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        Path(f"{self.site}-{plan.run}-{plan.round}").write_text(str(os.getpid()))
        while Path(f"hold-{self.site}-{plan.round}").exists() and not plan.should_stop():
            time.sleep(0.02)
        return super().train(model, plan)

    def training_step(self, model: nn.Module, batch: Any) -> StepLoss:
        return binary_cross_entropy_with_logits(model(batch["values"]), batch["ill"], pos_weight=self.pos_weight)

    def evaluate(self, model: nn.Module) -> Evaluation:
        values, ill = records_of(self.site, held_out=True)
        with torch.no_grad():
            is_found = (model(values) > 0).float()
        sensitivity = WeightedMean(float((is_found * ill).sum() / ill.sum()), int(ill.sum()))
        accuracy = float((is_found == ill).double().mean())
        return Evaluation(len(ill), {"accuracy": accuracy, "sensitivity": sensitivity})
