"""Your own training loop for the data of `my_hospital.py`: override `Client.train` if `TorchClient` does not fit."""

import os

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import TensorDataset

from umbel.client import Client, LocalPlan, TrainResult


class Hospital(Client):
    def __init__(self, data: TensorDataset) -> None:
        self.model = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))
        self.data, self.sample_count = data, len(data)

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        optimizer = torch.optim.Adam(model.parameters(), plan.learning_rate / 10)
        steps = plan.drive(self.data, keep={"model": model, "optimizer": optimizer})
        for features, labels in steps:  # as many as are planned and there is time for; a killed training resumes here
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), labels)
            loss.backward()
            plan.adjust_gradients(model)  # FedProx, clipping, and the part that the codec can send
            optimizer.step()
            steps.note(loss=loss)
        return steps.result(self.sample_count)


def client() -> Hospital:
    hospital, n_hospitals = int(os.environ.get("HOSPITAL", "0")), 4
    values, classes = load_breast_cancer(return_X_y=True)
    features, labels = torch.tensor(values, dtype=torch.float32).log1p(), torch.tensor(classes)
    return Hospital(TensorDataset(features[hospital::n_hospitals], labels[hospital::n_hospitals]))
