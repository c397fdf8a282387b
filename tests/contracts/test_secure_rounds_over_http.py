"""Secure rounds with real clients and a real coordinator: the model is the weighted mean, and nothing else is told."""

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from tests.contracts.house import House
from tests.federations.consortium import first_list, signed
from tests.servers.meter import Meter
from tests.servers.waits import LIMIT_S
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.trust.members import members_bytes
from umbel.client import Client, LocalPlan, RunEnd, SitePolicy, TrainResult, run_client
from umbel.client.errors import AccessRefused
from umbel.client.state.failures import FAILURES_MAX
from umbel.client.state.store import Store

pytestmark = pytest.mark.slow
NAMES: tuple[str, ...] = ("east", "north", "south", "west")
SAMPLES: dict[str, int] = {"east": 2, "north": 3, "south": 5, "west": 7, "eve": 9}
RUN = """
name = "masked"
rounds = {{ count = {count}, target = {target}, minimum = 3, over_selection = 1.0, window_s = {window_s} }}
aggregation = {{ sample_count_max = 1000 }}
codec = {{ name = "integer", step = 0.01, first_norm = 3.0 }}
[secure_aggregation]
members_sha256 = "{members_sha256}"
expected_sample_count = 4
counts = {{ confusion = 4 }}
{extra}
"""


class Ward(Client):
    """Adds its own number to every weight. `more`: metrics beside its loss."""

    def __init__(self, samples: int, more: Mapping[str, float] | None = None) -> None:
        self.model, self.sample_count, self.more = nn.Linear(30, 10), samples, more or {}

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(self.sample_count / 50)
        counts = {"confusion": torch.tensor([[self.sample_count, 1], [0, 2]]), "own": 3}
        metrics = {"loss": float(self.sample_count), **self.more}
        return TrainResult(self.sample_count, 1, 1, metrics, counts=counts)


class Line(httpx.BaseTransport):
    """A way to the coordinator that sees all that goes up. `meter`: counts both ways, as records do."""

    def __init__(self) -> None:
        self._inner = httpx.HTTPTransport()
        self.up: list[bytes] = []
        self.meter = Meter()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.up.append(request.read())
        return self.meter.through(request, self._inner.handle_request(request))

    def close(self) -> None:
        self._inner.close()


class Sites:
    """Four sites whose keys are in a member list, each in a thread. `eve`, who is on none, has a token as well.

    `self.create`: what the operator types, which names the list by its hash alone. `extra`: lines of
    [secure_aggregation]. `more`: metrics of each site, beside its loss.
    """

    def __init__(
        self,
        house: House,
        directory: Path,
        count: int = 2,
        window_s: float = 100.0,
        target: int = 4,
        extra: str = "",
        more: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        self.house, self.directory, self.more = house, directory, more or {}
        self.ends: dict[str, RunEnd] = {}
        self.lines: dict[str, Line] = {}
        self.refusals: dict[str, AccessRefused] = {}
        keys = {name: Store(directory / name, house.url).identity(name).public_key for name in NAMES}
        self.members = signed(replace(first_list(), members=keys), "anna", "bert")
        (directory / "pilot.json").write_bytes(members_bytes(self.members))
        members_sha256 = self.members.list.sha256
        text = RUN.format(count=count, target=target, window_s=window_s, members_sha256=members_sha256, extra=extra)
        start = {name: torch.zeros_like(value) for name, value in nn.Linear(30, 10).state_dict().items()}
        run_file, model = directory / "masked.toml", directory / "init.safetensors"
        run_file.write_text(text)
        model.write_bytes(encode_model(start))
        self.create = ("create", str(run_file), "--model", str(model))
        self.with_list = ("--members", str(directory / "pilot.json"))
        with house.operator() as operator:
            self.tokens = dict(zip((*NAMES, "eve"), operator.create_tokens(len(NAMES) + 1), strict=True))

    def _policy(self) -> SitePolicy:
        return SitePolicy(
            "required",
            self.directory / "pilot.json",
            self.members.list.sha256,
            share_sample_count=False,
            max_parameters=1000,
            cohort_change="warn",  # a slow machine may miss a round, which is another test's matter
        )

    def start(self, *names: str) -> list[threading.Thread]:
        """These; by default, all four."""
        threads = [threading.Thread(target=self._run, args=(name,), daemon=True) for name in names or NAMES]
        for thread in threads:
            thread.start()
        return threads

    def _run(self, name: str) -> None:
        """Eve has no policy: she believes whatever she is told."""
        self.lines[name] = Line()
        try:
            self.ends[name] = run_client(
                Ward(SAMPLES[name], self.more.get(name)),
                self.house.url,
                self.directory / name,
                "masked",
                self.tokens[name],
                name,
                policy=None if name == "eve" else self._policy(),
                transport=self.lines[name],
            )
        except AccessRefused as refusal:
            self.refusals[name] = refusal


def mean_of(names: tuple[str, ...]) -> float:
    weights = [SAMPLES[name] for name in names]
    return sum(weight * weight / 50 for weight in weights) / sum(weights)


def test_four_sites_make_two_secure_rounds(house: House, tmp_path: Path) -> None:
    sites = Sites(house, tmp_path)
    house.told(*sites.create)
    for thread in sites.start():
        thread.join(LIMIT_S)

    assert {name: (end.status, end.accepted) for name, end in sites.ends.items()} == dict.fromkeys(
        NAMES, ("finished", 2)
    )
    model = tmp_path / "model.safetensors"
    house.told("export", "masked", "--out", str(model))
    _, state = decode_model(model.read_bytes())
    assert torch.allclose(state["weight"].double(), torch.tensor(2 * mean_of(NAMES), dtype=torch.float64), atol=0.02)
    for name, line in sites.lines.items():
        said = b"".join(line.up).replace(b" ", b"")
        assert b'"sample_count":0' in said
        assert f'"sample_count":{SAMPLES[name]}'.encode() not in said
        assert b"loss" not in said
        assert b"confusion" not in said
    for record in house.told("show", "masked")["ended"]:
        assert record["counts"] == {"confusion": [sum(SAMPLES[name] for name in NAMES), 4, 0, 8]}
        assert record["metrics"]["confusion.specificity"] == 8 / 12
        assert {str(one["metrics"]) for one in record["clients"]} == {"{}"}


def test_sites_with_different_metrics_have_them_in_the_record_without_a_list(house: House, tmp_path: Path) -> None:
    """Nobody is told who has which: the names are in no byte that goes up."""
    more = {
        "east": {"dice.lung": 0.5, "icu": 2.0},
        "north": {"dice.lung": 0.5},
        "south": {"dice.lung": 0.5, "a name that is far too long for the table of a sum".replace(" ", "_"): 1.0},
    }
    sites = Sites(house, tmp_path, count=1, extra='metrics = "all"', more=more)
    house.told(*sites.create)
    for thread in sites.start():
        thread.join(LIMIT_S)

    [record] = house.told("show", "masked")["ended"]
    assert record["committed"], record["reason"]
    figures = {name: value for name, value in record["metrics"].items() if not name.startswith("confusion.")}
    loss = sum(samples * samples for samples in map(SAMPLES.__getitem__, NAMES)) / sum(map(SAMPLES.__getitem__, NAMES))
    assert figures == {"loss": pytest.approx(loss), "dice.lung": pytest.approx(0.5)}
    assert set(record["not_shown"]) == {"training.icu"}
    for line in sites.lines.values():
        assert not any(name in b"".join(line.up) for name in (b"loss", b"dice.lung", b"icu"))
    house.told("audit", "masked")


@pytest.mark.nightly
def test_a_record_has_the_bytes_that_its_clients_have_seen_go_by(house: House, tmp_path: Path) -> None:
    """Of three sites the shares of all are needed: none of them come when the sum is unmasked already."""
    sites = Sites(house, tmp_path, count=1, target=3)
    house.told(*sites.create)
    for thread in sites.start(*NAMES[1:]):
        thread.join(LIMIT_S)

    [record] = house.told("show", "masked")["ended"]
    assert record["committed"], record["reason"]
    meters = {name: line.meter for name, line in sites.lines.items()}
    counted = {one["client"]: (one["bytes_up"], one["bytes_down"]) for one in record["clients"]}
    assert counted == {name: (meter.up, meter.down) for name, meter in meters.items()}
    assert all(min(meter.messages_up, meter.messages_down) > 0 for meter in meters.values())
    assert (record["bytes_up"], record["bytes_down"]) == tuple(map(sum, zip(*counted.values(), strict=True)))


@pytest.mark.nightly
def test_a_coordinator_that_is_killed_asks_again_and_is_told_the_same(house: House, tmp_path: Path) -> None:
    """Who is back too late is left out of a round; nobody who is in one is told to make it twice."""
    sites = Sites(house, tmp_path, window_s=20.0)
    house.told(*sites.create)
    threads = sites.start()
    for _ in range(3):
        time.sleep(0.4)
        house.restart()
    for thread in threads:
        thread.join(LIMIT_S)

    assert {name: end.status for name, end in sites.ends.items()} == dict.fromkeys(NAMES, "finished")
    with house.operator() as operator:
        ended = operator.progress("masked").ended
    committed = [record for record in ended if record.committed]
    assert [record.round for record in committed] == [1, 2]
    assert all(record.reported >= 3 for record in committed)
    assert sum(end.accepted for end in sites.ends.values()) == sum(record.reported for record in committed)


def test_a_stranger_is_told_at_once_where_the_coordinator_has_the_list(house: House, tmp_path: Path) -> None:
    sites = Sites(house, tmp_path)
    house.told(*sites.create, *sites.with_list)
    for thread in [*sites.start("eve"), *sites.start()]:
        thread.join(LIMIT_S)
    assert sites.refusals["eve"].kind == "not-a-member"
    assert (
        "'eve' is not one of them. Take part in another run; or ask an officer to add its name and key"
        in sites.refusals["eve"].detail
    )
    assert {name: (end.status, end.accepted) for name, end in sites.ends.items()} == dict.fromkeys(
        NAMES, ("finished", 2)
    )


@pytest.mark.nightly
def test_sites_stay_while_a_stranger_is_drawn_and_go_on_once_the_coordinator_has_the_list(
    house: House, tmp_path: Path
) -> None:
    """Each declines more often than a client fails before it leaves; no update is in any of these rounds."""
    sites = Sites(house, tmp_path)
    created = house.umbel(*sites.create)
    assert "careful: without --members FILE the coordinator does not have the member list" in created.stderr
    threads = sites.start("eve", *NAMES[1:])
    stranger = {(name, "the cohort has clients that are not on the member list") for name in NAMES[1:]}
    ended: list[dict[str, Any]] = []
    said: set[tuple[str, str]] = set()
    with house.operator() as operator:
        for progress in operator.follow("masked", wait_s=5.0):
            ended = house.told("show", "masked")["ended"]
            said = {(one["client"], one["reason"]) for record in ended for one in record["clients"]}
            if (
                progress.next_after > FAILURES_MAX and said >= stranger
            ):  # two declines end an attempt, so one is missing
                break
    assert said >= stranger
    assert not any(one["committed"] for one in ended)

    given = house.umbel(*sites.create, *sites.with_list)
    assert "--members" not in given.stderr
    threads += sites.start(NAMES[0])
    for thread in threads:
        thread.join(LIMIT_S)
    assert sites.refusals["eve"].kind == "not-a-member"
    assert {name: end.status for name, end in sites.ends.items()} == dict.fromkeys(NAMES, "finished")
    assert sum(end.accepted for end in sites.ends.values()) >= 2 * 3  # a slow machine may begin a round without a site
