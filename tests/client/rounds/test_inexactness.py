"""The gamma that a client reports is that of the work that it has done, and measuring it changes nothing else."""

import copy
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.client.doubles.double import TOKEN, URL, Double
from umbel.aggregation.plans.tensors import TensorKind
from umbel.aggregation.plans.training import TrainingSection
from umbel.client import ArrayClient, Client, LocalPlan, TorchClient, TrainResult, run_client
from umbel.client.errors import RankFailed
from umbel.client.local.arrays import ArrayData
from umbel.client.local.checkpoint import Checkpoint
from umbel.client.rounds.inexactness import MissingGamma
from umbel.client.rounds.site_code import Trained, train_from
from umbel.client.training.shared_state import SharedState

N, DIM = 300, 4  # more samples than a `TorchClient` takes into one batch of a measurement
CURVATURES = torch.tensor([0.3, 1.0, 2.0, 5.0], dtype=torch.float64)
PLAN = LocalPlan(steps=6, batch_size=N, learning_rate=0.05, inexactness=True)


def points(seed: int = 3) -> Tensor:
    return torch.randn(N, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Point(nn.Module):
    """A model of one vector, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64))


class Quadratic(Client):
    """Minimizes F(w), the mean over its points x of 1/2 sum_j a_j (w_j - x_j)^2, with a loop of its own."""

    def __init__(self, data: Any = None) -> None:
        self.model, self.sample_count = Point(), N
        self.data = data or TensorDataset(points())

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        optimizer = self.optimizer(model, plan)
        steps = plan.drive(self.data, keep={"model": model, "optimizer": optimizer})
        for (batch,) in steps:
            optimizer.zero_grad()
            loss = self.loss(model, batch)
            loss.backward()
            self.adjust(model, plan)
            optimizer.step()
            steps.note(loss=loss)
        return steps.result(N, {"own": 1.0})

    def optimizer(self, model: nn.Module, plan: LocalPlan) -> torch.optim.Optimizer:
        return plan.make_optimizer(model)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return (CURVATURES * (model.at - batch).square()).sum(1).mean() / 2  # type: ignore[operator]

    def adjust(self, model: nn.Module, plan: LocalPlan) -> None:
        plan.adjust_gradients(model)


def trained(app: Client, plan: LocalPlan) -> tuple[Trained, dict[str, Tensor]]:
    """The training from the model as it is, and the weights that it started from."""
    shared = SharedState(app)
    start = {name: one.detach().clone() for name, one in shared.shared().items()}
    return train_from(app, shared, start, plan), start


def gamma_of(app: Client, plan: LocalPlan) -> float:
    return trained(app, plan)[0].result.metrics["gamma"]


def expected_gamma(plan: LocalPlan, n_steps: int) -> float:
    """Of k exact steps of gradient descent: each shrinks the j-th gradient of h by 1 - rate (a_j + mu)."""
    first = CURVATURES * (Point().at.detach() - points().mean(0))
    shrunk = (1 - plan.learning_rate * (CURVATURES + plan.proximal_mu)) ** n_steps
    return float((shrunk * first).norm() / first.norm())


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("n_steps", [1, 4, 40])
def test_gamma_of_exact_steps_on_a_quadratic_is_the_closed_form(n_steps: int, mu: float) -> None:
    plan = replace(PLAN, steps=n_steps, proximal_mu=mu)
    assert gamma_of(Quadratic(), plan) == pytest.approx(expected_gamma(plan, n_steps), rel=1e-6)


def test_gamma_of_a_training_that_moves_nothing_is_one_and_more_steps_lower_it() -> None:
    assert gamma_of(Quadratic(), replace(PLAN, learning_rate=0.0, proximal_mu=0.5)) == 1.0
    found = [gamma_of(Quadratic(), replace(PLAN, steps=n)) for n in (1, 3, 9, 27)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] < 1


class AsksFirst(Quadratic):
    """Makes no first step if it is to stop."""

    def adjust(self, model: nn.Module, plan: LocalPlan) -> None:
        if plan.is_whole and plan.should_stop():
            raise RuntimeError("no step at all")
        super().adjust(model, plan)


def test_partial_work_is_less_exact_than_whole_work() -> None:
    """A share of a canary, and a simulated device whose time is up."""
    asked = iter(range(1, 100))
    stopped = replace(PLAN, steps=20, told_to_stop=lambda: "its time is up" if next(asked) >= 5 else None)
    shared, whole = replace(PLAN, steps=20, share=0.25), replace(PLAN, steps=20)
    for partial in (shared, stopped):
        assert gamma_of(AsksFirst(), partial) == pytest.approx(expected_gamma(PLAN, 5), rel=1e-6)
    assert gamma_of(Quadratic(), whole) == pytest.approx(expected_gamma(PLAN, 20), rel=1e-6)
    assert expected_gamma(PLAN, 5) > expected_gamma(PLAN, 20)


class AdamAlone(Quadratic):
    """Has an optimizer of its own, whose steps do not show the size of a gradient."""

    def optimizer(self, model: nn.Module, plan: LocalPlan) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.1)


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_gamma_is_that_of_the_trained_model_whatever_the_optimizer_the_batches_and_the_clip(mu: float) -> None:
    app = AdamAlone()
    done, start = trained(app, replace(PLAN, batch_size=17, proximal_mu=mu, clip_norm=0.1))
    at = app.model.at.detach()  # type: ignore[operator]
    assert not torch.equal(at, start["at"])
    ends = CURVATURES * (at - points().mean(0)) + mu * (at - start["at"])
    first = CURVATURES * (start["at"] - points().mean(0))
    assert done.result.metrics["gamma"] == pytest.approx(float(ends.norm() / first.norm()), rel=1e-6)
    assert done.result.metrics["own"] == 1.0


class ArrayQuadratic(ArrayClient):
    """The same in numpy. `by_steps`: with steps whose gradients nobody sees."""

    def __init__(self, by_steps: bool) -> None:
        super().__init__({"at": Point().at.detach().numpy()}, N)
        self._by_steps = by_steps

    def train_arrays(self, arrays: dict[str, Any], plan: LocalPlan) -> tuple[Any, TrainResult]:
        steps = plan.drive(ArrayData(points().numpy()), keep={"arrays": arrays})
        for (batch,) in steps:
            gradient = CURVATURES.numpy() * (arrays["at"] - batch.mean(0))
            moved = {"at": arrays["at"] - plan.learning_rate * gradient}
            if not self._by_steps:
                adjusted = plan.adjust_arrays({"at": gradient}, arrays)
                moved = {"at": arrays["at"] - plan.learning_rate * adjusted["at"]}
            arrays.update(plan.adjust_step(arrays, moved) if self._by_steps else moved)
        return arrays, steps.result(N)


@pytest.mark.parametrize("by_steps", [False, True])
def test_gamma_of_a_client_of_arrays_is_the_closed_form_too(by_steps: bool) -> None:
    plan = replace(PLAN, proximal_mu=0.7)
    assert gamma_of(ArrayQuadratic(by_steps), plan) == pytest.approx(expected_gamma(plan, 6), rel=1e-6)


def ready(data: Any = None) -> TorchClient:
    """A logistic regression in float64."""
    model = nn.Linear(DIM, 2).double()
    with torch.no_grad():
        model.weight.copy_(points(1)[:2])
        model.bias.zero_()
    samples = TensorDataset(points(), (points().sum(1) > 0.3).long())
    return TorchClient(model, "classes", data(samples) if data else samples, device="cpu")


def logistic_gradient(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: one.detach().clone().requires_grad_() for name, one in weights.items()}
    logits = points() @ leaves["weight"].T + leaves["bias"]
    loss = nn.functional.cross_entropy(logits, (points().sum(1) > 0.3).long())
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def norm(tensors: dict[str, Tensor]) -> float:
    return float(torch.cat([one.flatten() for one in tensors.values()]).norm())


@pytest.mark.parametrize("data", [None, lambda samples: DataLoader(samples, batch_size=64, shuffle=True)])
@pytest.mark.parametrize(
    "terms", [{}, {"optimizer": "adamw", "weight_decay": 0.1}, {"momentum": 0.9}], ids=["sgd", "adamw", "momentum"]
)
def test_gamma_of_the_ready_trainer_is_autograds(terms: dict[str, Any], data: Any) -> None:
    """All samples, also those of a loader whose batches are smaller."""
    app = ready(data)
    done, start = trained(app, LocalPlan(epochs=2, proximal_mu=0.3, learning_rate=0.02, inexactness=True, **terms))
    ends = {name: one.detach() for name, one in app.model.named_parameters()}
    pulled = {name: one + 0.3 * (ends[name] - start[name]) for name, one in logistic_gradient(ends).items()}
    expected = norm(pulled) / norm(logistic_gradient(start))
    assert done.result.metrics["gamma"] == pytest.approx(expected, rel=1e-6)


class OnlyHalf(Quadratic):
    """Half of the vector stays here."""

    def __init__(self) -> None:
        super().__init__()
        at = self.model.at.detach()  # type: ignore[operator]
        self.model = nn.ParameterDict({"at": at[:2].clone(), "own": at[2:].clone()})

    def shares(self, name: str) -> TensorKind | None:
        return "private" if name == "own" else None

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        whole = torch.cat([model["at"], model["own"]])  # type: ignore[index]
        # Each value's gradient depends on the private ones.
        return (CURVATURES * (whole * (1 + whole[2]) - batch).square()).sum(1).mean() / 2


def test_gradients_of_both_models_are_taken_with_the_private_tensors_that_belong_to_them() -> None:
    app, plan = OnlyHalf(), replace(PLAN, steps=3)
    before = {name: one.detach().clone() for name, one in app.model.named_parameters()}
    found = gamma_of(app, plan)

    def gradient(values: dict[str, Tensor]) -> Tensor:
        at, own = values["at"].clone().requires_grad_(), values["own"]
        loss = app.loss({"at": at, "own": own}, points())  # type: ignore[arg-type]
        return torch.autograd.grad(loss, at)[0]

    after = {name: one.detach().clone() for name, one in app.model.named_parameters()}
    assert not torch.equal(after["own"], before["own"])
    assert found == pytest.approx(float(gradient(after).norm() / gradient(before).norm()), rel=1e-6)


def test_only_the_part_of_a_gradient_that_the_codec_can_send_counts() -> None:
    kept = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    found = gamma_of(Quadratic(), replace(PLAN, within={"at": lambda gradient: gradient * kept}))
    first = kept * CURVATURES * (Point().at.detach() - points().mean(0))
    last = (1 - PLAN.learning_rate * CURVATURES) ** 6 * first
    assert found == pytest.approx(float(last.norm() / first.norm()), rel=1e-6)


class Untidy(Client):
    """Everything of which a measurement could leave a trace: draws that nobody seeds, running statistics, a buffer
    that no file has, gradients that are never cleared, a mode that is set only at the end, a state, private tensors.
    """

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.model = nn.Sequential(nn.Linear(DIM, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
        self.seen = torch.zeros(())
        self.model.register_buffer("seen", self.seen, persistent=False)
        self.sample_count = N

    def shares(self, name: str) -> TensorKind | None:
        return "private" if name.startswith("1.") else None

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        optimizer = torch.optim.SGD(model.parameters(), plan.learning_rate, momentum=0.9)
        planned = plan.steps_for(-(-N // plan.batch_size))
        plan.state["rounds"] = plan.state.get("rounds", 0) + 1
        plan.state.setdefault("moments", torch.zeros(2)).add_(torch.rand(2))
        for _ in range(planned):
            rows = torch.randint(N, (plan.batch_size,)) + int(np.random.randint(2)) * random.randrange(2)
            inputs = points()[rows % N].float()
            self.seen.add_(1)
            loss = nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())
            (loss * (1 + self.seen / 10)).backward()
            plan.adjust_gradients(model)
            optimizer.step()
        model.train(planned == 1)
        return TrainResult(N, planned, planned)


def two_rounds(plan: LocalPlan) -> tuple[list[dict[str, Tensor]], dict[str, Any], list[float], list[bool]]:
    """The models after two rounds, the client's state, the next draws, and whether gamma was measured."""
    app, found, gammas = Untidy(), list[dict[str, Tensor]](), list[bool]()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        for _ in range(2):
            done, _ = trained(app, plan)
            found.append({name: one.clone() for name, one in app.model.state_dict().items()})
            found.append({n: one.grad.clone() for n, one in app.model.named_parameters() if one.grad is not None})
            gammas.append("gamma" in done.result.metrics)
        draws = [float(torch.rand(1)), float(np.random.rand()), random.random()]
    return found, plan.state, draws, gammas


def test_the_training_has_the_same_bits_whether_or_not_gamma_is_measured() -> None:
    plan = LocalPlan(steps=5, batch_size=20, learning_rate=0.1, proximal_mu=0.1, inexactness=True)
    models, state, draws, gammas = two_rounds(plan)
    plain = replace(plan, inexactness=False, state={})
    models_without, state_without, draws_without, gammas_without = two_rounds(plain)
    assert gammas == [True, True]
    assert gammas_without == [False, False]
    for with_gamma, without in zip(models, models_without, strict=True):
        assert with_gamma.keys() == without.keys()
        assert all(torch.equal(one, without[name]) for name, one in with_gamma.items())
    assert state["rounds"] == state_without["rounds"] == 2
    assert torch.equal(state["moments"], state_without["moments"])
    assert draws == draws_without


class Noted(Checkpoint):
    """Keeps what is saved first."""

    def __init__(self) -> None:
        self.n_loads, self.saved = 0, dict[str, Any]()

    def is_due(self) -> bool:
        return not self.saved

    def save(self, state: Mapping[str, object]) -> None:
        self.saved = copy.deepcopy(dict(state))

    def load(self) -> dict[str, Any] | None:
        self.n_loads += 1
        return copy.deepcopy(self.saved) or None


def test_a_training_that_resumes_has_the_gamma_of_the_whole_and_its_checkpoint_is_not_read_for_it() -> None:
    checkpoint = Noted()
    gamma_of(Quadratic(), replace(PLAN, checkpoint=checkpoint))
    assert checkpoint.saved["steps_done"] == 1
    found = gamma_of(Quadratic(), replace(PLAN, checkpoint=checkpoint))
    assert found == pytest.approx(expected_gamma(PLAN, 6), rel=1e-6)
    assert checkpoint.n_loads == 2, "once in each training"


class Silent(Quadratic):
    def adjust(self, model: nn.Module, plan: LocalPlan) -> None:
        pass


class Twice(Quadratic):
    def adjust(self, model: nn.Module, plan: LocalPlan) -> None:
        plan.adjust_gradients(model)
        plan.adjust_gradients(model)


class Own(Quadratic):
    """Takes the steps of the round, whatever the plan says."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return super().train(model, replace(plan, steps=6, batch_size=17, is_whole=False))


class Fails(Quadratic):
    """Cannot take all samples at once."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) == N:
            raise MemoryError("too many samples")
        return super().loss(model, batch)


class Solved(Quadratic):
    """Its objective has no gradient anywhere."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return super().loss(model, batch) * 0


class OneCall(Quadratic):
    trains_in_one_call = True


LEFT_OUT: dict[str, tuple[Callable[[], Client], LocalPlan, str]] = {
    "batches of its own": (
        lambda: Quadratic(DataLoader(TensorDataset(points()), batch_size=30)),
        PLAN,
        "needs them in one batch",
    ),
    "no gradient is shown": (Silent, PLAN, r"call plan\.adjust_gradients\(model\) after backward"),
    "two gradients": (Twice, PLAN, "several gradients in the place of one"),
    "many steps": (Own, PLAN, "train took 6 steps in the place of one"),
    "too large": (Fails, replace(PLAN, batch_size=30), "MemoryError"),
    "no gradient": (Solved, PLAN, "the gradient at the round's model is 0"),
    "one call": (OneCall, PLAN, "a training in one call shows no gradient"),
    "little time": (Quadratic, replace(PLAN, deadline=1.0, clock=lambda: 1.0 - 1e-9), "deadline is too near"),
    "told to stop": (
        Quadratic,
        replace(PLAN, deadline=1e9, clock=lambda: 0.0, told_to_stop=lambda: "the round is closed"),
        "the training was told to stop",
    ),
    "diverged": (Quadratic, replace(PLAN, steps=200, learning_rate=1e3), "diverged"),
}


@pytest.mark.parametrize(("make", "plan", "why"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_cannot_be_measured_is_left_out_with_one_line_and_the_work_counts(
    make: Callable[[], Client], plan: LocalPlan, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    usual, app = make(), make()
    trained(usual, replace(plan, inexactness=False))
    done, _ = trained(app, plan)
    assert "gamma" not in done.result.metrics
    assert "own" in done.result.metrics
    [line] = [one.getMessage() for one in caplog.records if "gamma (inexactness) is not measured" in one.getMessage()]
    assert caplog.text.count("gamma") == 1
    assert re.search(why, line)
    for name, one in usual.model.state_dict().items():
        assert torch.equal(one.nan_to_num(), app.model.state_dict()[name].nan_to_num())


def test_a_reason_is_logged_once_for_a_run_and_another_reason_again(caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedState(app := Solved())
    missing, start = MissingGamma(), {name: one.detach().clone() for name, one in shared.shared().items()}
    late = {"deadline": 1.0, "clock": lambda: 1.0 - 1e-9}
    for number, run, other in [(1, "a", {}), (2, "a", {}), (3, "a", late), (4, "a", late), (1, "b", {})]:
        plan = replace(PLAN, round=number, run=run, **other)  # type: ignore[arg-type]
        train_from(app, shared, start, plan, missing)
    said = [re.search(r"in round (\d): the (.*?)[ .]", one) for one in caplog.messages]
    assert [one and one.groups() for one in said] == [("1", "gradient"), ("3", "round's"), ("1", "gradient")]


def test_a_second_gradient_for_which_the_time_is_too_short_is_not_begun(caplog: pytest.LogCaptureFixture) -> None:
    now, n_trainings = [0.0], [0]

    class Slow(Quadratic):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            n_trainings[0] += 1
            if plan.is_whole:
                now[0] += 60.0
            return super().train(model, plan)

    done, _ = trained(Slow(), replace(PLAN, deadline=100.0, clock=lambda: now[0]))
    assert "gamma" not in done.result.metrics
    assert n_trainings == [2]
    assert "deadline is too near" in caplog.text


def test_a_lost_rank_is_not_taken_for_a_metric_that_is_missing() -> None:
    class Lost(Quadratic):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            if plan.is_whole:
                raise RankFailed("rank 1 is lost")
            return super().train(model, plan)

    with pytest.raises(RankFailed, match="rank 1 is lost"):
        trained(Lost(), PLAN)


@pytest.mark.parametrize("asked", [False, True])
def test_the_report_of_a_round_has_it_if_the_run_asks(tmp_path: Path, asked: bool) -> None:
    app = Quadratic()
    training = TrainingSection(local_steps=6, batch_size=N, learning_rate=0.05, proximal_mu=0.7, inexactness=asked)
    double = Double(app.model, training=training)
    run_client(app, URL, tmp_path, "demo", TOKEN, "ward-7", transport=double.transport())
    metrics = double.reports["demo.1.1.ward-7"]["metrics"]
    assert set(metrics) == {"loss", "own"} | ({"gamma"} if asked else set())
    if asked:
        plan = LocalPlan(learning_rate=0.05, proximal_mu=0.7)
        assert metrics["gamma"] == pytest.approx(expected_gamma(plan, 6), rel=1e-5)
