"""Silos that fail, or are killed. The variable NOTES names a folder, where each rank leaves its process ID."""

import os
import time
from pathlib import Path
from typing import Any

from torch import nn

from examples.silo_of_ranks import sharded
from umbel.client import TorchClient
from umbel.client.training.trainer import StepLoss
from umbel.datacenter import rank_part

HERE = "tests.contracts.silo_clients"
STEP_S = 0.15


def slow() -> TorchClient:
    """Its training lasts long enough to be saved and killed."""
    app = sharded()
    (notes() / f"{rank_part().index}.{os.environ['TORCHELASTIC_RESTART_COUNT']}.pid").write_text(str(os.getpid()))

    def step(model: nn.Module, batch: Any) -> StepLoss:
        time.sleep(STEP_S)
        return TorchClient.training_step(app, model, batch)  # type: ignore[return-value]

    app.training_step = step  # type: ignore[method-assign]
    return app


def broken_on_one_rank() -> TorchClient:
    """In its second round the last rank fails, and the other one waits for it in a sum."""
    return _broken(rank_part().index == 1)


def broken_on_all() -> TorchClient:
    return _broken(True)


def _broken(is_broken: bool) -> TorchClient:
    app, rounds = sharded(), list[int]()

    def step(model: nn.Module, batch: Any) -> StepLoss:
        if is_broken and rounds[-1] == 2:
            raise ValueError("this sample is broken")
        return TorchClient.training_step(app, model, batch)  # type: ignore[return-value]

    def prepare(plan: Any) -> None:
        rounds.append(plan.round)

    app.training_step, app.prepare = step, prepare  # type: ignore[method-assign]
    return app


def notes() -> Path:
    return Path(os.environ["NOTES"])
