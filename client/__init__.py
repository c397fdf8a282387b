"""The SDK that runs where the data is: a site writes a `Client` (or uses `TorchClient`) and calls `run_client`.

Names are imported when they are first used, so that `umbel --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umbel.client.app import Checkpoint, Client, Evaluation, LocalPlan, TrainResult
    from umbel.client.errors import ClientError, CoordinatorRefused
    from umbel.client.loop import RunEnd, run_client
    from umbel.client.operator.operator import Operator
    from umbel.client.policy.policy import SitePolicy, read_policy
    from umbel.client.training.trainer import TorchClient

__all__ = [
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
    "read_policy",
    "run_client",
]

_MODULES = {
    "Checkpoint": "app",
    "Client": "app",
    "ClientError": "errors",
    "CoordinatorRefused": "errors",
    "Evaluation": "app",
    "LocalPlan": "app",
    "Operator": "operator.operator",
    "RunEnd": "loop",
    "SitePolicy": "policy.policy",
    "TorchClient": "training.trainer",
    "TrainResult": "app",
    "read_policy": "policy.policy",
    "run_client": "loop",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
