"""The demo's model, a small convolutional network. Client processes load it without scikit-learn."""

import torch
from torch import Tensor, nn

from umbel.aggregation.seeds import derive_seed

N_CLASSES = 10


class DigitNet(nn.Module):
    """One 3x3 convolution of 32 channels, pooling, and two linear layers: 33,802 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.out = nn.Linear(64, N_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 8, 8) pixels -> (n, 10) logits."""
        centred = (images.unsqueeze(1) - 0.305) / 0.376  # the data set's mean and standard deviation
        features = nn.functional.max_pool2d(nn.functional.relu(self.conv(centred)), 2)
        logits: Tensor = self.out(nn.functional.relu(self.hidden(features.flatten(1))))
        return logits


def build_model(seed: int) -> DigitNet:
    """The model every client and every baseline starts from. Leaves torch's global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model") % (1 << 63))
        return DigitNet()
