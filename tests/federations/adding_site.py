"""A site whose training adds its own whole number to every weight, so that each committed round shows in the model."""

import os

import torch

from umbel.client import Client, LocalPlan, TrainResult

ADDS = {"north": 1.0, "south": 2.0, "east": 3.0}
MEAN = sum(ADDS.values()) / len(ADDS)


class Adding(Client):
    """One of `ADDS`, named by the environment variable SITE. All have the same number of samples."""

    def __init__(self) -> None:
        self.model, self.sample_count = torch.nn.Linear(64, 1, bias=False), 4
        self._adds = ADDS[os.environ["SITE"]]

    def train(self, model: torch.nn.Module, plan: LocalPlan) -> TrainResult:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(self._adds)
        return TrainResult(4, 1, 1)
