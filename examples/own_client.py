"""A hospital's own client: batches are dicts, the model gives one logit, and the loss is weighted. From the root:

HOSPITAL=0 umbel join --server URL --token TOKEN --run own-client --app examples.own_client:client
"""

import os
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import random_split

from umbel.client import TorchClient
from umbel.client.training.counts import confusion_counts, score_histogram
from umbel.client.training.trainer import Measured, StepLoss


class Hospital(TorchClient):
    def __init__(self, records: Any) -> None:  # a data set (or list) of dicts
        train, held_out = random_split(records, [0.8, 0.2], torch.Generator().manual_seed(0))
        model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
        super().__init__(model, None, train, held_out)  # AdamW and clipping: the run file asks for them
        n_ill = sum(float(train[i]["malignant"]) for i in range(len(train)))
        self.pos_weight = torch.tensor((len(train) - n_ill) / n_ill, device=self.device)

    def training_step(self, model: nn.Module, batch: Any) -> StepLoss:
        logits = model(batch["values"])
        return binary_cross_entropy_with_logits(logits, batch["malignant"], pos_weight=self.pos_weight)

    def evaluation_step(self, model: nn.Module, batch: Any) -> Measured:
        logits, malignant = model(batch["values"]), batch["malignant"]
        return {
            "loss": binary_cross_entropy_with_logits(logits, malignant, pos_weight=self.pos_weight),
            "confusion": confusion_counts(logits, malignant),  # gives sensitivity, specificity and accuracy
            "scores": score_histogram(logits.sigmoid(), malignant, 32),  # gives the AUC
        }


def make_client(hospital: int, of: int) -> Hospital:
    values, benign = (torch.tensor(part[hospital::of]).float() for part in load_breast_cancer(return_X_y=True))
    values = values.log1p()
    values = (values - values.mean(0)) / values.std(0)
    return Hospital([{"values": x, "malignant": 1 - y} for x, y in zip(values, benign, strict=True)])


def client() -> Hospital:
    return make_client(int(os.environ.get("HOSPITAL", "0")), 4)
