"""The time of the local steps of this rank's own client, with or without sums of all ranks between them.

The client's own loop asks the plan between two steps whether it should stop. There the clock is read, and there the
sums are made, whatever the loop is made of.
"""

import itertools
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from umbel.aggregation.run.file import RunFile
from umbel.client.app import Client
from umbel.client.datacenter.doctor.layers import CountedStep
from umbel.client.datacenter.doctor.timing import agreed_time
from umbel.client.datacenter.ranks.group import Group
from umbel.client.errors import CannotGoOn, ClientError
from umbel.client.local.plan import LocalPlan
from umbel.client.rounds.site_code import asked_of_site, train_from
from umbel.client.training.shared_state import SharedState
from umbel.client.training.trainer import TorchClient

_PROBE_STEPS, _LEAST, _MOST = 5, 8, 200


class NotTimed(ClientError):
    """A rank's client fails, or its steps cannot be timed; raised on every rank, with that rank's name."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of one rank's training."""

    parameters: int
    gradients: int
    optimizer: int  # its state
    peak: int | None = None  # of all tensors on a GPU, activations included; None on a processor


@dataclass(frozen=True, slots=True)
class SeveralRanks:
    """What the first rank of a client of several ranks knows beside the client, which is led from there."""

    n: int  # the ranks of each client
    model: nn.Module  # the first rank's own part of the model, or its copy
    on_one_batch: Client | None  # the client with one repeated batch; None if it can be given no other data


class StepTimer:
    """Trains this rank's client from the same weights again and again. All ranks of the group must make the same calls.

    `several`: of clients of several ranks, whose first ranks are the group; None for clients of one.
    """

    def __init__(self, group: Group, file: RunFile, app: Client, several: SeveralRanks | None = None) -> None:
        self._group, self._app = group, app
        self._model = app.model if several is None else several.model
        self._shared = SharedState(app).under(file.tensor_rules)
        self._weights = {name: one.detach().clone() for name, one in self._shared.shared().items()}
        plan = asked_of_site(file.training_plan(1), file.seed, run=file.name)
        plan = replace(plan, evaluate=False, evaluate_after=False, inexactness=False)
        self._plan = replace(plan, epochs=None, algorithm="fedavg")
        self._synthetic = on_one_batch(app, self._plan.batch_size) if several is None else several.on_one_batch

    @property
    def n_values(self) -> int:
        """How many values a sum of the model's changes has."""
        return sum(self._weights[name].numel() for name in self._shared.stepped)

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return self._plan.batch_size

    def counted_step(self) -> CountedStep:
        """The work of one step. Raises `NotTimed` on every rank if one rank's client fails."""
        with CountedStep(self._app.model) as found:
            why = self._failure(self._app, replace(self._plan, steps=1))
        self._raise_for(why)
        return found

    def probe(self) -> tuple[float, StepMemory]:
        """Seconds of one step on the slowest rank, and the memory that a step takes."""
        seen = _Seen()
        device = self._group.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with seen.in_all_optimizers():
            marks = self._marks(self._app, 1, _PROBE_STEPS - 1, lambda: None)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        n_bytes = sum(map(_bytes_here, (*self._model.parameters(), *self._model.buffers())))
        step_s = agreed_time(self._group, min(_differences(marks)))
        return step_s, StepMemory(n_bytes, seen.gradients, seen.optimizer, peak)

    def step_s(self, about_s: float, budget_s: float, *, work: Callable[[], object] | None = None) -> float:
        """The median seconds of one step of this rank's client, with `work` of all ranks after each.

        `about_s`: how long one takes, the same on every rank. `budget_s`: for all of them.
        """
        return median(self._cycles(self._app, 1, _n_steps(about_s, budget_s), work))

    def synthetic_step_s(self, about_s: float, budget_s: float) -> float | None:
        """The same with one repeated batch; None if a rank's client can be given no other data."""
        lacks = agreed_time(self._group, float(self._synthetic is None))
        if self._synthetic is None or lacks:
            return None
        n = _n_steps(about_s, budget_s)
        return median(self._cycles(self._synthetic, 1, n, None))

    def round_s(self, every: int, n_rounds: int, work: Callable[[], object]) -> float:
        """The median seconds of `every` steps and one `work` of all ranks."""
        return median(self._cycles(self._app, every, n_rounds, work))

    def _cycles(self, app: Client, every: int, n: int, work: Callable[[], object] | None) -> list[float]:
        return _differences(self._marks(app, every, n + 1, work or (lambda: None)))

    def _marks(self, app: Client, every: int, n: int, work: Callable[[], object]) -> list[float]:
        """The times after each of `n` turns of `every` steps and one `work`.

        Raises `NotTimed` on every rank if one rank's client fails or does not follow its plan. That rank has made the
        `work` that the others wait for.
        """
        between = _Between(every, n, work)
        plan = replace(self._plan, steps=every * n + 1, told_to_stop=between)
        why = self._failure(app, plan)
        made = len(between.marks)
        for _ in range(n - made):
            work()
        if not why and made < min(n, 2):
            why = (
                f"its client was asked for {plan.steps} steps, and asked its plan {between.n_asked} times whether it "
                "should stop, so its steps cannot be timed: call plan.should_stop() between two steps"
            )
        self._raise_for(why)
        return between.marks

    def _failure(self, app: Client, plan: LocalPlan) -> str:
        """Train by this plan. Returns why the client failed; empty if it did not."""
        try:
            train_from(app, self._shared, self._weights, plan)
        except CannotGoOn:  # ranks are lost or out of step, so nothing more can be measured
            raise
        except ClientError as error:
            return str(error)
        return ""

    def _raise_for(self, why: str) -> None:
        """Raise `NotTimed` on every rank if one rank has a reason."""
        for rank, one in enumerate(self._group.gather(why.encode())):
            if one:
                raise NotTimed(f"{self._group.names.of(rank)}: {one.decode()}")


@dataclass(slots=True)
class _Between:
    """What happens when the client asks between two steps."""

    every: int
    n: int
    work: Callable[[], object]
    n_asked: int = 0
    marks: list[float] = field(default_factory=list[float])

    def __call__(self) -> None:
        self.n_asked += 1
        if self.n_asked % self.every == 0 and len(self.marks) < self.n:
            self.work()
            self.marks.append(time.perf_counter())


@dataclass(slots=True)
class _Seen:
    """The bytes that torch's optimizers hold after a step; zero for clients without an optimizer."""

    gradients: int = 0
    optimizer: int = 0

    @contextmanager
    def in_all_optimizers(self) -> Generator[None]:
        """See every step of every optimizer in this block."""
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: self.take(optimizer))
        try:
            yield
        finally:
            handle.remove()

    def take(self, optimizer: Optimizer) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self.gradients = max(self.gradients, sum(_bytes_here(one.grad) for one in parameters if one.grad is not None))
        states: list[Mapping[str, object]] = [optimizer.state.get(one, {}) for one in parameters]
        held = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        self.optimizer = max(self.optimizer, sum(map(_bytes_here, held)))


def _bytes_here(tensor: Tensor) -> int:
    """Of a tensor, or of this rank's shard of it."""
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def on_one_batch(app: Client, batch_size: int) -> Client | None:
    """The client with one repeated batch; None if it can be given no other data, or has none to take it from."""
    try:
        return app.on_one_batch(batch_size) if isinstance(app, TorchClient) else None
    except Exception:  # the site's own code, which fails in its training too: there it is named
        return None


def _n_steps(about_s: float, budget_s: float) -> int:
    return min(_MOST, max(_LEAST, int(budget_s / max(about_s, 1e-6))))


def _differences(marks: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(marks)]
