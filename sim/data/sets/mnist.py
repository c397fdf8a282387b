"""MNIST, 70,000 handwritten digits, and Fashion-MNIST, as many pieces of clothing, each from its four files.

LeCun, Bottou, Bengio and Haffner: Gradient-based learning applied to document recognition (1998).
Xiao, Rasul and Vollgraf: Fashion-MNIST, a novel image dataset for benchmarking machine learning algorithms
(arXiv:1708.07747). The two have the same format.
"""

from pathlib import Path

import numpy as np
import torch

from umbel.sim.data.samples import Samples, TrainAndTest
from umbel.sim.data.sets.idx_files import NotIdx, read_idx

N_CLASSES, SIDE = 10, 28
N_PIXELS = SIDE * SIDE


def load_mnist(folder: Path) -> TrainAndTest:
    """MNIST from `folder`/mnist, the four files gzipped under their usual names, each image flat.

    Raises `OSError` if one cannot be read, `NotIdx` if it is not what its name says.
    """
    return load_images(folder / "mnist")


def load_images(folder: Path) -> TrainAndTest:
    """The same of either data set, with its files in `folder` itself."""
    return TrainAndTest(_samples(folder, "train"), _samples(folder, "t10k"))


def _samples(folder: Path, part: str) -> Samples:
    images_path, labels_path = folder / f"{part}-images-idx3-ubyte.gz", folder / f"{part}-labels-idx1-ubyte.gz"
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE):
        raise NotIdx(f"{images_path} holds no images of 28 by 28 bytes")
    if labels.dtype != np.uint8 or labels.shape != images.shape[:1] or labels.max(initial=0) >= N_CLASSES:
        raise NotIdx(f"{labels_path} does not hold a digit for each image of {images_path.name}")
    pixels = torch.from_numpy(images).view(-1, N_PIXELS).to(torch.float32).div_(255)
    return Samples(pixels, torch.from_numpy(labels).to(torch.int64))
