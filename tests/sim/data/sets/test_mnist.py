"""MNIST is read from its four files, and they must be what they are named for."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.servers.real_data import real_files
from tests.sim.data.sets.test_idx_files import idx_bytes
from umbel.sim.data.sets.fetch import SOURCES
from umbel.sim.data.sets.mnist import Array, NotIdx, load_images

IMAGES = np.arange(3 * 28 * 28, dtype=np.uint64).astype(np.uint8).reshape(3, 28, 28)
LABELS = np.array([7, 0, 9], dtype=np.uint8)


def write(folder: Path, images: Array = IMAGES, labels: Array = LABELS) -> Path:
    (folder / "mnist").mkdir()
    for part in ("train", "t10k"):
        for name, array in ((f"{part}-images-idx3", images), (f"{part}-labels-idx1", labels)):
            (folder / "mnist" / f"{name}-ubyte.gz").write_bytes(gzip.compress(idx_bytes(array)))
    return folder


def test_images_come_flat_between_0_and_1_with_their_digits(tmp_path: Path) -> None:
    data = load_images(write(tmp_path) / "mnist")
    for samples in (data.train, data.test):
        assert samples.targets.tolist() == [7, 0, 9]
        assert samples.inputs.dtype == torch.float32
        assert torch.equal(samples.inputs * 255, torch.from_numpy(IMAGES).view(3, 784).float())


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (IMAGES[:, :27], LABELS),
        (IMAGES.astype(np.int16), LABELS),
        (IMAGES, LABELS[:2]),
        (IMAGES, LABELS + 1),
        (IMAGES, LABELS.astype(np.int8)),
        (IMAGES, IMAGES),
    ],
)
def test_files_that_hold_something_else_are_refused(tmp_path: Path, images: Array, labels: Array) -> None:
    with pytest.raises(NotIdx, match=r"ubyte\.gz"):
        load_images(write(tmp_path, images, labels) / "mnist")


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="train-images"):
        load_images(tmp_path / "mnist")


@pytest.mark.parametrize(("name", "first"), [("mnist", [5, 0, 4, 1, 9]), ("fashion-mnist", [9, 0, 0, 3, 0])])
def test_the_published_files_hold_seventy_thousand_images(name: str, first: list[int]) -> None:
    data = load_images(real_files(SOURCES[name]) / SOURCES[name].folder)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert data.train.targets[:5].tolist() == first
    assert data.train.targets.bincount().sum() == 60_000
    if name == "fashion-mnist":
        assert data.train.targets.bincount().tolist() == [6000] * 10
    assert 0 <= data.train.inputs.min() < data.train.inputs.max() == 1
