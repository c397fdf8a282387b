"""A ClientApp gets the messages that Flower would send, and its replies are read as Flower's strategies read them."""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from umbel.client.flower.calls import AppFailed, Call
from umbel.client.flower.host import AppHost
from umbel.client.flower.project import ConfigValue
from umbel.client.local.arrays import Array

WEIGHTS: dict[str, Array] = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3, dtype=np.int64)}


def host_of(app: ClientApp, **node_config: Any) -> AppHost:
    return AppHost(app, {"epochs": 2}, node_config)


def reply(message: Message, metrics: dict[str, Any], *, arrays: bool = True) -> Message:
    content = RecordDict({"metrics": MetricRecord(metrics)})
    if arrays:
        content["arrays"] = message.content["arrays"]
    return Message(content=content, reply_to=message)


def test_an_app_is_trained_with_what_flower_would_send() -> None:
    app, seen = ClientApp(), list[Any]()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append((message, context))
        (weights, n) = message.content["arrays"].to_numpy_ndarrays()
        content = RecordDict(
            {
                "whatever": ArrayRecord({"w": _array(weights + 1), "n": _array(n)}),
                "told": MetricRecord({"num-examples": 7, "loss": 0.5, "of each": [1.0, 2.0]}),
            }
        )
        return Message(content=content, reply_to=message)

    config: dict[str, ConfigValue] = {"lr": 0.1, "server-round": 4, "note": "x", "deep": True}
    answer = host_of(app, **{"partition-id": 2}).answer(Call("train", config, WEIGHTS, run="r", client="c", round=4))
    assert answer.sample_count == 7
    assert answer.metrics == {"loss": 0.5, "of each": [1.0, 2.0]}
    assert np.array_equal(answer.arrays["w"], WEIGHTS["w"] + 1)
    assert answer.arrays["n"].shape == ()
    [(message, context)] = seen
    assert message.metadata.message_type == "train"
    assert message.metadata.group_id == "4"
    assert dict(message.content["config"]) == config
    assert context.run_config == {"epochs": 2}
    assert context.node_config == {"partition-id": 2}
    assert message.metadata.dst_node_id == context.node_id
    assert message.metadata.run_id == context.run_id


def test_an_app_evaluates_and_answers_queries() -> None:
    app = ClientApp()

    @app.evaluate()
    def evaluate(message: Message, _context: Context) -> Message:
        return reply(message, {"num-examples": 3, "accuracy": 0.5}, arrays=False)

    @app.query()
    def query(message: Message, _context: Context) -> Message:
        assert "arrays" not in message.content
        return reply(message, {"num-examples": 12}, arrays=False)

    host = host_of(app)
    assert host.kinds == ["evaluate", "query"]
    found = host.answer(Call("evaluate", {}, WEIGHTS))
    assert (found.sample_count, dict(found.metrics)) == (3, {"accuracy": 0.5})
    assert host.answer(Call("query", {})).sample_count == 12


def test_the_state_of_the_context_comes_back_with_the_next_call() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        before = int(context.state["memory"]["rounds"]) if "memory" in context.state else 0
        context.state["memory"] = ConfigRecord({"rounds": before + 1})
        context.state["arrays"] = message.content["arrays"]
        return reply(message, {"num-examples": 1, "rounds": before + 1})

    first = host_of(app).answer(Call("train", {}, WEIGHTS))
    second = host_of(app).answer(Call("train", {}, WEIGHTS, first.state))  # another process, as after a restart
    assert (first.metrics["rounds"], second.metrics["rounds"]) == (1, 2)


def test_mods_and_the_lifespan_run_around_each_call_on_a_content_of_its_own() -> None:
    told = list[str]()

    def doubling(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        message.content["config"]["lr"] = 2 * float(message.content["config"]["lr"])
        told.append("mod")
        return call_next(message, context)

    app = ClientApp(mods=[])

    @app.lifespan()
    def lifespan(_context: Context) -> Generator[None, None, None]:
        told.append("enter")
        yield
        told.append("exit")

    @app.train(mods=[doubling])
    def train(message: Message, _context: Context) -> Message:
        return reply(message, {"num-examples": 1, "lr": float(message.content["config"]["lr"])})

    host, call = host_of(app), Call("train", {"lr": 1.0}, WEIGHTS)
    assert [host.answer(call).metrics["lr"] for _ in range(2)] == [2.0, 2.0]
    assert told == ["enter", "mod", "exit"] * 2


class Legacy(NumPyClient):  # type: ignore[misc]
    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        return [one + config["lr"] for one in parameters], 5, {"loss": 1.5, "note": "a text"}

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        return float(parameters[0].sum()), 2, {"accuracy": 0.25}


def test_a_client_fn_of_numpy_is_called_through_flowers_own_bridge() -> None:
    host = host_of(ClientApp(client_fn=lambda context: Legacy().to_client()))
    named = {"layer.w": WEIGHTS["w"], "layer.b": np.zeros(2, dtype=np.float32)}
    trained = host.answer(Call("train", {"lr": 1.0}, named))
    assert [*trained.arrays] == ["layer.w", "layer.b"], "by the model's own names"
    assert np.array_equal(trained.arrays["layer.b"], np.ones(2))
    assert (trained.sample_count, dict(trained.metrics)) == (5, {"loss": 1.5})
    measured = host.answer(Call("evaluate", {}, named))
    assert (measured.sample_count, dict(measured.metrics)) == (2, {"loss": 15.0, "accuracy": 0.25})


def test_a_numpy_client_without_evaluate_measures_nothing() -> None:
    class Trains(NumPyClient):  # type: ignore[misc]
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
            return parameters, 1, {}

    host = host_of(ClientApp(client_fn=lambda context: Trains().to_client()))
    assert host.answer(Call("evaluate", {}, WEIGHTS)).sample_count == 0


@pytest.mark.parametrize(
    ("reply_with", "words"),
    [
        (lambda m: Message(RecordDict({"m": MetricRecord({"num-examples": 1})}), reply_to=m), "0 ArrayRecords"),
        (lambda m: Message(RecordDict({"a": m.content["arrays"]}), reply_to=m), "0 MetricRecords"),
        (lambda m: reply(m, {"loss": 1.0}), "'num-examples'"),
        (lambda m: reply(m, {"num-examples": 1.5}), "'num-examples'"),
        (lambda m: Message(Error(2, "no data"), reply_to=m), "no data"),
        (lambda m: None, "NoneType"),
    ],
)
def test_a_reply_that_cannot_be_used_is_named(reply_with: Callable[[Message], Any], words: str) -> None:
    app = ClientApp()
    app.train()(lambda message, context: reply_with(message))
    with pytest.raises(AppFailed, match=words):
        host_of(app).answer(Call("train", {}, WEIGHTS))


def test_equal_seeds_give_equal_draws_and_the_process_is_left_as_it_was() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, _context: Context) -> Message:
        return reply(message, {"num-examples": 1, "draw": float(np.random.rand())})

    host = host_of(app)
    before = np.random.get_state(legacy=False)["state"]["key"][0]
    draws = [host.answer(Call("train", {}, WEIGHTS, seed=seed)).metrics["draw"] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert np.random.get_state(legacy=False)["state"]["key"][0] == before


def _array(values: Any) -> Any:
    return FlowerArray(np.asarray(values, order="C"))


def test_a_state_that_cannot_be_read_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return reply(message, {"num-examples": 1, "records": len(context.state)})

    for kept in (b"\xff" * 9, b"\x0a\x04\x0a\x02\xff\xff"):
        caplog.clear()
        assert host_of(app).answer(Call("train", {}, WEIGHTS, kept)).metrics == {"records": 0}
        assert "cannot be read" in caplog.text
