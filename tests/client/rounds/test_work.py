"""From a trained model to its weight change."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.client import TorchClient
from umbel.client.rounds.work import weight_changes


def test_whoever_stops_reading_a_weight_change_can_train_again(tmp_path: Path) -> None:
    """An update is refused at its first value that is no number; the rest of it is never read."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    start = tmp_path / "model.safetensors"
    start.write_bytes(encode_model(model.state_dict()))
    data = TensorDataset(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64))
    app = TorchClient(model, nn.CrossEntropyLoss(), data, device="cpu")
    changes = weight_changes(app, Layout.of_state(model.state_dict()), start)
    change = next(changes)
    assert torch.is_grad_enabled()
    assert not change.requires_grad
