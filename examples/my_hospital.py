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


def client() -> TorchClient:
    hospital, n_hospitals = int(os.environ.get("HOSPITAL", "0")), 4
    values, classes = load_breast_cancer(return_X_y=True)
    features = torch.tensor(values[hospital::n_hospitals], dtype=torch.float32).log1p()
    labels = torch.tensor(classes[hospital::n_hospitals])
    train, holdout = random_split(TensorDataset(features, labels), [0.8, 0.2], torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))
    return TorchClient(model, nn.CrossEntropyLoss(), train=train, holdout=holdout)
