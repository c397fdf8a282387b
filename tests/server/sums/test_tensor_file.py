"""A model file that is read in pieces: the pieces are the tensors', and nothing stays open."""

from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from umbel.server.sums.model_files import TensorFile, write_skeleton

VALUES = torch.arange(10, dtype=torch.float32)


def open_here(path: Path) -> bool:
    return any(Path(file.path) == path for file in psutil.Process().open_files())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(3), "w": VALUES}, tmp_path / "model.safetensors")
    return (tmp_path / "model.safetensors").resolve()


def test_a_model_that_is_opened_to_be_read_cannot_be_written(path: Path) -> None:
    """Versions that are kept are hashed once, and auditors look for the same bytes years later."""
    before = path.read_bytes()
    with TensorFile(path) as file, pytest.raises(OSError, match="Bad file descriptor"):
        file.write("w", 0, VALUES + 1)
    assert path.read_bytes() == before


def test_a_file_is_closed_at_the_end_of_its_block_also_by_an_error(path: Path) -> None:
    """A coordinator opens two for every model that it makes, for months."""
    with TensorFile(path):
        assert open_here(path)
    assert not open_here(path)
    with pytest.raises(RuntimeError), TensorFile(path):
        raise RuntimeError
    assert not open_here(path)


def test_values_are_read_from_where_they_stand(path: Path) -> None:
    with TensorFile(path) as file:
        assert torch.equal(file.read("w", torch.float32, 4, 3), VALUES[4:7])
        assert torch.equal(file.read("a", torch.float32, 0, 3), torch.ones(3))


def test_values_are_written_to_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "made.safetensors"
    write_skeleton(path, {"a": ((3,), torch.float32), "w": ((2, 5), torch.float32)}, {})
    with TensorFile(path, is_writable=True) as file:
        file.write("w", 4, torch.tensor([1.0, 2.0, 3.0]))
    found = load_file(path)
    assert found["w"].tolist() == [[0.0, 0.0, 0.0, 0.0, 1.0], [2.0, 3.0, 0.0, 0.0, 0.0]]
    assert found["a"].tolist() == [0.0, 0.0, 0.0]


def test_a_file_that_was_cut_off_is_an_error_and_no_zeros(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])
    with TensorFile(path) as file, pytest.raises(OSError, match="shorter than its header says at tensor 'w'"):
        file.read("w", torch.float32, 5, 5)
