"""The optimizer that a run file asks for, with torch's or published defaults for all that the file has no key for."""

from typing import Protocol

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from umbel.aggregation.plans.training import OptimizerName
from umbel.client.local.large_batch import Lamb, Lars
from umbel.client.local.muon import MuonAndAdamW, hidden_matrices


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


def optimizer_of(terms: OptimizerTerms, model: nn.Module) -> Optimizer:
    """A new optimizer over the model's trainable parameters.

    Raises `WorkRefused` if the installed torch does not have it.
    """
    rate, decay = terms.learning_rate, terms.weight_decay
    parameters = [one for one in model.parameters() if one.requires_grad]
    match terms.optimizer:
        case "sgd":
            return SGD(parameters, lr=rate, momentum=terms.momentum, weight_decay=decay)
        case "adam":
            return Adam(parameters, lr=rate, weight_decay=decay)
        case "adamw":
            return AdamW(parameters, lr=rate, weight_decay=decay)
        case "lars":
            return Lars(parameters, lr=rate, momentum=terms.momentum, weight_decay=decay)
        case "lamb":
            return Lamb(parameters, lr=rate, weight_decay=decay)
        case "muon":
            return MuonAndAdamW(*hidden_matrices(model), lr=rate, weight_decay=decay)
