"""The models that the ranks train: a perceptron with SGD, and a small transformer over characters with AdamW."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from umbel.sim.bench.collective.job import HookJob, RareJob

_HEADS, _LAYERS, _TEXT_MAX = 4, 2, 128


def model_of(job: HookJob | RareJob) -> nn.Module:
    """The job's model, with values that follow from its seed."""
    if job.model == "perceptron":
        return perceptron(job.widths, job.seed)
    torch.manual_seed(job.seed)
    n_characters, width = job.widths
    return Transformer(n_characters, width)


def optimizer_of(job: HookJob | RareJob, parameters: Iterator[nn.Parameter]) -> Optimizer:
    if job.model == "perceptron":
        return SGD(parameters, lr=job.learning_rate, momentum=job.momentum)
    return AdamW(parameters, lr=job.learning_rate, betas=(job.momentum, 0.999))


def perceptron(widths: tuple[int, ...], seed: int) -> nn.Sequential:
    """With ReLUs between its layers, and values that follow from the seed."""
    torch.manual_seed(seed)
    layers = list[nn.Module]()
    for width, next_width in pairwise(widths):
        layers += [nn.Linear(width, next_width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Transformer(nn.Module):
    """Which character follows each of a text? Int64 (n, length) -> logits (n, length, n_characters).

    Radford et al. 2018 ("Improving language understanding by generative pre-training"), with normalization first.
    """

    def __init__(self, n_characters: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(n_characters, width)
        self.places = nn.Parameter(0.02 * torch.randn(_TEXT_MAX, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, _HEADS, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(_LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, n_characters)

    def forward(self, texts: Tensor) -> Tensor:
        length = texts.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length)  # no place sees what follows it
        hidden = self.characters(texts) + self.places[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=later, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits
