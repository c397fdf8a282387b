"""Clients of ranks to which something happens in a round: `make_...(number, of)`, of the contract tests' ready trainer.

What happens, happens once: not after torchrun has started the ranks again.
"""

import json
import os
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

from torch import nn

from tests.contracts.own_clients import make_torch_client
from umbel.client import Client, LocalPlan, TorchClient, TrainResult

HERE = "tests.client.datacenter.train.clients"
ROUND, RANK = 3, 1  # when and where
PACE_S, DIARY, HURRY = 0.1, "UMBEL_TEST_DIARY", "hurry"


class _Unlucky(Client, ABC):
    """Trains as `inner` does."""

    def __init__(self, number: int, inner: TorchClient) -> None:
        self.number, self.inner, self.model = number, inner, inner.model
        self.sample_count = inner.sample_count

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and "UMBEL_TEST_AGAIN" not in os.environ
        if plan.round == ROUND and is_first:
            if self.number == RANK:
                self.meet()
            else:
                plan = self.meanwhile(plan)
        return self.inner.train(model, plan)

    def meanwhile(self, plan: LocalPlan) -> LocalPlan:
        """What the other ranks are to do."""
        return plan

    @abstractmethod
    def meet(self) -> None:
        """What happens to one rank."""


class _Killed(_Unlucky):
    def meet(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class _Stopped(_Unlucky):
    """The other ranks would go on for hours."""

    def meanwhile(self, plan: LocalPlan) -> LocalPlan:
        return replace(plan, epochs=None, steps=1 << 40, learning_rate=0.0)  # so many steps would diverge

    def meet(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class _Leaving(_Unlucky):
    """The machines of all that train are taken away in the round that the variable UMBEL_TEST_LEAVES names."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        if str(plan.round) == os.environ.get("UMBEL_TEST_LEAVES"):
            self.meet()
        return self.inner.train(model, plan)

    def meet(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class _Failing(_Unlucky):
    def meet(self) -> None:
        raise ValueError("no such scanner")


class _Paced(Client):
    """Notes its process and each round that it begins in DIARY/RANK.jsonl. A round takes PACE_S seconds at least, until
    the file DIARY/HURRY exists, so that a quick machine does not end a run before all has happened to it.
    """

    def __init__(self, number: int, inner: TorchClient) -> None:
        self.inner, self.model, self.sample_count = inner, inner.model, inner.sample_count
        self.folder = Path(os.environ[DIARY])
        self.diary = self.folder / f"{number}.jsonl"

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        with self.diary.open("a") as file:
            file.write(json.dumps({"process": os.getpid(), "round": plan.round}) + "\n")
        if not (self.folder / HURRY).exists():
            time.sleep(PACE_S)
        return self.inner.train(model, plan)


def make_paced(number: int, of: int) -> Client:
    return _Paced(number, make_torch_client(number, of))


def make_killed(number: int, of: int) -> Client:
    return _Killed(number, make_torch_client(number, of))


def make_stopped(number: int, of: int) -> Client:
    return _Stopped(number, make_torch_client(number, of))


def make_leaving(number: int, of: int) -> Client:
    return _Leaving(number, make_torch_client(number, of))


def make_failing(number: int, of: int) -> Client:
    return _Failing(number, make_torch_client(number, of))
