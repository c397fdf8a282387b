"""What rank 0 asks of all ranks: its words, in the store that all ranks see. Tensors follow over the process group."""

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from umbel.client.local.plan import LocalPlan


class Task(StrEnum):
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
    task: Task
    loads: tuple[str, ...] = ()  # the tensors that rank 0 gives first
    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    pulls: tuple[str, ...] = ()  # the tensors that come then (`LocalPlan.pulls`)
    own: tuple[str, ...] = ()  # the parameters that stay at the site, which FedProx does not pull
    has_state: bool = False  # whether `plan.state` comes last
    belongs_to: dict[str, str] | None = None  # of the checkpoint; None: nothing is kept
    words: str = ""  # of an end: why
    failed: bool = False  # of an end: whether rank 0 has failed

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Order":
        found: dict[str, Any] = json.loads(text)
        tuples = {name: tuple(found[name]) for name in ("loads", "pulls", "own")}
        return cls(**{**found, **tuples, "task": Task(found["task"])})


def told(plan: LocalPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in _TOLD}


def planned(order: Order) -> LocalPlan:
    """The plan in an order. All ranks stop when rank 0 does, so it has no deadline."""
    return replace(LocalPlan(), **order.plan)
