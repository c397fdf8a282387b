"""Several addresses for one coordinator: a client goes on with the next, and stays who it is."""

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from torch import nn

from tests.client.doubles.double import TOKEN, Double, kind_of, problem
from umbel.client import Client, LocalPlan, Operator, RunEnd, TrainResult, run_client
from umbel.client.errors import CoordinatorBusy, CoordinatorUnreachable, StateError
from umbel.client.wire.addresses import ADDRESSES_MAX, addresses_in
from umbel.client.wire.transport import Patience, patiently

A, B, C = (f"https://{name}.test" for name in "abc")


class Idle(Client):
    def __init__(self) -> None:
        self.model, self.sample_count = nn.Linear(3, 2), 5

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return TrainResult(5, 1, 1)


class Deployment:
    """Replicas of one coordinator by address; what is down fails in its own way."""

    def __init__(self, rounds: int = 1) -> None:
        self.double = Double(Idle().model, rounds)
        self.down: dict[str, Callable[[httpx.Request], httpx.Response]] = {}
        self.asked: Counter[str] = Counter()

    def handle(self, request: httpx.Request) -> httpx.Response:
        address = f"https://{request.url.host}"
        self.asked[address] += 1
        return self.down.get(address, self.double.handle)(request)

    def take_part(self, state: Path, *addresses: str, token: str | None = TOKEN) -> RunEnd:
        transport = httpx.MockTransport(self.handle)
        return run_client(Idle(), ",".join(addresses), state, "demo", token, "ward-7", transport=transport)


def unreachable(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused", request=request)


def broken(_request: httpx.Request) -> httpx.Response:
    return problem(503, "shutting-down", {"Retry-After": "3600"})


@pytest.mark.parametrize("fault", [unreachable, broken])
def test_a_replica_that_is_down_is_left_for_the_next_without_waiting(
    tmp_path: Path, fault: Callable[[httpx.Request], httpx.Response]
) -> None:
    for alive in (A, B, C):
        deployment = Deployment(rounds=2)
        deployment.down = dict.fromkeys({A, B, C} - {alive}, fault)
        assert deployment.take_part(tmp_path / alive[8], A, B, C).accepted == 2
        assert all(deployment.asked[address] <= 1 for address in deployment.down)  # and it stays where it is answered


def test_a_replica_that_dies_in_mid_round_costs_nothing(tmp_path: Path) -> None:
    deployment, seen = Deployment(rounds=3), Counter[str]()

    def dies_with(address: str) -> Callable[[httpx.Request], httpx.Response]:
        def handle(request: httpx.Request) -> httpx.Response:
            seen[kind_of(request)] += 1
            answer = deployment.double.handle(request)  # carried out, and its answer lost
            if seen[kind_of(request)] == 2:
                deployment.down = {address: unreachable}
                raise httpx.ReadError("the replica was killed", request=request)
            return answer

        return handle

    deployment.down = {A: dies_with(A), B: dies_with(B)}
    assert deployment.take_part(tmp_path, A, B).accepted == 3
    assert len(deployment.double.updates) == 3


def test_a_client_is_one_client_at_every_address(tmp_path: Path) -> None:
    deployment = Deployment()
    deployment.take_part(tmp_path, A, B)
    for addresses in [(B, A), (C, A), (A,)]:  # they may change places, come and go
        deployment.take_part(tmp_path, *addresses, token=None)
    assert deployment.double.requests["POST enrolments"] == 1
    assert len(list(tmp_path.glob("*/key.pem"))) == 1
    with pytest.raises(StateError, match=rf"name both: --server {A},{B}\. "):
        deployment.take_part(tmp_path, B, C, token=None)


def test_an_operator_asks_at_each_address_once() -> None:
    deployment = Deployment()
    deployment.down = {A: unreachable, B: unreachable, C: broken}
    with (
        Operator(f"{A},{B},{C}", "key", httpx.MockTransport(deployment.handle)) as operator,
        pytest.raises((CoordinatorUnreachable, CoordinatorBusy)),
    ):
        operator.runs()
    assert deployment.asked == {A: 1, B: 1, C: 1}


def test_what_is_no_list_of_addresses_is_refused() -> None:
    assert addresses_in(f"{A}, {B},{A}") == (A, B)
    for text in ("", f"{A},", f"{A},b.test", f"{A}/v1", "https://me:secret@a.test", "ftp://a.test"):
        with pytest.raises(ValueError, match="must"):
            addresses_in(text)
    with pytest.raises(ValueError, match="65 addresses are given for the coordinator; the limit is 64"):
        addresses_in(",".join(f"https://{i}.test" for i in range(ADDRESSES_MAX + 1)))


def test_every_address_is_looked_at_for_what_others_can_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    Deployment().take_part(tmp_path / "secure", A, "http://127.0.0.1:1")
    assert "not encrypted" not in caplog.text
    Deployment().take_part(tmp_path / "open", A, "http://b.test")
    assert "not encrypted" in caplog.text


def test_addresses_that_all_fail_are_told_of_once_not_at_each_try(caplog: pytest.LogCaptureFixture) -> None:
    failures = [CoordinatorUnreachable("no answer", has_other=number % 2 == 0) for number in range(18)]

    def step() -> str:
        if failures:
            raise failures.pop(0)
        return "found"

    caplog.set_level(logging.INFO, logger="umbel.client")
    assert patiently(step, Patience(wait=lambda _seconds: None)) == "found"
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records] == [
        "trying the coordinator's next address",
        "trying again (try 2)",
        "the coordinator answers again, at try 10",
    ]
