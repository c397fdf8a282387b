"""The next model, made from file to file, is what `Layout.add_mean` makes in memory, byte for byte."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.federations.server_device import small_state
from tests.federations.whole_states import next_master, published_state
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.model.layout import CONTROL_PREFIX, Layout
from umbel.aggregation.model.next_model import ServerStep
from umbel.aggregation.model.state import master_of, with_first_control
from umbel.aggregation.optimizers.sgd import sgd
from umbel.aggregation.plans.codec import Grid
from umbel.aggregation.update.grid import GridAccumulator, sum_sha256
from umbel.server.blobs.blobs import model_key
from umbel.server.blobs.local import LocalBlobs
from umbel.server.sums.model_files import ParentFiles, SummedRound, first_master, inspect_model, keep_model, next_model


def test_the_next_model_is_the_one_made_in_memory(tmp_path: Path) -> None:
    state = {
        **small_state(),
        "large": torch.randn(300_001, generator=torch.Generator().manual_seed(1)),
        "double": torch.tensor(0.5, dtype=torch.float64),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        "half.scalar": torch.tensor(1.5, dtype=torch.float16),
        "half.edge": torch.full((200,), torch.finfo(torch.float16).max, dtype=torch.float16),
    }
    blobs = LocalBlobs(tmp_path)
    blobs.prepare()
    with blobs.scratch() as path:
        path.write_bytes(encode_model(state))
        layout = inspect_model(path)
        first = keep_model(blobs, path)
    assert layout == Layout.of_state(state)
    total = GridAccumulator(layout.n_values, Grid.finest(max_abs=64.0, total_weight_max=10))
    change = torch.randn(layout.n_values, generator=torch.Generator().manual_seed(2)).clamp(-4, 4)
    edge = next(spec.place for spec in layout.tensors if spec.name == "half.edge")
    change[edge] = 64.0  # beyond float16's range, by enough to round to an infinity
    total.fold_vector(change, 3)
    base = ParentFiles(first.sha256, first_master(blobs, first.sha256, layout, sgd()))
    files = next_model(blobs, layout, base, SummedRound(sum_sha256(total), total), ServerStep(rate=0.7), None)
    master = next_master(layout, master_of(layout, state), total, 0.7)
    expected = layout.full_state(published_state(layout, master))
    with blobs.local(model_key(files.published.sha256)) as path:
        data = path.read_bytes()
    assert decode_model(data)[0] == layout
    assert decode_model(data)[1]["half.edge"].isfinite().all()
    assert data == encode_model(expected)
    with blobs.local(model_key(files.master_sha256)) as path:
        stored = load_file(path)
    assert all(torch.equal(stored[name], tensor) for name, tensor in master.items())
    assert len(stored) == len(master)


def test_a_run_begins_with_control_variates_of_zeros(tmp_path: Path) -> None:
    layout = Layout.of_state({"w": torch.ones(2)}).with_control
    (path := tmp_path / "model").write_bytes(encode_model(with_first_control({"w": torch.ones(2)}, layout), layout))
    assert inspect_model(path) == layout
    path.write_bytes(encode_model({"w": torch.ones(2), f"{CONTROL_PREFIX}w": torch.tensor([0.0, 0.1])}, layout))
    with pytest.raises(LayoutError, match="is not zero, but a run begins with zeros"):
        inspect_model(path)
