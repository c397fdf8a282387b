"""A client whose trainings and evaluations are observed: what they were asked, did, and left behind."""

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from umbel.aggregation.model.layout import PIECE_VALUES
from umbel.aggregation.plans.tensors import TensorKind
from umbel.client.app import Client
from umbel.client.local.batches import Collate, Data, n_samples
from umbel.client.local.plan import LocalPlan
from umbel.client.local.progress import Keepable
from umbel.client.local.results import Evaluation, TrainResult
from umbel.client.local.steps import LocalSteps
from umbel.client.state.site_state import SiteState, pack_state

Alter: TypeAlias = Callable[["ObservedPlan"], LocalPlan]


def as_asked(plan: "ObservedPlan") -> LocalPlan:
    """The plan as the coordinator asked it."""
    return plan


@dataclass(frozen=True, slots=True)
class TensorMark:
    """What tells whether a tensor has changed."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str  # of its bytes


Marks: TypeAlias = Mapping[str, TensorMark]


def marks_of(state: Mapping[str, Tensor]) -> dict[str, TensorMark]:
    """The marks of all tensors, by name. Memory: one piece of a tensor."""
    return {name: TensorMark(tuple(one.shape), str(one.dtype), _sha256(one)) for name, one in state.items()}


@torch.no_grad()
def _sha256(tensor: Tensor) -> str:
    digest, flat = hashlib.sha256(), tensor.detach().reshape(-1)
    for piece in torch.split(flat, PIECE_VALUES):
        digest.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(slots=True)
class Doings:
    """What a training did, as far as it can be seen from outside."""

    questions: int = 0  # how often it asked whether to stop
    steps_of: Counter[int] = field(default_factory=Counter[int])  # by optimizer
    data_lengths: list[int] = field(default_factory=list[int])  # samples of the data that it drove, where known

    @property
    def steps(self) -> int:
        """The steps of the busiest optimizer of torch; 0 if the training uses none."""
        return max(self.steps_of.values(), default=0)


@dataclass(frozen=True, slots=True)
class ObservedPlan(LocalPlan):
    """A plan that notes the data that it drives."""

    doings: Doings = field(default_factory=Doings, repr=False)

    def drive(
        self,
        data: Data,
        keep: Mapping[str, Keepable] | None = None,
        *,
        collate: Collate | None = None,
        accumulate: int = 1,
        device: torch.device | str = "cpu",
        terms: Mapping[str, object] | None = None,
    ) -> LocalSteps:
        """As `LocalPlan.drive`."""
        if (n := n_samples(data)) is not None:
            self.doings.data_lengths.append(n)
        return LocalPlan.drive(self, data, keep, collate=collate, accumulate=accumulate, device=device, terms=terms)


def observed_plan(plan: LocalPlan) -> ObservedPlan:
    """The same plan, observed. It shares the state and the rules of gradients with `plan`."""
    doings = Doings()

    def told_to_stop() -> str | None:
        doings.questions += 1
        return plan.told_to_stop()

    asked: dict[str, Any] = {one.name: getattr(plan, one.name) for one in fields(LocalPlan)}
    asked["told_to_stop"] = told_to_stop
    return ObservedPlan(**asked, doings=doings)


@dataclass(slots=True)
class ObservedTraining:
    """One call of `train`. `after` and the fields below it are set when the call has ended."""

    plan: ObservedPlan
    before: Marks
    after: Marks = field(default_factory=dict[str, TensorMark])
    result: TrainResult | None = None
    error: BaseException | None = None
    refusal: str = ""  # why the client's loop would not send the work of this training; empty if it would
    state_error: str = ""  # why plan.state cannot be kept; empty if it can
    touched: tuple[str, ...] = ()  # what of the process it has changed
    has_gradients: bool = False

    @property
    def doings(self) -> Doings:
        return self.plan.doings


@dataclass(slots=True)
class Evaluating:
    """One call of `evaluate`."""

    before: Marks
    after: Marks = field(default_factory=dict[str, TensorMark])
    result: Evaluation | None = None
    error: BaseException | None = None


class ObservedClient(Client):
    """Passes every call on to `app`, and notes it. `alter`: changes the plans of trainings."""

    def __init__(self, app: Client, alter: Alter = as_asked) -> None:
        self.app, self.alter = app, alter
        self.trainings: list[ObservedTraining] = []
        self.evaluations: list[Evaluating] = []

    def __getattr__(self, name: str) -> Any:  # such as `model`, which the client may replace
        return getattr(self.app, name)

    def prepare(self, plan: LocalPlan) -> None:
        self.app.prepare(plan)

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        noted = observed_plan(plan)
        seen = ObservedTraining(noted, marks_of(model.state_dict()))
        self.trainings.append(seen)
        _stir()
        before = _process()
        try:
            with _optimizer_steps(noted.doings.steps_of):
                result = self.app.train(model, self.alter(noted))
            seen.result = result
        except (Exception, SystemExit) as error:
            seen.error = error
            raise
        finally:
            seen.touched = _restored(before)
            seen.after = marks_of(self.app.model.state_dict())
            seen.has_gradients = noted.doings.steps > 0 or any(p.grad is not None for p in model.parameters())
            seen.state_error = _why_unkept(plan.state)
        return result

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        seen = Evaluating(marks_of(model.state_dict()))
        self.evaluations.append(seen)
        _stir()
        before = _process()
        try:
            seen.result = self.app.evaluate(model)
        except (Exception, SystemExit) as error:
            seen.error = error
            raise
        finally:
            _restored(before)
            seen.after = marks_of(self.app.model.state_dict())
        return seen.result

    def training_loss(self, model: nn.Module) -> float | None:
        return self.app.training_loss(model)

    def shares(self, name: str) -> TensorKind | None:
        return self.app.shares(name)


@contextmanager
def _optimizer_steps(steps_of: Counter[int]) -> Generator[None]:
    """Count the steps of all optimizers of torch in this block."""

    def count(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        steps_of[id(optimizer)] += 1

    handle = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        handle.remove()


_SEEDS = itertools.count(1)


def _stir() -> None:
    """Put the process-wide generators into another state each time, so that a client that draws from them shows it."""
    seed = next(_SEEDS)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


GENERATORS = ("torch's random generator", "Python's random generator", "numpy's random generator")
_SETTERS: Mapping[str, Callable[[Any], object]] = {
    "torch's default dtype": torch.set_default_dtype,
    "whether torch records gradients": torch.set_grad_enabled,
    "torch's number of threads": torch.set_num_threads,
    "whether torch's algorithms are deterministic": torch.use_deterministic_algorithms,
}


def _process() -> dict[str, Any]:
    """What a client shares with all other code of its process, by the words for it."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    numpys = (kind, np.asarray(keys).tolist(), *rest)
    settings = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )
    generators = (torch.get_rng_state().tolist(), random.getstate(), numpys)
    return dict(zip((*GENERATORS, *_SETTERS), (*generators, *settings), strict=True))


def _restored(before: Mapping[str, Any]) -> tuple[str, ...]:
    """Restore the settings of the process; returns what had changed, of the generators too."""
    after = _process()
    changed = tuple(name for name, value in before.items() if value != after[name])
    for name in changed:
        if name in _SETTERS:
            _SETTERS[name](before[name])
    return changed


def _why_unkept(state: Mapping[str, Any]) -> str:
    try:
        pack_state(SiteState(dict(state)))
    except (TypeError, ValueError) as error:
        return str(error)
    return ""
