"""A site's own training in the client's loop: what its plan tells, what it keeps, and what is not taken silently."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.client.doubles.double import TOKEN, URL, Double
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.aggregation.plans.schedule import RateSchedule
from umbel.aggregation.plans.tensors import TensorKind
from umbel.aggregation.plans.training import TrainingSection
from umbel.client import Client, Evaluation, LocalPlan, RunEnd, TrainResult, run_client
from umbel.client.errors import TrainingFailed
from umbel.client.rounds.site_code import train_from
from umbel.client.training.shared_state import SharedState

Training = Callable[[nn.Module, LocalPlan], None]


class Own(Client):
    """Does this to the model in each round, and notes the plans that it was given."""

    def __init__(self, do: Training = lambda _model, _plan: None) -> None:
        self.model, self.sample_count, self._do = nn.Linear(3, 2), 5, do
        self.plans: list[LocalPlan] = []

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.plans.append(plan)
        self._do(model, plan)
        return TrainResult(self.sample_count, 1, 1)


def take_part(folder: Path, double: Double, app: Client, token: str | None = TOKEN) -> RunEnd:
    return run_client(app, URL, folder, "demo", token, "ward-7", transport=double.transport())


def test_a_plan_tells_round_run_client_options_and_the_rate_of_the_round(tmp_path: Path) -> None:
    training = TrainingSection(
        learning_rate=0.4,
        optimizer="adamw",
        weight_decay=0.1,
        options={"stage": "head", "n": 3},
        schedule=RateSchedule("step", every=1, factor=0.5),
    )
    app = Own()
    take_part(tmp_path, Double(app.model, rounds=3, training=training), app)
    assert [(plan.run, plan.round, plan.client) for plan in app.plans] == [("demo", n, "ward-7") for n in (1, 2, 3)]
    assert [plan.learning_rate for plan in app.plans] == [0.4, 0.2, 0.1]
    assert [dict(plan.options) for plan in app.plans] == [{"stage": "head", "n": 3}] * 3
    optimizer = app.plans[1].make_optimizer(app.model)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.2, 0.1)


def counting(_model: nn.Module, plan: LocalPlan) -> None:
    plan.state["rounds"] = plan.state.get("rounds", 0) + 1
    plan.state.setdefault("moments", torch.zeros(2)).add_(1)


def seen_by(app: Own) -> list[Any]:
    """What each round left in its plan's state."""
    return [(plan.state["rounds"], plan.state["moments"].tolist()) for plan in app.plans]


def test_a_clients_state_survives_rounds_and_restarts(tmp_path: Path) -> None:
    double, first, second = Double(Own().model, rounds=2), Own(counting), Own(counting)
    take_part(tmp_path, double, first)
    double.run_file = Double(first.model, rounds=4).run_file
    take_part(tmp_path, double, second, token=None)
    assert seen_by(first) == [(1, [1.0, 1.0]), (2, [2.0, 2.0])]
    assert seen_by(second) == [(3, [3.0, 3.0]), (4, [4.0, 4.0])]


def test_a_state_of_a_round_that_did_not_count_is_not_kept(tmp_path: Path) -> None:
    double = Double(Own().model, rounds=2)

    def closes_in_training(model: nn.Module, plan: LocalPlan) -> None:
        counting(model, plan)
        if len(app.plans) == 1:
            double.close_round("enough have reported")

    app = Own(closes_in_training)
    take_part(tmp_path, double, app)
    assert seen_by(app) == [(1, [1.0, 1.0])] * 2


def test_a_state_that_cannot_be_stored_fails_the_training_and_says_why(tmp_path: Path) -> None:
    app = Own(lambda _model, plan: plan.state.update(model=Own()))
    double = Double(app.model)
    with pytest.raises(TrainingFailed, match=r"plan\.state cannot be kept: a Own cannot be kept on disk"):
        take_part(tmp_path, double, app)
    assert double.reports == {}


ASKS = [
    (TrainingSection(proximal_mu=0.1), CodecPlan(), "proximal_mu"),
    (TrainingSection(clip_norm=1.0), CodecPlan(), "clip_norm"),
    (TrainingSection(), CodecPlan(Codec.LOWRANK, key=7, parameters={"rank": 1, "mode": "structured"}), "codec"),
]


@pytest.mark.parametrize(("training", "codec", "key"), ASKS)
def test_a_loop_that_ignores_what_the_run_asks_is_declined_with_a_sentence(
    tmp_path: Path, training: TrainingSection, codec: CodecPlan, key: str
) -> None:
    app = Own()
    double = Double(app.model, training=training)
    double.codec = codec
    with pytest.raises(TrainingFailed, match=r"did not apply it: call plan\.adjust_gradients\(model\) after backward"):
        take_part(tmp_path, double, app)
    assert double.reports == {}
    assert any("plan.adjust_gradients(model)" in reason for reason in double.declined.values())


def adjusting(model: nn.Module, plan: LocalPlan) -> None:
    model(torch.ones(1, 3)).sum().backward()
    plan.adjust_gradients(model)


@pytest.mark.parametrize(("training", "codec", "key"), ASKS)
@pytest.mark.parametrize("by_itself", [False, True])
def test_a_loop_that_applies_it_or_says_that_it_does_is_taken(
    tmp_path: Path, training: TrainingSection, codec: CodecPlan, key: str, by_itself: bool
) -> None:
    app = Own((lambda _model, plan: plan.applied_by_site(key)) if by_itself else adjusting)
    double = Double(app.model, training=training)
    double.codec = codec
    assert take_part(tmp_path, double, app).accepted == 1


def test_the_proximal_term_pulls_towards_the_global_model_also_after_the_model_has_moved(tmp_path: Path) -> None:
    gradients = list[Tensor]()

    def moves_first(model: nn.Module, plan: LocalPlan) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(2.0)
        plan.adjust_gradients(model)
        gradients.extend(p.grad for p in model.parameters() if p.grad is not None)

    app = Own(moves_first)
    take_part(tmp_path, Double(app.model, training=TrainingSection(proximal_mu=0.5)), app)
    assert gradients
    assert all(torch.allclose(gradient, torch.ones_like(gradient)) for gradient in gradients)


class Measured(Own):
    """Measures the sum of its weights, on four held-out samples."""

    def evaluate(self, model: nn.Module) -> Evaluation:
        return Evaluation(4, {"size": sum(float(p.detach().sum()) for p in model.parameters())}, {"seen": [4]})


def adding_one(model: nn.Module, _plan: LocalPlan) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


@pytest.mark.parametrize("before", [False, True])
def test_the_global_model_and_the_sites_own_are_both_reported(tmp_path: Path, before: bool) -> None:
    app = Measured(adding_one)
    with torch.no_grad():
        for parameter in app.model.parameters():
            parameter.fill_(1.0)
    double = Double(app.model, training=TrainingSection(evaluate=before, evaluate_after=True))
    take_part(tmp_path, double, app)
    report = double.reports["demo.1.1.ward-7"]
    assert report["evaluation"] == ({"size": 8.0} if before else {}) | {"personal.size": 16.0}
    assert report["evaluation_counts"] == ({"seen": [4]} if before else {}) | {"personal.seen": [4]}
    assert report["evaluation_sample_count"] == 4


def test_without_time_the_sites_own_model_is_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    app = Measured(adding_one)
    plan = LocalPlan(evaluate=True, evaluate_after=True, deadline=0.0, clock=lambda: 1.0)
    shared = SharedState(app)
    done = train_from(app, shared, shared.shared(), plan)
    assert done.evaluation is not None
    assert set(done.evaluation.metrics) == {"size"}
    assert "not measured after its training, because the round's deadline is too near" in caplog.text


def test_nothing_pulls_a_tensor_that_stays_at_the_site(tmp_path: Path) -> None:
    gradients = list[dict[str, Tensor]]()

    class KeepsItsBias(Own):
        def shares(self, name: str) -> TensorKind | None:
            return "private" if name == "bias" else None

    def moves_first(model: nn.Module, plan: LocalPlan) -> None:
        adding_one(model, plan)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        plan.adjust_gradients(model)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    app = KeepsItsBias(moves_first)
    shared = SharedState(app)
    train_from(app, shared, {name: one.clone() for name, one in shared.shared().items()}, LocalPlan(proximal_mu=0.5))
    assert torch.allclose(gradients[0]["weight"], torch.full((2, 3), 0.5))
    assert not gradients[0]["bias"].any()
