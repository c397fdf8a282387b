"""The first model in a file, which a site gives to a Flower app in place of its ServerApp."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from tests.client.flower.projects import TRAINS, project
from umbel.client.errors import AppError
from umbel.client.flower.client import flower_client
from umbel.client.local.arrays import ArrayModel
from umbel.client.local.plan import LocalPlan
from umbel.client.state.model_files import write_model

pytestmark = pytest.mark.slow


def test_the_first_model_in_a_file_has_float32_for_bfloat16_and_numbered_arrays_in_order(tmp_path: Path) -> None:
    numbered = {str(i): torch.full((2,), float(i), dtype=torch.bfloat16) for i in range(12)}
    write_model(tmp_path / "first.safetensors", numbered)
    client = flower_client(str(project(tmp_path, TRAINS)), model=tmp_path / "first.safetensors")
    try:
        result = client.train(client.model, LocalPlan(epochs=1))
    finally:
        vars(client)["_caller"].close()
    assert isinstance(client.model, ArrayModel)
    state = client.model.state_dict()
    assert result.sample_count == 10
    assert [*client.model.arrays()] == [str(i) for i in range(12)]
    assert all(torch.equal(state[name], one + 1) and state[name].dtype is one.dtype for name, one in numbered.items())


def test_a_file_that_is_no_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "first.safetensors").write_bytes(b"no model")
    with pytest.raises(AppError, match=r"first.safetensors is not a safetensors model"):
        flower_client(str(project(tmp_path, TRAINS)), model=tmp_path / "first.safetensors")
