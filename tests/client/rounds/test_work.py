"""From a model to a weight change, or to measurements: the answers of the site's own code are checked."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.client.training.test_probe import offer
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.plans.round import Task
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.reports import EvaluationDone
from umbel.client import Client, Evaluation, LocalPlan, TorchClient, TrainResult
from umbel.client.errors import TrainingFailed, WorkRefused
from umbel.client.rounds.site_code import Trained, asked_of_site, train
from umbel.client.rounds.work import measure, weight_changes, weight_to_multiply_by, with_fair_metrics, work_done
from umbel.client.state.model_files import load_model
from umbel.client.training.shared_state import SharedState
from umbel.client.wire.timing import Bandwidth


def test_whoever_stops_reading_a_weight_change_can_train_again(tmp_path: Path) -> None:
    """An update is refused at its first value that is no number; the rest of it is never read."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    start = tmp_path / "model.safetensors"
    start.write_bytes(encode_model(model.state_dict()))
    data = TensorDataset(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64))
    app = TorchClient(model, nn.CrossEntropyLoss(), data, device="cpu")
    done = Trained(TrainResult(2, 1, 1), None, 0.0, 0.0)
    changes = weight_changes(SharedState(app), start, TrainingPlan(), done)
    change = next(changes)
    assert torch.is_grad_enabled()
    assert not change.requires_grad


def test_what_a_client_writes_into_its_options_reaches_no_other_client() -> None:
    """In a simulation all clients have the plan of one run file; in production each parses its own."""
    terms = TrainingPlan(local_epochs=None, local_steps=1, batch_size=1, learning_rate=0.1, options={"stage": "head"})
    first = asked_of_site(terms, 1)
    cast(dict[str, object], first.options)["stage"] = "all"
    assert asked_of_site(terms, 2).options == {"stage": "head"}


class Measuring(Client):
    """Measures the sum of its weights. `says`: in the place of that."""

    def __init__(self, n_samples: int = 7, says: Any = ...) -> None:
        self.model = nn.Linear(3, 1)
        self.sample_count = 5
        self._n_samples, self._says = n_samples, says

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        raise AssertionError("it is measured alone")

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        if isinstance(self._says, Exception):
            raise self._says
        total = sum(float(values.sum()) for values in model.state_dict().values())
        found = Evaluation(self._n_samples, {"sum": total, "odd": float("nan")})
        return found if self._says is ... else self._says


def measured(
    tmp_path: Path, app: Client, sample_count_max: int = 7, shared: SharedState | None = None
) -> EvaluationDone | None:
    state = {"weight": torch.full((1, 3), 0.5), "bias": torch.ones(1)}
    start = tmp_path / "model.safetensors"
    start.write_bytes(encode_model(state))
    return measure(app, shared or SharedState(app), start, replace(offer(), sample_count_max=sample_count_max))


def test_the_weights_that_came_are_measured_and_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    done = measured(tmp_path, Measuring())
    assert done is not None
    assert (done.sample_count, done.evaluation) == (7, {"sum": 2.5})
    assert 0 <= done.evaluate_s < 60


def test_a_metric_that_no_report_can_have_is_logged_once_with_its_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measured(tmp_path, Measuring(says=Evaluation(7, {"odd": math.nan, "fine": 0.5, "vast": -math.inf, "large": 1e31})))
    (said,) = caplog.messages
    assert said.startswith("round 1 canary: evaluate returned large = 1e+31, odd = nan, vast = -inf. The report")


@pytest.mark.parametrize("says", [None, Evaluation(7, {})])
def test_who_has_nothing_to_say_says_nothing(tmp_path: Path, says: Evaluation | None) -> None:
    assert measured(tmp_path, Measuring(says=says)) is None


def test_counts_alone_are_worth_a_report(tmp_path: Path) -> None:
    done = measured(tmp_path, Measuring(says=Evaluation(7, {}, {"confusion": [1, 2, 3, 1]})))
    assert done is not None
    assert (done.evaluation, done.evaluation_counts) == ({}, {"confusion": (1, 2, 3, 1)})


def test_no_more_samples_are_told_than_the_run_takes(tmp_path: Path) -> None:
    with pytest.raises(WorkRefused, match="a sample_count of 8, but the run accepts at most 7"):
        measured(tmp_path, Measuring(8))


@pytest.mark.parametrize("says", [RuntimeError("patient 4711"), 0.5, {"accuracy": 0.5}])
def test_the_coordinator_is_told_only_the_type_of_an_error_and_the_site_the_whole_error(
    tmp_path: Path, says: object
) -> None:
    with pytest.raises(TrainingFailed, match=r"with (RuntimeError: patient 4711|TypeError: evaluate must) ") as failure:
        measured(tmp_path, Measuring(says=says))
    public = failure.value.public_reason
    assert re.fullmatch(r"the client's own code failed with (RuntimeError|TypeError); see the client's log", public)
    assert re.search(r" \((test_work|site_code).py, line \d+\)$", str(failure.value))


def test_a_model_of_another_shape_is_a_failure_of_the_sites_code(tmp_path: Path) -> None:
    app = Measuring()
    shared = SharedState(app)
    app.model = nn.Linear(4, 1)
    with pytest.raises(TrainingFailed, match="run's weights do not fit the client's own model"):
        measured(tmp_path, app, shared=shared)


# --- q-FedAvg ---------------------------------------------------------------------------------------------------------

FAIR = TrainingPlan(local_epochs=1, learning_rate=0.1, algorithm="qfedavg", q=2.0, loss_max=4.0)


PAIRS = TensorDataset(torch.linspace(-1, 1, 900).view(300, 3), torch.arange(300) % 2)


def classifier() -> TorchClient:
    return TorchClient(nn.Linear(3, 2), "classes", PAIRS, device="cpu")


def test_under_qfedavg_a_client_reports_its_loss_and_norm_and_sends_its_change_times_the_weight(tmp_path: Path) -> None:
    app, given = classifier(), replace(offer(FAIR, share=1.0), task=Task.TRAINING, sample_count_max=300)
    start = tmp_path / "model.safetensors"
    start.write_bytes(encode_model(app.model.state_dict()))
    with torch.no_grad():
        inputs, targets = PAIRS.tensors
        loss = float(nn.functional.cross_entropy(app.model(inputs), targets))
    shared = SharedState(app)
    done = train(app, shared, start, asked_of_site(FAIR, 7))
    plain = torch.cat([one.clone() for one in weight_changes(shared, start, TrainingPlan(), done)])
    fair = with_fair_metrics(shared, lambda: load_model(start, shared.layout), given, done)
    weight = weight_to_multiply_by(given.training, fair)
    assert weight is not None
    work = work_done(app, fair, "0" * 64, given, Bandwidth())
    assert work.metrics["start_loss"] == pytest.approx(loss, rel=1e-6)
    assert work.metrics["change_norm"] == pytest.approx(float(plain.double().norm()), rel=1e-12)
    assert weight == pytest.approx((loss / 4.0) ** 2, rel=1e-6)
    sent = torch.cat([one.clone() for one in weight_changes(shared, start, given.training, fair)])
    assert torch.equal(sent, (plain.double() * weight).float())
    assert float(plain.abs().max()) > 0


@pytest.mark.parametrize(
    ("says", "reason"), [(None, "does not say it"), (-0.1, "not negative"), (float("nan"), "finite")]
)
def test_a_client_that_cannot_say_its_loss_declines_a_run_that_weighs_by_it(
    tmp_path: Path, says: float | None, reason: str
) -> None:
    class Saying(Measuring):
        def training_loss(self, model: nn.Module) -> float | None:
            return says

    app, start = Saying(), tmp_path / "model.safetensors"
    start.write_bytes(encode_model(app.model.state_dict()))
    with pytest.raises(WorkRefused, match=reason):
        train(app, SharedState(app), start, asked_of_site(FAIR, 7))
