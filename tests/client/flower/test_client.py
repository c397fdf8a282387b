"""A Flower app as a client: what it is told, what becomes of its answers, and what it cannot do."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from umbel.client.errors import TooLittleDone, TrainingFailed, WorkRefused
from umbel.client.flower.calls import AppFailed, AppReply, AppStopped, Call, CallKind, StopQuestion
from umbel.client.flower.client import FlowerClient
from umbel.client.local.arrays import Array, ArrayModel
from umbel.client.local.plan import LocalPlan

WEIGHTS: dict[str, Array] = {"w": np.zeros((2, 2), dtype=np.float32)}
PLAN = LocalPlan(epochs=2, batch_size=4, learning_rate=0.5, run="r", round=3, client="c", options={"depth": 2})


@dataclass
class Caller:
    """Adds one to every array, and counts its calls in the state."""

    calls: list[Call] = field(default_factory=list[Call])
    count: int = 9
    error: Exception | None = None
    metrics: dict[str, Any] = field(default_factory=lambda: {"loss": 0.5})

    def call(self, call: Call, should_stop: StopQuestion) -> AppReply:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        if (reason := should_stop()) is not None:
            raise AppStopped(reason)
        arrays = {name: one + 1 for name, one in call.arrays.items()} if call.kind == "train" else {}
        return AppReply(self.count, self.metrics, arrays, call.state + b"x")

    def close(self) -> None: ...


def client_of(caller: Caller, *kinds: CallKind, sample_count: int | None = None) -> FlowerClient:
    return FlowerClient(caller, kinds or ("train", "evaluate"), ArrayModel(WEIGHTS), sample_count)


def test_a_training_is_one_call_with_the_plan_in_its_config() -> None:
    caller = Caller()
    client, plan = client_of(caller), replace(PLAN, proximal_mu=0.1)
    result = client.train(client.model, plan)
    [call] = caller.calls
    assert (call.kind, call.run, call.client, call.round) == ("train", "r", "c", 3)
    assert call.config == {"server-round": 3, "lr": 0.5, "proximal-mu": 0.1, "depth": 2}
    assert (result.sample_count, result.steps_done, result.steps_planned) == (9, 6, 6), "two epochs of three batches"
    assert result.metrics == {"loss": 0.5}
    assert torch.equal(client.model.state_dict()["w"], torch.ones(2, 2))
    assert plan.ignored == (), "the app adds FedProx's term, as with Flower's strategy"


def test_the_mu_of_fedprox_is_in_the_config_also_where_it_has_adapted_to_zero() -> None:
    caller = Caller()
    client = client_of(caller)
    client.train(client.model, replace(PLAN, algorithm="fedprox", proximal_mu=0.0))
    client.train(client.model, PLAN)
    assert [call.config.get("proximal-mu") for call in caller.calls] == [0.0, None]


def test_the_runs_options_come_before_what_is_sent_otherwise() -> None:
    caller = Caller()
    client = client_of(caller)
    client.train(client.model, replace(PLAN, options={"lr": 0.01}))
    assert caller.calls[0].config["lr"] == 0.01


def test_the_state_of_the_context_is_kept_beside_the_update() -> None:
    caller = Caller()
    client, state = client_of(caller), dict[str, Any]()
    for _ in range(2):
        client.train(client.model, replace(PLAN, state=state))
    client.prepare(replace(PLAN, state=state))
    client.evaluate(client.model)
    assert [call.state for call in caller.calls] == [b"", b"x", b"xx"]
    assert bytes(state["flower.context.state"]) == b"xx", "a measurement keeps no change"


def test_an_app_without_evaluate_measures_nothing() -> None:
    caller = Caller()
    assert client_of(caller, "train").evaluate(client_of(caller).model) is None
    assert caller.calls == []
    assert client_of(Caller(count=0)).evaluate(client_of(caller).model) is None, "a legacy client says it so"


def test_the_sample_count_is_given_or_asked_by_a_query_or_learned_by_a_training() -> None:
    assert client_of(Caller(), sample_count=4).sample_count == 4
    asked = Caller(count=7)
    assert client_of(asked, "train", "query").sample_count == 7
    assert [call.kind for call in asked.calls] == ["query"]
    learned = Caller(count=8)
    client = client_of(learned)
    assert (client.sample_count, client.sample_count) == (8, 8)
    assert [call.kind for call in learned.calls] == ["train"]
    assert torch.equal(client.model.state_dict()["w"], torch.zeros(2, 2)), "that training is thrown away"
    with pytest.raises(WorkRefused, match="no samples"):
        _ = client_of(Caller(count=0)).sample_count


def test_metrics_that_are_lists_stay_here_and_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(Caller(metrics={"loss": 1, "of each": [1.0, 2.0]}))
    for _ in range(2):
        assert client.train(client.model, replace(PLAN, state={})).metrics == {"loss": 1.0}
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["of each"]


def test_an_app_that_must_stop_leaves_the_round_without_a_reason() -> None:
    client = client_of(Caller())
    with pytest.raises(TooLittleDone, match="the ward closes, and a Flower app cannot stop early") as stopped:
        client.train(client.model, replace(PLAN, told_to_stop=lambda: "the ward closes"))
    assert "the ward closes" not in stopped.value.public_reason


def test_an_error_of_the_app_is_a_failed_training() -> None:
    client = client_of(Caller(error=AppFailed("ValueError: patient 7", "it failed with ValueError")))
    with pytest.raises(TrainingFailed, match="patient 7") as failed:
        client.train(client.model, PLAN)
    assert failed.value.public_reason == "it failed with ValueError"


def test_what_nobody_can_do_inside_an_app_is_refused_before_it_trains() -> None:
    caller = Caller()
    client = client_of(caller)
    with pytest.raises(WorkRefused, match="clip_norm"):
        client.train(client.model, replace(PLAN, clip_norm=1.0))
    with pytest.raises(WorkRefused, match=r"its training data \(q-FedAvg\)"):
        client.train(client.model, replace(PLAN, algorithm="qfedavg"))
    with pytest.raises(WorkRefused, match="structured codec"):
        client.train(client.model, replace(PLAN, within={"w": lambda one: one}))
    assert caller.calls == []
