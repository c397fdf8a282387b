"""One of four hospitals, with a quarter of the breast cancer records of scikit-learn. From the repository's root:

HOSPITAL=0 umbel join --server URL --token TOKEN --run breast-cancer --app examples.my_hospital:client
"""

import os

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import TensorDataset, random_split

from umbel.client import TorchClient


def make_client(hospital: int, of: int) -> TorchClient:
    values, classes = (torch.tensor(part[hospital::of]) for part in load_breast_cancer(return_X_y=True))
    records = TensorDataset(values.float().log1p(), classes)
    train, holdout = random_split(records, [0.8, 0.2], torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))
    return TorchClient(model, "classes", train, holdout)


def client() -> TorchClient:
    return make_client(int(os.environ.get("HOSPITAL", "0")), 4)
