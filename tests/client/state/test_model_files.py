"""A client that has one of the last models fetches changes; whatever is wrong with them, it has the right model."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn

from tests.client.doubles.changing_double import ChangingDouble
from tests.client.doubles.double import TOKEN, URL, Handler, problem
from umbel.aggregation.model.artifact import encode_model
from umbel.client import Client, LocalPlan, RunEnd, TrainResult, run_client
from umbel.client.errors import CoordinatorMisbehaved
from umbel.client.state.model_files import MappedModel

WIDTH = 3000


class Crash(BaseException):
    """Stands for kill -9: nothing in the client may catch it."""


class Wanders(Client):
    """Adds something else to every weight; notes what it began with. `dies`: killed when its training begins."""

    def __init__(self, dies: bool = False) -> None:
        self.dies = dies
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Linear(3, 3).bfloat16())
        self.sample_count = 5
        self.starts: list[str] = []

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        if self.dies:
            raise Crash
        self.starts.append(hashlib.sha256(encode_model(model.state_dict())).hexdigest())
        rng = torch.Generator().manual_seed(plan.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=rng) / 64)
            for name, value in model.named_buffers():
                if name.endswith("tracked"):
                    value.add_(3)
        return TrainResult(self.sample_count, 1, 1)


def take_part(
    tmp_path: Path,
    double: ChangingDouble,
    app: Client | None = None,
    wrap: Callable[[Handler], Handler] = lambda handler: handler,
) -> RunEnd:
    transport = double.transport(wrap)
    return run_client(app or Wanders(), URL, tmp_path, "demo", TOKEN, "ward-7", transport=transport)


def here(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("*/models/*"))


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one for one in caplog.messages if one.startswith("cannot use the changes since the last model")]


def test_after_the_first_model_only_changes_are_fetched(tmp_path: Path) -> None:
    double, app = ChangingDouble(Wanders().model, rounds=4), Wanders()
    first = hashlib.sha256(double.model_bytes).hexdigest()
    assert take_part(tmp_path, double, app).accepted == 4
    names = [one["sha256"] for one in double.chain]
    assert double.sent == [(first, 0), *((name, 0) for name in names[:3])]
    assert app.starts == [first, *(one["from_sha256"] for one in double.chain[1:])]
    assert here(tmp_path) == [f"{app.starts[-1]}.safetensors"]
    assert max(one["size_bytes"] for one in double.chain) < len(double.model_bytes) / 4


def random_change(double: ChangingDouble, seed: int) -> torch.Tensor:
    return torch.randn(double.layout.n_values, generator=torch.Generator().manual_seed(seed)) / 64


def test_a_client_that_missed_two_rounds_fetches_three_changes(tmp_path: Path) -> None:
    double, app = ChangingDouble(Wanders().model, rounds=5), Wanders()
    with pytest.raises(Crash):
        take_part(tmp_path, double, Wanders(dies=True))
    for seed in range(3):
        double.advance(random_change(double, seed))
    assert take_part(tmp_path, double, app).accepted == 2
    assert [name for name, _ in double.sent][1:] == [one["sha256"] for one in double.chain[:4]]
    assert app.starts == [one["from_sha256"] for one in double.chain[3:5]]


def test_one_whose_model_is_too_old_fetches_it_whole(tmp_path: Path) -> None:
    double = ChangingDouble(Wanders().model, rounds=11)
    with pytest.raises(Crash):
        take_part(tmp_path, double, Wanders(dies=True))
    for seed in range(9):
        double.advance(random_change(double, seed))
    whole = hashlib.sha256(double.model_bytes).hexdigest()
    take_part(tmp_path, double)
    assert double.sent[1] == (whole, 0)


def killed_after(n_bytes: int, name: str) -> Callable[[Handler], Handler]:
    """The client dies when so many bytes of a file have come."""

    def wrap(handle: Handler) -> Handler:
        def killed(request: httpx.Request) -> httpx.Response:
            response = handle(request)
            if not request.url.path.endswith(name):
                return response

            def some() -> Iterator[bytes]:
                yield response.read()[:n_bytes]
                raise Crash

            return httpx.Response(response.status_code, content=some())

        return killed

    return wrap


def test_a_client_killed_while_it_fetches_a_change_goes_on(tmp_path: Path) -> None:
    double = ChangingDouble(Wanders().model, rounds=3)
    with pytest.raises(Crash):
        take_part(tmp_path, double, Wanders(dies=True))
    double.advance(random_change(double, 1))
    [change] = double.chain
    with pytest.raises(Crash):
        take_part(tmp_path, double, wrap=killed_after(500, change["sha256"]))
    base = f"{change['from_sha256']}.safetensors"
    assert here(tmp_path) == sorted([base, f"{change['sha256']}.part"])
    app = Wanders()
    assert take_part(tmp_path, double, app).accepted == 2
    assert double.sent[1:3] == [(change["sha256"], 0), (change["sha256"], 500)]
    assert app.starts[0] == double.chain[1]["from_sha256"]


def test_a_change_that_was_fetched_serves_the_next_round_too(tmp_path: Path) -> None:
    """Killed between its changes and its training, and back a round later."""
    double = ChangingDouble(Wanders().model, rounds=4)
    with pytest.raises(Crash):
        take_part(tmp_path, double, Wanders(dies=True))
    double.advance(random_change(double, 1))
    double.advance(random_change(double, 2))
    [first, second] = double.chain
    with pytest.raises(Crash):
        take_part(tmp_path, double, wrap=killed_after(100, second["sha256"]))
    double.advance(random_change(double, 3))
    assert take_part(tmp_path, double).accepted == 1
    assert [name for name, _ in double.sent].count(first["sha256"]) == 1
    assert (second["sha256"], 100) in double.sent


Spoil = Callable[[ChangingDouble], None]


def flipped(double: ChangingDouble) -> None:
    """The file is not the one that was announced."""
    name = double.chain[-1]["sha256"]
    double.files[name] = double.files[name][:-1] + b"\xff"


def longer(double: ChangingDouble) -> None:
    double.files[double.chain[-1]["sha256"]] += b"\x00"


def gone(double: ChangingDouble) -> None:
    del double.files[double.chain[-1]["sha256"]]


def garbage(double: ChangingDouble) -> None:
    """The file is as announced, and no change."""
    double.offer(double.chain.pop()["from_sha256"], b"UMBL" + bytes(200))


def another(double: ChangingDouble) -> None:
    """A good change, which makes another model."""
    whole, model, master = double.chain.pop(), double.model_bytes, double.master
    double.model_bytes = double.files[whole["from_sha256"]]
    double.advance(random_change(double, 99))
    double.model_bytes, double.master, double.round = model, master, double.round - 1


@pytest.mark.parametrize("spoil", [flipped, longer, gone, garbage, another])
def test_a_change_that_is_wrong_costs_a_whole_model_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Spoil
) -> None:
    double = ChangingDouble(Wanders().model, rounds=3)
    with pytest.raises(Crash):
        take_part(tmp_path, double, Wanders(dies=True))
    double.advance(random_change(double, 1))
    spoil(double)
    whole, app = hashlib.sha256(double.model_bytes).hexdigest(), Wanders()
    assert take_part(tmp_path, double, app).accepted == 2
    assert len(warned(caplog)) == 1
    assert app.starts[0] == whole
    assert (whole, 0) in double.sent
    assert len(here(tmp_path)) == 1
    assert double.declined == {}


def test_a_base_that_is_damaged_on_disk_is_no_base(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = ChangingDouble(Wanders().model, rounds=2)
    with pytest.raises(Crash):
        take_part(tmp_path, double, Wanders(dies=True))
    [base] = tmp_path.glob("*/models/*")
    base.write_bytes(base.read_bytes()[:-1] + b"\x55")
    double.advance(random_change(double, 1))
    whole = hashlib.sha256(double.model_bytes).hexdigest()
    assert take_part(tmp_path, double).accepted == 1
    assert double.sent[1:] == [(whole, 0)]
    assert warned(caplog) == []


def test_a_coordinator_that_does_not_answer_for_a_moment_is_asked_for_the_change_again(tmp_path: Path) -> None:
    double, n = ChangingDouble(Wanders().model, rounds=2), [0]

    def wrap(handle: Handler) -> Handler:
        def busy(request: httpx.Request) -> httpx.Response:
            if double.chain and request.url.path.endswith(double.chain[0]["sha256"]):
                n[0] += 1
                if n[0] <= 2:
                    return problem(503, "storage-unavailable")
            return handle(request)

        return busy

    assert take_part(tmp_path, double, wrap=wrap).accepted == 2
    assert [name for name, _ in double.sent][1:] == [double.chain[0]["sha256"]]


@pytest.mark.parametrize(
    "changes",
    [
        [{"from_sha256": "a" * 64, "sha256": "../../etc/passwd", "size_bytes": 10}],
        [{"from_sha256": "../x", "sha256": "a" * 64, "size_bytes": 10}],
        [{"from_sha256": "a" * 64, "sha256": "b" * 64, "size_bytes": 0}],
        [{"from_sha256": "a" * 64, "sha256": "b" * 64, "size_bytes": 1 << 50}],
        [{"from_sha256": "a" * 64, "sha256": "b" * 64, "size_bytes": 10}] * 9,
    ],
)
def test_an_assignment_with_impossible_changes_is_refused(tmp_path: Path, changes: list[dict[str, object]]) -> None:
    double = ChangingDouble(Wanders().model)
    double.chain, double.n_offered = changes, 9
    with pytest.raises(CoordinatorMisbehaved, match="change"):
        take_part(tmp_path, double)
    assert double.sent == []


def test_a_model_is_read_and_written_in_place(tmp_path: Path) -> None:
    state = {"a": torch.arange(10.0), "b": torch.tensor([True, False]), "c": torch.arange(5, dtype=torch.int16)}
    path = tmp_path / "model"
    path.write_bytes(encode_model(state))
    model = MappedModel(path)
    assert model.read("a", torch.float32, 3, 4).tolist() == [3, 4, 5, 6]
    model.write("a", 8, torch.tensor([-1.0, -2.0]))
    model.write("b", 1, torch.tensor([True]))
    model.write("c", 0, torch.tensor([9], dtype=torch.int16))
    state["a"][8:], state["b"][1], state["c"][0] = torch.tensor([-1.0, -2.0]), True, 9
    assert path.read_bytes() == encode_model(state)


def test_a_run_without_changes_says_nothing_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "umbel.client")
    double = ChangingDouble(Wanders().model, rounds=2)
    double.offer = lambda before, change: None  # type: ignore[method-assign]
    assert take_part(tmp_path, double).accepted == 2
    assert not [one for one in caplog.messages if "change" in one]
