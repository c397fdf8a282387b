"""The SDK that runs where the data is: a site writes a `Client` (or uses `TorchClient`) and calls `run_client`.

Names are imported when they are first used, so that `umbel --help` does not wait for torch.
"""

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


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first used (PEP 562)."""
    match name:
        case "Checkpoint" | "Client" | "Evaluation" | "LocalPlan" | "TrainResult":
            from umbel.client import app

            return getattr(app, name)
        case "ClientError" | "CoordinatorRefused":
            from umbel.client import errors

            return getattr(errors, name)
        case "RunEnd" | "run_client":
            from umbel.client import loop

            return getattr(loop, name)
        case "Operator":
            from umbel.client.operator import operator

            return getattr(operator, name)
        case "SitePolicy" | "read_policy":
            from umbel.client.policy import policy

            return getattr(policy, name)
        case "TorchClient":
            from umbel.client.training import trainer

            return getattr(trainer, name)
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
