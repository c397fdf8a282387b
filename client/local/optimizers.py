"""The optimizer that a run file asks for, with torch's defaults for all that the file has no key for."""

from collections.abc import Iterable
from typing import Protocol

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from umbel.aggregation.plans.training import OptimizerName


class OptimizerTerms(Protocol):
    """The keys of [training] that an optimizer is made of."""

    @property
    def optimizer(self) -> OptimizerName: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


def optimizer_of(terms: OptimizerTerms, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """A new optimizer over these parameters."""
    rate, decay = terms.learning_rate, terms.weight_decay
    match terms.optimizer:
        case "sgd":
            return SGD(parameters, lr=rate, momentum=terms.momentum, weight_decay=decay)
        case "adam":
            return Adam(parameters, lr=rate, weight_decay=decay)
        case "adamw":
            return AdamW(parameters, lr=rate, weight_decay=decay)
