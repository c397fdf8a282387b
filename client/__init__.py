"""The SDK that runs where the data is: a site writes a `Client` (or uses `TorchClient`) and calls `run_client`."""

from umbel.client.admin import Operator
from umbel.client.app import Client, Evaluation, LocalPlan, TrainResult
from umbel.client.errors import ClientError, CoordinatorRefused
from umbel.client.loop import RunEnd, run_client
from umbel.client.trainer import TorchClient

__all__ = [
    "Client",
    "ClientError",
    "CoordinatorRefused",
    "Evaluation",
    "LocalPlan",
    "Operator",
    "RunEnd",
    "TorchClient",
    "TrainResult",
    "run_client",
]
