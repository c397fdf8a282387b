"""A hospital's own client. From the repository's root, for the hospitals 0 to 3:

    HOSPITAL=0 umbel join --server http://localhost:8750 --token TOKEN --run breast-cancer \
        --app examples.my_hospital:client

The data are the Wisconsin breast cancer records that scikit-learn carries, a quarter for each hospital.
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
