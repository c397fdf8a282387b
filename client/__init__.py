"""The SDK that runs where the data is: a site writes a `Client` (or uses `TorchClient`) and calls `run_client`.

Names are imported when they are first used, so that `umbel --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umbel.client.app import Client
    from umbel.client.errors import ClientError, CoordinatorRefused
    from umbel.client.flower.client import flower_client
    from umbel.client.local.arrays import ArrayData, ArrayModel
    from umbel.client.local.checkpoint import Checkpoint
    from umbel.client.local.plan import LocalPlan
    from umbel.client.local.results import Evaluation, TrainResult, WeightedMean
    from umbel.client.loop import RunEnd, run_client
    from umbel.client.operator.operator import Operator
    from umbel.client.policy.policy import SitePolicy, read_policy
    from umbel.client.training.array_client import ArrayClient
    from umbel.client.training.trainer import TorchClient

__all__ = [
    "ArrayClient",
    "ArrayData",
    "ArrayModel",
    "Checkpoint",
    "Client",
    "ClientError",
    "CoordinatorRefused",
    "Evaluation",
    "LocalPlan",
    "Operator",
    "RunEnd",
    "SitePolicy",
    "TorchClient",
    "TrainResult",
    "WeightedMean",
    "flower_client",
    "read_policy",
    "run_client",
]

_MODULES = {
    "app": ("Client",),
    "errors": ("ClientError", "CoordinatorRefused"),
    "flower.client": ("flower_client",),
    "loop": ("RunEnd", "run_client"),
    "operator.operator": ("Operator",),
    "policy.policy": ("SitePolicy", "read_policy"),
    "local.arrays": ("ArrayData", "ArrayModel"),
    "local.checkpoint": ("Checkpoint",),
    "local.plan": ("LocalPlan",),
    "local.results": ("Evaluation", "TrainResult", "WeightedMean"),
    "training.array_client": ("ArrayClient",),
    "training.trainer": ("TorchClient",),
}


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first used (PEP 562)."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
