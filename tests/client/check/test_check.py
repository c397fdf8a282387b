"""The checks of a client find each fault under its own name, and no fault in a correct client."""

import copy
import itertools
import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from examples import my_hospital, numpy_hospital, own_client, own_training, sklearn_hospital
from tests.client.check.clients import Bare, N, Ward
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.plans.schedule import RateSchedule
from umbel.aggregation.plans.tensors import TensorKind
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.client import Client, Evaluation, LocalPlan, TorchClient, TrainResult
from umbel.client.check import ClientCheck, check_client
from umbel.client.check.check import CHECKS
from umbel.client.errors import AppError, TooLittleDone, WorkRefused
from umbel.client.local.steps import LocalSteps
from umbel.client.training.trainer import Configured, StepLoss

pytestmark = pytest.mark.slow  # a check has some fifteen trainings, and four runs of a client's loop
STEPS = 4


def checked(make: Callable[[], Client] | Client, file: RunFile | None = None) -> ClientCheck:
    return check_client(make, file, steps=STEPS)


def found_by(check: ClientCheck, verdict: str) -> set[str]:
    return {one.check for one in check.findings if one.verdict == verdict}


# --- correct clients --------------------------------------------------------------------------------------------------


class Hooked(TorchClient):
    """The ready trainer with each of its hooks, two optimizers, a schedule, counts and accumulation."""

    def __init__(self) -> None:
        ward = Ward()
        super().__init__(
            ward.model,
            "classes",
            ward.data,
            ward.holdout,
            device="cpu",
            counts={"right": lambda output, target: (output.argmax(1) == target).sum()},
            accumulate=2,
        )

    def training_step(self, model: nn.Module, batch: Any) -> StepLoss:
        inputs, target = batch
        loss = nn.functional.cross_entropy(model(inputs), target)
        return loss, {"right": (model(inputs).argmax(1) == target).sum()}

    def configure(self, model: nn.Module, plan: LocalPlan) -> Configured:
        one, *others = model.parameters()
        optimizers = [torch.optim.AdamW([one], plan.learning_rate), torch.optim.SGD(others, plan.learning_rate)]
        return optimizers, torch.optim.lr_scheduler.StepLR(optimizers[0], 2)


class Stateful(Ward):
    """Keeps a tensor and a count in `plan.state`, and a tensor to itself."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        plan.state["rounds"] = plan.state.get("rounds", 0) + 1
        plan.state.setdefault("sum", torch.zeros(2)).add_(1)
        return super().train(model, plan)

    def shares(self, name: str) -> TensorKind | None:
        return "private" if name.startswith("1.") else None


class Frozen(Ward):
    """Has a base layer, which every site has, and trains the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].requires_grad_(False)  # type: ignore[index]

    def shares(self, name: str) -> TensorKind | None:
        return "base" if name.startswith("0.") else None


EXAMPLES = [one.client for one in (my_hospital, own_client, own_training, numpy_hospital, sklearn_hospital)]


@pytest.mark.parametrize("make", [*EXAMPLES, Ward, Hooked, Stateful, Frozen])
def test_a_correct_client_passes_all_checks(make: Callable[[], Client]) -> None:
    found = checked(make)
    assert not found.wrong, str(found)
    assert not found.warnings, str(found)
    assert set(found.names) == set(CHECKS)


@settings(max_examples=3)
@given(st.integers(0, 2**31))
def test_a_correct_client_passes_whatever_its_seed(seed: int) -> None:
    found = checked(lambda: Ward(seed))
    assert (*found.wrong, *found.warnings) == (), str(found)


def test_a_client_object_is_checked_by_copies_and_stays_as_it_is() -> None:
    client = Ward()
    before = {name: value.clone() for name, value in client.model.state_dict().items()}
    assert not checked(client).wrong
    assert not checked(lambda: client).wrong
    assert all(torch.equal(before[name], value) for name, value in client.model.state_dict().items())


def test_the_generators_of_the_process_are_restored() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    checked(Ward)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before[2]


def test_a_loop_that_saves_no_checkpoint_is_warned_that_a_killed_training_begins_anew() -> None:
    found = checked(Bare)
    assert found_by(found, "warning") == {"resume"}, str(found)
    assert not found.wrong


# --- broken clients, each with one fault ------------------------------------------------------------------------------


class Raises(Ward):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("age")


class ReturnsNothing(Ward):
    def returned(self, steps: LocalSteps) -> TrainResult:
        return None  # type: ignore[return-value]


class ChangesDtype(Ward):
    def returned(self, steps: LocalSteps) -> TrainResult:
        self.model.to(torch.float64)
        return super().returned(steps)


class AddsATensor(Ward):
    def returned(self, steps: LocalSteps) -> TrainResult:
        self.model.register_buffer("seen", torch.ones(1))
        return super().returned(steps)


class TrainsACopy(Ward):
    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return super().train(copy.deepcopy(model), plan)


class Diverges(Ward):
    def returned(self, steps: LocalSteps) -> TrainResult:
        with torch.no_grad():
            next(self.model.parameters()).fill_(float("nan"))
        return super().returned(steps)


class ChangesBase(Ward):
    def shares(self, name: str) -> TensorKind | None:
        return "base" if name.startswith("0.") else None


class KeepsAModule(Ward):
    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        result = super().train(model, plan)
        plan.state["optimizer"] = torch.optim.SGD(model.parameters(), 0.1)
        return result


class KeepsTooMuch(Ward):
    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        result = super().train(model, plan)
        plan.state["seen"] = "a text as long as all JSON may be".ljust(1 << 24)
        return result


class RaisesInRoundTwo(Ward):
    def begin_round(self, plan: LocalPlan) -> None:
        if plan.round == 2:
            raise KeyError("ward")

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.begin_round(plan)
        return super().train(model, plan)


class SwitchesGradientsOff(Ward):
    def returned(self, steps: LocalSteps) -> TrainResult:
        torch.set_grad_enabled(False)
        return super().returned(steps)


class CountsTooManySamples(Ward):
    def returned(self, steps: LocalSteps) -> TrainResult:
        return steps.result(self.sample_count * 2)


class SaysMoreThanItHas(Ward):
    def __init__(self) -> None:
        super().__init__()
        self.sample_count = 10 * N


class PlansWhatItDid(Ward):
    def returned(self, steps: LocalSteps) -> TrainResult:
        return TrainResult(N, steps.steps_done, steps.steps_done + 1)


class StepsTwice(Ward):
    def adjust(self, model: nn.Module, plan: LocalPlan) -> None:
        super().adjust(model, plan)
        self.optimizer.step()

    def kept(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.optimizer = optimizer
        return super().kept(model, optimizer)


class MeasuresNan(Ward):
    def returned(self, steps: LocalSteps) -> TrainResult:
        return steps.result(N, {"auc": float("nan")})


class EvaluatesNan(Ward):
    def evaluate(self, model: nn.Module) -> Evaluation | None:
        return Evaluation(N, {"auc": float("inf")})


class NamesAMetricBadly(Ward):
    def evaluate(self, model: nn.Module) -> Evaluation | None:
        return Evaluation(N, {"my metric!": 0.5})


class CountsBelowZero(Ward):
    def returned(self, steps: LocalSteps) -> TrainResult:
        steps.count(missed=torch.tensor([1, -1]))
        return super().returned(steps)


class CountsParts(Ward):
    def returned(self, steps: LocalSteps) -> TrainResult:
        steps.count(missed=torch.tensor([0.5]))
        return super().returned(steps)


_CALLS = itertools.count()


class DrawsAnew(Ward):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + next(_CALLS) / 100)


class DrawsFromTheProcess(Bare):
    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        before = torch.get_rng_state()
        result = super().train(model, replace(plan, seed=int(torch.randint(1000, ()))))
        torch.set_rng_state(before)
        return result


class KeepsItsOptimizer(Ward):
    """Its momentum goes on from round to round, and is lost at a restart."""

    optimizer: torch.optim.Optimizer | None = None

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: LocalPlan, steps: LocalSteps, batch: Any
    ) -> None:
        self.optimizer = self.optimizer or optimizer
        super().step(model, self.optimizer, plan, steps, batch)


class NeverStops(Bare):
    def is_over(self, plan: LocalPlan) -> bool:
        return plan.seconds_left <= 0


class NeverLooksAtTheClock(Bare):
    def is_over(self, plan: LocalPlan) -> bool:
        return plan.told_to_stop() is not None


class AdjustsTooLate(Ward):
    """Says that it adjusts gradients, but the optimizer has taken its step before."""

    def adjust(self, model: nn.Module, plan: LocalPlan) -> None:
        pass

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: LocalPlan, steps: LocalSteps, batch: Any
    ) -> None:
        super().step(model, optimizer, plan, steps, batch)
        plan.adjust_gradients(model)


class IgnoresGradientRules(Ward):
    def adjust(self, model: nn.Module, plan: LocalPlan) -> None:
        pass


class ClaimsProximal(Ward):
    """Says that it applies FedProx by itself, and does not."""

    def adjust(self, model: nn.Module, plan: LocalPlan) -> None:
        plan.applied_by_site("proximal_mu")
        if not plan.proximal_mu:
            plan.adjust_gradients(model)


class EvaluatesInTrainMode(Ward):
    def evaluate(self, model: nn.Module) -> Evaluation | None:
        model.train()
        inputs, target = self.holdout.tensors
        with torch.no_grad():
            return Evaluation(N, {"loss": float(nn.functional.cross_entropy(model(inputs), target))})


class EvaluatesAtRandom(Ward):
    def evaluate(self, model: nn.Module) -> Evaluation | None:
        return Evaluation(N, {"loss": random.random()})


class TimesItself(Ward):
    def evaluate(self, model: nn.Module) -> Evaluation | None:
        found = super().evaluate(model)
        assert found is not None
        return replace(found, metrics={**found.metrics, "seconds": random.random()})


class StaysInEvalMode(Ward):
    """Its evaluation leaves the model in eval mode, and its training does not change that."""

    def begin(self, model: nn.Module) -> None:
        pass


class EvaluateRaises(Ward):
    def evaluate(self, model: nn.Module) -> Evaluation | None:
        raise FileNotFoundError("holdout.csv")


class EvaluateAddsATensor(Ward):
    def evaluate(self, model: nn.Module) -> Evaluation | None:
        model.register_buffer("seen", torch.ones(1))
        return super().evaluate(model)


class ForgetsAtARestart(Ward):
    """Measures with a threshold that its training has left in the object."""

    threshold = 0.0

    def returned(self, steps: LocalSteps) -> TrainResult:
        self.threshold = 0.5
        return super().returned(steps)

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        return Evaluation(N, {"threshold": self.threshold})


class WaitsForOneCall(Ward):
    trains_in_one_call = True

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        for _ in range(50):
            if reason := plan.should_stop():
                raise TooLittleDone(reason)
        return super().train(model, plan)


class KeepsNoOptimizer(Ward):
    """A resumed training has lost its momentum."""

    def kept(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model}


FAULTS: Mapping[str, list[type[Client]]] = {
    "train": [Raises, ReturnsNothing],
    "tensors": [ChangesDtype, AddsATensor],
    "weights": [TrainsACopy, Diverges],
    "base": [ChangesBase],
    "state": [KeepsAModule, KeepsTooMuch],
    "process": [SwitchesGradientsOff],
    "samples": [CountsTooManySamples, SaysMoreThanItHas],
    "steps": [PlansWhatItDid, StepsTwice],
    "metrics": [MeasuresNan, EvaluatesNan, NamesAMetricBadly],
    "counts": [CountsBelowZero, CountsParts],
    "determinism": [DrawsAnew, DrawsFromTheProcess, KeepsItsOptimizer],
    "stop": [NeverStops],
    "deadline": [NeverLooksAtTheClock],
    "proximal_mu": [ClaimsProximal],
    "evaluate": [EvaluatesInTrainMode, EvaluatesAtRandom, StaysInEvalMode, EvaluateRaises, EvaluateAddsATensor],
    "restart": [ForgetsAtARestart],
    "resume": [KeepsNoOptimizer],
}
CASES = [(check, make) for check, makes in FAULTS.items() for make in makes]


@pytest.mark.parametrize(("check", "make"), CASES, ids=[make.__name__ for _, make in CASES])
def test_a_fault_is_found_by_its_own_check_and_by_no_other(check: str, make: type[Client]) -> None:
    found = checked(make)
    assert found_by(found, "wrong") == {check}, str(found)
    assert all(one.advice for one in found.wrong)


def test_a_training_in_one_call_that_asks_often_whether_to_stop_sends_both_reports() -> None:
    """A slow machine waits longer for such a call, and asks more often."""
    found = checked(WaitsForOneCall)
    assert found.verdict_of("rounds") == "pass", str(found)


def test_an_error_in_a_later_round_is_told_with_its_line() -> None:
    """The client's log has it in production; the check keeps that log to itself."""
    (finding,) = checked(RaisesInRoundTwo).wrong
    assert finding.check == "rounds"
    assert re.search(r"round 2: .* failed with KeyError: 'ward' \(test_check.py, line \d+\)$", finding.found)


def test_a_metric_that_is_a_time_is_named_and_no_fault() -> None:
    found = checked(TimesItself)
    assert not found.wrong, str(found)
    [told] = [one for one in found.findings if one.check == "evaluate" and one.verdict == "warning"]
    assert told.found == "two evaluations of the same weights agree, but for the metrics: seconds"
    assert found.verdict_of("restart") == "skipped"


@pytest.mark.parametrize("make", [IgnoresGradientRules, AdjustsTooLate])
def test_a_loop_that_does_nothing_to_gradients_fails_for_each_key_that_a_run_can_ask(make: type[Client]) -> None:
    found = checked(make)
    assert found_by(found, "wrong") == {"proximal_mu", "clip_norm", "codec"}, str(found)
    assert found.verdict_of("rounds") == "pass"


# --- run files, and what cannot be checked ----------------------------------------------------------------------------


def run_file(**more: Any) -> RunFile:
    return RunFile("wards", RoundsSection(9, target=30), **more)


def test_a_run_file_says_what_is_asked_of_gradients() -> None:
    training = TrainingSection(proximal_mu=0.01, options={"stage": "head"})
    codec = CodecSection("lowrank", rank=1, mode="structured")
    found = checked(Ward, run_file(training=training, codec=codec))
    assert not found.wrong, str(found)
    assert [found.verdict_of(key) for key in ("proximal_mu", "clip_norm", "codec")] == ["pass", "skipped", "pass"]


@pytest.mark.parametrize(
    "training",
    [
        TrainingSection(algorithm="fedprox", adaptive_mu=True),
        TrainingSection(algorithm="fedprox", proximal_mu=0.1),
        TrainingSection(algorithm="feddyn", proximal_mu=0.1, total_samples=300),
    ],
    ids=["adaptive", "fedprox", "feddyn"],
)
def test_an_algorithm_that_cannot_be_without_mu_is_checked_with_and_without_it(training: TrainingSection) -> None:
    """An adaptive mu may begin with 0, so a client that ignores it would fail only in a later round."""
    found = checked(Ward, run_file(training=training))
    assert not found.wrong, str(found)
    assert found.verdict_of("proximal_mu") == "pass"
    if training.algorithm == "fedprox":
        found = checked(IgnoresGradientRules, run_file(training=training))
        assert found_by(found, "wrong") == {"proximal_mu"}, str(found)


def test_the_rounds_of_a_check_take_the_steps_of_the_run_files_server_optimizer() -> None:
    section = AggregationSection(optimizer="adam", schedule=RateSchedule("cosine"))
    found = checked(Ward, run_file(aggregation=section))
    assert not found.wrong, str(found)
    assert found.verdict_of("rounds") == "pass"


def test_a_client_is_told_the_options_of_the_run_file() -> None:
    told = set[object]()

    class Listens(Ward):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            told.add(plan.options.get("stage"))
            return super().train(model, plan)

    checked(Listens, run_file(training=TrainingSection(options={"stage": "head"})))
    assert told == {"head"}


def test_private_tensors_of_a_run_file_stay_at_the_client() -> None:
    found = checked(Ward, run_file(tensors={"private": ("1.*",)}))
    assert not found.wrong, str(found)


def test_personal_metrics_of_a_plain_run_file_need_not_be_listed_for_the_secure_round() -> None:
    """The secure round is the check's own. It ended the whole check with a demand that only a secure run file has."""
    found = checked(Ward, run_file(training=TrainingSection(evaluate=True, evaluate_after=True)))
    assert found.verdict_of("secure") == "pass", str(found)


@pytest.mark.slow
def test_the_check_of_a_run_that_measures_inexactness_trains_as_often_as_that_of_another() -> None:
    trainings = list[int]()

    class Counts(Ward):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            trainings.append(1)
            return super().train(model, plan)

    counts = list[int]()
    for inexactness in (False, True):
        trainings.clear()
        found = checked(Counts, run_file(training=TrainingSection(inexactness=inexactness)))
        assert not found.wrong, str(found)
        counts.append(len(trainings))
    assert counts[0] == counts[1] > 0


def test_a_run_file_whose_tensors_do_not_fit_the_model_is_refused() -> None:
    with pytest.raises(WorkRefused, match=r"'head\.\*' in \[tensors\] matches no tensor"):
        checked(Ward, run_file(tensors={"private": ("head.*",)}))


def test_a_client_with_base_tensors_fails_in_the_rounds_of_a_run_for_another_base() -> None:
    found = checked(Frozen, run_file(base_sha256="ab" * 32))
    assert found.verdict_of("rounds") == "wrong"
    assert any("base_sha256" in one.found for one in found.wrong)


def test_a_client_object_that_cannot_be_copied_needs_a_function_that_makes_it() -> None:
    client = Ward()
    client.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(AppError, match=r"the client cannot be copied .* name a function that makes a new one"):
        checked(client)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="steps must be at least 4, not 3"):
        check_client(Ward, steps=3)
