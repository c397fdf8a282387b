"""MNIST, 70,000 handwritten digits, from its four files; and the network that McMahan et al. train on it.

LeCun, Bottou, Bengio and Haffner: Gradient-based learning applied to document recognition (1998).
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from umbel.aggregation.seeds import derive_seed
from umbel.sim.data.idx_files import NotIdx, read_idx
from umbel.sim.data.samples import Samples, TrainAndTest

N_CLASSES, N_PIXELS = 10, 28 * 28
_HIDDEN = 200


def load_mnist(folder: Path) -> TrainAndTest:
    """MNIST from `folder`/mnist, the four files gzipped under their usual names.

    Raises `OSError` if one cannot be read, `NotIdx` if it is not what its name says.
    """
    return TrainAndTest(_samples(folder / "mnist", "train"), _samples(folder / "mnist", "t10k"))


def two_layer_net(seed: int) -> nn.Sequential:
    """The "2NN" of McMahan et al. 2017 (arXiv:1602.05629): two hidden layers of 200 ReLUs, 199,210 weights.

    Leaves torch's global generator as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model") % (1 << 63))
        return nn.Sequential(
            nn.Linear(N_PIXELS, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, N_CLASSES),
        )


def _samples(folder: Path, part: str) -> Samples:
    images_path, labels_path = folder / f"{part}-images-idx3-ubyte.gz", folder / f"{part}-labels-idx1-ubyte.gz"
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28):
        raise NotIdx(f"{images_path} holds no images of 28 by 28 bytes")
    if labels.dtype != np.uint8 or labels.shape != images.shape[:1] or labels.max(initial=0) >= N_CLASSES:
        raise NotIdx(f"{labels_path} does not hold a digit for each image of {images_path.name}")
    pixels = torch.from_numpy(images).view(-1, N_PIXELS).to(torch.float32).div_(255)
    return Samples(pixels, torch.from_numpy(labels).to(torch.int64))
