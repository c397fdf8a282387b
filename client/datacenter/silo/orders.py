"""What rank 0 asks of all ranks: its words, in the store that all ranks see. Tensors follow over the process group."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter

from umbel.aggregation.plans.codec import CodecPlan
from umbel.client.local.plan import LocalPlan


class OrderKind(StrEnum):
    """`LOSS`: measure the training loss."""

    PREPARE = "prepare"
    EVALUATE = "evaluate"
    LOSS = "loss"
    TRAIN = "train"
    END = "end"


_TOLD = (
    "epochs",
    "steps",
    "batch_size",
    "learning_rate",
    "proximal_mu",
    "seed",
    "evaluate",
    "evaluate_after",
    "inexactness",
    "is_whole",
    "share",
    "run",
    "round",
    "client",
    "optimizer",
    "momentum",
    "weight_decay",
    "clip_norm",
    "algorithm",
    "options",
    "control_variate",
    "control_scale",
)
"""The fields of a plan that other ranks are told. Rank 0 alone knows the deadline, and what stops the training."""


@dataclass(frozen=True, slots=True)
class Order:
    task: OrderKind
    loads: tuple[str, ...] = ()  # the tensors that rank 0 gives first
    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    pulls: tuple[str, ...] = ()  # the tensors that come then (`LocalPlan.pulls`)
    within: CodecPlan | None = None  # of `GradientProjections`; None: there are none
    layout: str = ""  # of those, as JSON
    own: tuple[str, ...] = ()  # the parameters that stay at the site, which FedProx does not pull
    has_state: bool = False  # whether `plan.state` comes last
    belongs_to: dict[str, str] | None = None  # of the checkpoint; None: nothing is kept
    words: str = ""  # of an end: why
    failed: bool = False  # of an end: whether rank 0 has failed

    def to_json(self) -> str:
        return _ORDER.dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> "Order":
        return _ORDER.validate_json(text)


_ORDER = TypeAdapter(Order)


def told(plan: LocalPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in _TOLD}


def planned(order: Order) -> LocalPlan:
    """The plan in an order. All ranks stop when rank 0 does, so it has no deadline."""
    return replace(LocalPlan(), **order.plan)
