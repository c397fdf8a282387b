"""The Flower apps of `umbel bench flower`: the quickstart of `examples/`, and two with another model and other data.

All have the quickstart's ClientApp, ServerApp and configuration, to the letter. In half of a round's work the nodes
train, in the other half every second one evaluates.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from umbel.sim.bench.report import BenchFailed

TASK = "pytorchexample.task"
# What the quickstart's configuration says; a test compares them.
CONFIG = {"batch-size": 32, "learning-rate": 0.1, "local-epochs": 1}
_QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "flower_quickstart"

# The model starts at zero, and a node's samples are one batch: so every engine must come to the same values.
_BAGS_OF_WORDS = '''"""Bags of words of ten topics: a model of {n_words:,} x 10 values, and 20 bags for each node."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

N_WORDS, N_TOPICS, N_SAMPLES, N_TESTED, BAG = {n_words}, 10, 20, 10, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Parameter(torch.zeros(N_WORDS, N_TOPICS))

    def forward(self, bags):
        return F.embedding_bag(bags, self.words, mode="sum")


def load_data(partition_id, num_partitions, batch_size):
    draw = torch.Generator().manual_seed(partition_id)
    topics = torch.arange(N_SAMPLES + N_TESTED) % N_TOPICS
    own = topics[:, None] + N_TOPICS * torch.randint(8, (len(topics), BAG), generator=draw)
    other = torch.randint(8 * N_TOPICS, own.shape, generator=draw)
    bags = torch.where(torch.rand(own.shape, generator=draw) < 0.7, other, own) * (N_WORDS // (8 * N_TOPICS))
    parts = [TensorDataset(bags[rows], topics[rows]) for rows in (slice(N_SAMPLES), slice(N_SAMPLES, None))]
    return DataLoader(parts[0], batch_size=batch_size, shuffle=True), DataLoader(parts[1], batch_size=batch_size)


def train(net, loader, epochs, lr, device):
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    total = 0.0
    for _ in range(epochs):
        for bags, topics in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(bags.to(device)), topics.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net, loader, device):
    net.to(device).eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for bags, topics in loader:
            out = net(bags.to(device))
            loss += F.cross_entropy(out, topics.to(device)).item()
            correct += (out.argmax(1) == topics.to(device)).sum().item()
    return loss / len(loader), correct / len(loader.dataset)
'''


@dataclass(frozen=True, slots=True)
class AppWorkload:
    """A Flower app. `n_words`: of the model of bags of words, ten values each; None: the quickstart's own model.

    `rounds`: of each run, and with `--quick`.
    """

    name: str
    words: str
    n_nodes: int
    n_words: int | None
    rounds: int
    rounds_quick: int

    @property
    def is_exact(self) -> bool:
        """Whether all engines must come to the same values, to rounding."""
        return self.n_words is not None

    def write(self, folder: Path) -> Path:
        """Write the app's folder into this one. Raises `BenchFailed` without a checkout of umbel."""
        if not _QUICKSTART.is_dir():
            raise BenchFailed(f"there is no {_QUICKSTART}; run this benchmark in a checkout of umbel's repository")
        app = folder / "app"
        shutil.copytree(_QUICKSTART, app, ignore=shutil.ignore_patterns("__pycache__"))
        if self.n_words is not None:
            (app / f"{TASK.replace('.', '/')}.py").write_text(_BAGS_OF_WORDS.format(n_words=self.n_words))
        return app


def app_workloads() -> tuple[AppWorkload, ...]:
    """All three."""
    return (
        AppWorkload("quickstart", "the example flower_quickstart (a small CNN, digits), 10 nodes", 10, None, 120, 100),
        AppWorkload("small", "a model of 1,000 values, 20 samples a node, 100 nodes", 100, 100, 72, 60),
        AppWorkload("large", "a model of 10 million values, 20 samples a node, 10 nodes", 10, 1_000_000, 20, 16),
    )
