"""Both real ends over real sockets, where clients are sent changes: killed, late, left behind, and made again."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn

from tests.client.doubles.double import kind_of
from tests.contracts.test_client_and_coordinator import Coordinator, coordinator
from umbel.aggregation.model.artifact import encode_model
from umbel.client import Client, LocalPlan, RunEnd, TrainResult, run_client
from umbel.client.cli.audit import replay_run

pytestmark = pytest.mark.slow
__all__ = ["coordinator"]  # the fixture
RUN = """
name = "changes"
rounds = { count = 5, target = 1, over_selection = 1.0, window_s = 60 }
downlink = { name = "change", step = 0.5 }
codec = { name = "integer" }
retention = { updates = "all" }
"""


class Crash(BaseException):
    """Stands for kill -9: nothing in the client may catch it."""


class Site(Client):
    """Moves every weight by something small."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.sample_count = nn.Sequential(nn.Linear(30_000, 2), nn.BatchNorm1d(2)), 3

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        rng = torch.Generator().manual_seed(plan.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=rng) / 100)
        return TrainResult(3, 1, 1)


class Line(httpx.BaseTransport):
    """A line that dies with the client: when it has reported so often, or in its n-th download, after some bytes.

    `down`: the bytes of each download that came whole, and from where on.
    """

    def __init__(self, reports: int = 99, dies_in: int = 99, after_bytes: int = 0) -> None:
        self._inner = httpx.HTTPTransport()
        self._left, self._dies_in, self._after = reports, dies_in, after_bytes
        self.down: list[tuple[int, str]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        kind = kind_of(request)
        if kind == "POST check-ins" and self._left == 0:
            raise Crash
        response = self._inner.handle_request(request)
        self._left -= kind == "PUT report"
        if kind != "GET models":
            return response
        self._dies_in -= 1
        body = response.read()
        self.down.append((len(body), request.headers.get("range", "")))
        return httpx.Response(response.status_code, headers=response.headers, content=self._pieces(body))

    def _pieces(self, body: bytes) -> Iterator[bytes]:
        if self._dies_in == 0:
            yield body[: self._after]
            raise Crash
        yield body

    def close(self) -> None:
        self._inner.close()


def take_part(it: Coordinator, state: Path, line: Line, token: str | None) -> RunEnd | None:
    """Until the run is over, or the line has died."""
    try:
        return run_client(Site(), it.url, state, "changes", token, state.name, transport=line)
    except Crash:
        return None


def test_clients_that_come_and_go_download_what_they_lack(
    coordinator: Coordinator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with coordinator.operator() as operator:
        model = encode_model(Site().model.state_dict())
        operator.create_run("changes", RUN, operator.upload_model(model))
        north, south = operator.create_tokens(2)

        early, late = Line(reports=1), Line(reports=2)
        assert take_part(coordinator, tmp_path / "north", early, north) is None  # round 1
        assert take_part(coordinator, tmp_path / "south", late, south) is None  # rounds 2 and 3
        assert early.down == [(len(model), "")]
        assert late.down[0][0] == len(model), "it has no model before, so no changes either"
        assert late.down[1][0] < len(model) / 8

        killed = Line(dies_in=2, after_bytes=2000)
        assert take_part(coordinator, tmp_path / "north", killed, None) is None  # two of its three changes
        again = Line()
        end = take_part(coordinator, tmp_path / "north", again, None)  # rounds 4 and 5
        assert end is not None
        assert (end.status, end.accepted) == ("finished", 2)
        assert killed.down[1][0] == again.down[0][0] + 2000
        assert again.down[0][1] == "bytes=2000-"
        assert len(again.down) == 3, "the rest of a change, another, and that of the next round"
        assert max(n_bytes for n_bytes, _ in again.down) < len(model) / 8

        came = [early.down, late.down[:1], late.down[1:], killed.down + again.down[:2], again.down[2:]]
        measured = [record.bytes_down for record in operator.progress("changes").ended]
        assert measured == [sum(n_bytes for n_bytes, _ in one) for one in came]
        replay_run(operator, "changes", all_=True)
    assert capsys.readouterr().out.count("the same hash") == 5
