"""Your own training loop for the data of `my_hospital.py`: override `Client.train` if `TorchClient` does not fit."""

import os

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from umbel.client import Client, LocalPlan, TrainResult


class Hospital(Client):
    def __init__(self, data: TensorDataset) -> None:
        self.model = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))
        self.data, self.sample_count = data, len(data)

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        order = torch.Generator().manual_seed(plan.seed)
        batches = DataLoader(self.data, plan.batch_size, shuffle=True, generator=order)
        optimizer = torch.optim.Adam(model.parameters(), plan.learning_rate / 10)
        planned, done, loss = plan.steps_for(len(batches)), 0, torch.zeros(())
        while done < planned and not (done and plan.should_stop()):  # stop early if the plan asks, but do one step
            for features, labels in batches:
                loss = nn.functional.cross_entropy(model(features), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
                if done == planned or plan.should_stop():
                    break
        return TrainResult(self.sample_count, done, planned, {"loss": loss.item()})


def client() -> Hospital:
    hospital, n_hospitals = int(os.environ.get("HOSPITAL", "0")), 4
    values, classes = load_breast_cancer(return_X_y=True)
    features, labels = torch.tensor(values, dtype=torch.float32).log1p(), torch.tensor(classes)
    return Hospital(TensorDataset(features[hospital::n_hospitals], labels[hospital::n_hospitals]))
