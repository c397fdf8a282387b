"""The model, its training, and one partition of the data."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.fc1 = nn.Linear(6 * 3 * 3, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def load_data(partition_id, num_partitions, batch_size):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(42))
    mine = order[partition_id::num_partitions]
    cut = int(0.8 * len(mine))
    parts = [TensorDataset(images[rows], labels[rows]) for rows in (mine[:cut], mine[cut:])]
    return DataLoader(parts[0], batch_size=batch_size, shuffle=True), DataLoader(parts[1], batch_size=batch_size)


def train(net, loader, epochs, lr, device):
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net, loader, device):
    net.to(device).eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in loader:
            out = net(images.to(device))
            loss += F.cross_entropy(out, labels.to(device)).item()
            correct += (out.argmax(1) == labels.to(device)).sum().item()
    return loss / len(loader), correct / len(loader.dataset)
