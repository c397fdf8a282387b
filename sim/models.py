"""The models that experiments train by name, as published papers define them; and the `[model]` section that names one.

```toml
[model]
name = "mlp"            # "logistic", "2nn", "cnn", "lstm", "heart", or one's own: "module:function"
hidden = [64]           # of "mlp": how wide its hidden layers are
loss = "classes"        # of `client/training/losses.py`, or one's own, "module:function" of (output, target)

[model.arguments]       # of one's own function, which gets them by name; a sweep may vary "model.arguments.width"
width = 64
```

McMahan et al. 2017 is arXiv:1602.05629. Docstrings name differences from the papers.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import require_within
from umbel.client.training.losses import LOSSES
from umbel.sim.data.arguments import require_arguments
from umbel.sim.data.data_set import Described, LearningTask

NAMES = ("mlp", "logistic", "2nn", "cnn", "lstm", "heart")
LAYERS_MAX, WIDTH_MAX = 100, 1 << 20
_HIDDEN = (64,)
_EMBEDDED, _RECURRENT = 8, 256


@dataclass(frozen=True, slots=True)
class ModelSection:
    """Which model. `hidden`: of "mlp" alone; `arguments`: of one's own function; `loss`: None: "classes"."""

    name: str = "mlp"
    hidden: tuple[int, ...] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    loss: str | None = None
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if self.name not in NAMES and ":" not in self.name:
            raise ValueError(f"name must be one of {', '.join(NAMES)}, or module:function, not {self.name!r:.80}")
        require_arguments(self.arguments, self.name, is_own=":" in self.name)
        if self.loss is not None and self.loss not in LOSSES and ":" not in self.loss:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, or module:function, not {self.loss!r:.80}")
        if self.hidden is None:
            return
        if self.name != "mlp":
            raise ValueError(f'hidden is for name = "mlp", not for {self.name}; leave it out')
        require_within(len(self.hidden), "the number of hidden layers", 1, LAYERS_MAX)
        for width in self.hidden:
            require_within(width, "hidden", 1, WIDTH_MAX)


def loss_name(loss: str | None) -> str:
    """The loss of `[model]` as a recipe names it. Only cross-entropy of classes is also known for each sample."""
    if loss is None or loss == "classes":
        return "cross-entropy"
    if ":" in loss:
        return loss
    found = LOSSES[loss].loss
    return f"{found.__module__}:{found.__name__}"


class ModelError(ValueError):
    """A model cannot be made, or does not fit the data: one sentence that says what to do."""


def build(section: ModelSection, data: Described, seed: int) -> nn.Module:
    """The model for these data, its first weights drawn from `seed`; torch's global generator does not change.

    Raises `ModelError` if the model does not fit the data.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model") % (1 << 63))
        return _own(section.name, section.arguments) if ":" in section.name else _known(section, data)


def perceptron(input_shape: Sequence[int], hidden: Sequence[int], n_classes: int) -> nn.Sequential:
    """Linear layers with ReLUs between them; without hidden layers, multinomial logistic regression."""
    layers: list[nn.Module] = [nn.Flatten()] if len(input_shape) != 1 else []
    widths = [math.prod(input_shape), *hidden]
    for n_inputs, n_outputs in pairwise(widths):
        layers += [nn.Linear(n_inputs, n_outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], n_classes))


def convolutional(input_shape: Sequence[int], n_classes: int) -> nn.Sequential:
    """The CNN of McMahan et al. 2017: 5x5 convolutions to 32 and 64 channels, each padded to keep its size and followed
    by a ReLU and a 2x2 pool, 512 ReLUs and the classes; of MNIST, 1,663,370 weights.
    """
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
        nn.Linear(512, n_classes),
    )


class CharacterNet(nn.Module):
    """The character LSTM of McMahan et al. 2017: 8 numbers a character, two layers of 256, the next character.

    torch's LSTM has two biases where the paper's has one, and no peepholes.
    """

    def __init__(self, n_characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_characters, _EMBEDDED)
        self.recurrent = nn.LSTM(_EMBEDDED, _RECURRENT, num_layers=2, batch_first=True)
        self.out = nn.Linear(_RECURRENT, n_characters)

    def forward(self, texts: Tensor) -> Tensor:
        """(n, length) numbers of characters, of any whole type -> (n, characters) logits of the one that follows."""
        states, _ = self.recurrent(self.embedding(texts.long()))
        logits: Tensor = self.out(states[:, -1])
        return logits


class TwoClassRegression(nn.Module):
    """Logistic regression of two classes with one weight an input, as FLamby's for heart disease: 14 numbers of 13.

    Its logit z is that of class 1 against 0 for class 0, so that cross-entropy is the binary one.
    """

    def __init__(self, n_inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_inputs, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """(n, inputs) -> (n, 2) logits."""
        return nn.functional.pad(self.linear(inputs), (1, 0))


def _known(section: ModelSection, data: Described) -> nn.Module:
    name, shape = section.name, data.input_shape
    if data.task is LearningTask.OTHER:
        raise ModelError(f"the targets of {data.name} are no classes, so {name} does not fit: give a model of your own")
    if (name == "lstm") != (data.task is LearningTask.NEXT_CHARACTER):
        instead: Literal["lstm", "mlp"] = "mlp" if name == "lstm" else "lstm"
        raise ModelError(
            f'{name} is not for {data.name}, whose task is {data.task}: use name = "{instead}", for example'
        )
    match name:
        case "logistic":
            return perceptron(shape, (), data.n_classes)
        case "mlp":
            return perceptron(shape, _HIDDEN if section.hidden is None else section.hidden, data.n_classes)
        case "2nn":
            return perceptron(shape, (200, 200), data.n_classes)
        case "cnn":
            if len(shape) != 3 or min(shape[1:]) < 4:
                raise ModelError(f"cnn is for images of at least 4 by 4, and inputs of {data.name} have shape {shape}")
            return convolutional(shape, data.n_classes)
        case "lstm":
            return CharacterNet(data.n_classes)
        case _:
            if len(shape) != 1 or data.n_classes != 2:
                raise ModelError(
                    f"{name} needs one row of numbers for each input, and exactly two classes, but {data.name} has "
                    f'inputs of shape {shape} and {data.n_classes} classes; use name = "logistic"'
                )
            return TwoClassRegression(shape[0])


def _own(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    from umbel.client.errors import AppError
    from umbel.client.user_code import OptionWords, make_named

    try:
        made = make_named(name, nn.Module, OptionWords("name in [model]", "my_model:net", "an nn.Module"), arguments)
    except AppError as error:
        raise ModelError(str(error)) from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"{name} gave a {type(made).__name__}; it must give a torch.nn.Module")
    return copy.deepcopy(made).cpu()  # each run needs its own, even if the name stands for one module, on any device
