"""What a server optimizer is: a record of functions over a piece of the model, in float64.

A round's mean change D takes the place of a negative gradient (Reddi et al. 2021, "Adaptive Federated Optimization",
algorithm 1). An optimizer remembers *slots*: for each float of the model that clients change, a float32 of its own.

Every product, sum, quotient and square root stands alone and is rounded as IEEE 754 says, so the next model has the
same bits on every machine. A slot is rounded to float32 once a round.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from torch import Tensor

Slots: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Moment:
    """When a step is made. `n`: the number of steps of the run with this one. `rate`: of the server, in this step.
    `share`: of all clients' samples, in the mean change (FedDyn).
    """

    n: int
    rate: float
    share: float = 1.0


Step: TypeAlias = Callable[[Tensor, Slots, Moment], Tensor]
"""(D, slots, moment) -> how far the values move. D: float64, (n,); it may be overwritten. Slots: float64 copies, (n,),
by name; the step puts their next values there."""


@dataclass(frozen=True, slots=True)
class LayerwiseRule:
    """A step that is scaled for each tensor, by the ratio of two L2 norms: of its values, and of a direction.

    `direction`: (D, slots, moment) -> float64; it changes nothing that it is given. `step`: as `Step`, and at last what
    the tensor's step is multiplied by. `ratio`: by which the ratio of the norms is multiplied.
    """

    direction: Step
    step: Callable[[Tensor, Slots, Moment, float], Tensor]
    ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """`first`: the slots by name, with the value that each begins with."""

    step: Step | LayerwiseRule
    first: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
