"""Agents with three runs each, while their coordinator dies of every step of a round, and while their link breaks.

A site adds its own number to every weight. So a model says how often each site's update is in it: once a round.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.contracts.test_agent import SiteAgent
from tests.contracts.test_links import URL, coordinator, operate
from tests.contracts.two_hosts import two_hosts, why_not
from tests.federations.adding_site import ADDS, MEAN
from tests.federations.consortium import first_list, signed
from tests.server.runs.test_kill_matrix import Keeper
from tests.servers.killing import PHASE_STEPS, STEPS, Death
from tests.servers.ports import own_port
from tests.servers.waits import LIMIT_S, wait_until
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.round.silence import cut_s
from umbel.aggregation.trust.members import members_bytes
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.aggregation.types import ROUNDS_MAX
from umbel.client.errors import ClientError
from umbel.client.operator.audit import download, verify
from umbel.client.operator.operator import Operator
from umbel.client.state.store import Store
from umbel.server.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]
T = TypeVar("T")
RUNS = ("plain-a", "plain-b", "masked")
N_CUTS = 20
STEP = 0.02  # of masked updates, in root mean squares
STATE = {"weight": torch.zeros(1, 64)}
APP = "tests.federations.adding_site:Adding"
RUN = """
name = "{name}"
rounds = {{ count = {count}, target = {sites}, minimum = {sites}, over_selection = 1.0, window_s = 600 }}
[aggregation]
max_abs = 64.0
"""
NOT_HERE = {
    "store a run",  # these runs are made before the deaths begin
    "store an enrolment",
    "agree on what all coordinators share",
    "enter the list of replicas",
    "adopt what a dead replica had folded",  # of other deaths than these
    "post a partial sum",  # of several replicas
    "write a masked sum",
    "carry out Discard",  # no attempt is abandoned
    "carry out Release",  # each client of a cohort reports
}
DIES_OF = [step for step in (*STEPS, *PHASE_STEPS) if step not in NOT_HERE]


POLICY = """
allowed_runs = ["*"]
secure_aggregation = "allowed"
members = "pilot.json"
members_sha256 = "{members_sha256}"
cohort_change = "warn"
"""


def file_of(name: str, sites: int = len(ADDS), members_sha256: str = "") -> str:
    masks = (
        f'[codec]\nstep = {STEP}\n[secure_aggregation]\nmembers_sha256 = "{members_sha256}"\n' if members_sha256 else ""
    )
    return RUN.format(name=name, count=ROUNDS_MAX, sites=sites) + masks


def is_exact(name: str) -> bool:
    return name != "masked"


def require_each_report_once(operator: Operator, folder: Path, name: str, count: int, mean: float) -> None:
    """Every committed round has every site, the last model has each of their updates once, and the chain is whole."""
    records = [record for page in operator.ended(name) for record in page.ended if record.committed]
    assert [record.round for record in records] == list(range(1, count + 1))
    assert len({record.reported for record in records}) == 1
    newest = operator.versions(name)[-1]
    operator.download_model(newest.sha256, folder / "newest.safetensors")
    weight = decode_model((folder / "newest.safetensors").read_bytes())[1]["weight"]
    expected = torch.full_like(weight, count * mean)
    if is_exact(name):
        assert torch.equal(weight, expected)
    else:  # masked updates are rounded at random: each value by less than a step, and their mean by a tenth of that
        torch.testing.assert_close(weight, expected, rtol=STEP, atol=0.0)
        torch.testing.assert_close(weight.mean(), expected.mean(), rtol=STEP / 10, atol=0.0)
    auditor, _ = verify(download(operator, name), [public_key_bytes(operator.audit_key())])
    assert operator.run(name).audit_head == auditor.head


class Ward:
    """A coordinator that dies of these deaths in turn, and the agents of three sites."""

    def __init__(self, folder: Path, deaths: Sequence[Death]) -> None:
        self.settings = Settings(data=folder / "coordinator", port=own_port())
        self.settings.data.mkdir()
        self.keeper = Keeper(self.settings, tuple(deaths))
        self.url = f"http://127.0.0.1:{self.settings.port}"
        wait_until("a coordinator that answers", lambda: self.asked(lambda operator: [*operator.runs(), True]))
        self.members = signed(replace(first_list(), members=self._keys(folder)), "anna", "bert")
        (folder / "pilot.json").write_bytes(members_bytes(self.members))
        policy = folder / "site.toml"
        policy.write_text(POLICY.format(members_sha256=self.members.list.sha256))
        arguments = ("--app", APP, "--policy", str(policy), "--at-once", "3")
        with self.operator() as operator:
            tokens = operator.create_tokens(len(ADDS))
        self.agents = [
            SiteAgent(self.url, name, folder, token, arguments) for name, token in zip(ADDS, tokens, strict=True)
        ]

    def _keys(self, folder: Path) -> dict[str, str]:
        return {name: Store(folder / f"state-{name}", self.url).identity(name).public_key for name in ADDS}

    def operator(self) -> Operator:
        return Operator(self.url, self.settings.admin_key_path.read_text().strip())

    def asked(self, ask: Callable[[Operator], T]) -> T | None:
        """The answer; None while the coordinator is dead."""
        with suppress(ClientError, OSError), self.operator() as operator:
            return ask(operator)
        return None

    def n_done(self) -> int:
        """How many rounds have been committed in all runs; 0 while the coordinator is dead."""
        return sum(run.rounds_done for run in self.asked(Operator.runs) or ())

    def wait_for_rounds(self, n_rounds: int) -> None:
        """Wait until this number of further rounds has been committed, in all runs together."""
        wait_until("an answer", self.n_done, self.words)
        n_wanted = self.n_done() + n_rounds
        wait_until(f"{n_wanted} rounds", lambda: self.n_done() >= n_wanted, self.words)

    def wait_for_deaths(self, n_deaths: int) -> None:
        for n in range(1, n_deaths + 1):
            wait_until(f"death {n}", partial(self._has_died, n), self.words)

    def _has_died(self, n_times: int) -> bool:
        return len(self.keeper.started) > n_times

    def words(self) -> str:
        log = (self.settings.data / "log").read_text()[-2000:]
        return f"{len(self.keeper.started)} lives, {self.n_done()} rounds\n{log}" + "".join(
            agent.words() for agent in self.agents
        )


def test_three_runs_of_three_agents_outlive_a_coordinator_that_dies_of_every_step(tmp_path: Path) -> None:
    first = Death("carry out Fold", is_before=True)  # before it everybody is there
    deaths = [first, *(Death(step, is_before) for step in DIES_OF for is_before in (True, False))]

    async def scenario() -> None:
        ward = Ward(tmp_path, deaths)
        keeping = asyncio.create_task(ward.keeper.keep())
        try:
            with ward.operator() as operator:
                model = operator.upload_model(encode_model(STATE))
                for name in RUNS:
                    listed = "" if is_exact(name) else ward.members.list.sha256
                    operator.create_run(name, file_of(name, members_sha256=listed), model)
            for agent in ward.agents:
                agent.start()
            await asyncio.to_thread(ward.wait_for_deaths, len(deaths))
            await asyncio.to_thread(ward.wait_for_rounds, 2 * len(RUNS))
            with ward.operator() as operator:
                for name in RUNS:
                    operator.stop_run(name, "the coordinator has died of everything")
                    require_each_report_once(operator, tmp_path, name, operator.run(name).rounds_done, MEAN)
            for agent in ward.agents:
                for name in RUNS:
                    # "over" where its process was still waiting to ask the coordinator again when the run ended
                    await asyncio.to_thread(agent.wait_for, name, "stopped", "over")
        finally:
            keeping.cancel()
            for agent in ward.agents:
                agent.stop()
            ward.keeper.stop()

    asyncio.run(scenario())


_WHY_NOT = why_not()


@pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)
def test_three_runs_of_an_agent_outlive_a_link_that_breaks(tmp_path: Path) -> None:
    """Each connection is reset again and again, and once the line is dead for longer than a killed client is given."""
    names, draw = ("plain-a", "plain-b", "plain-c"), random.Random(3)
    (tmp_path / "site.toml").write_text('allowed_runs = ["*"]\n')
    save_file(STATE, tmp_path / "init.safetensors")
    with two_hosts() as hosts, coordinator(hosts, tmp_path) as (_, token, key):

        def told(*command: str) -> Any:
            return operate(hosts, tmp_path, key, *command)

        for name in names:
            (tmp_path / f"{name}.toml").write_text(file_of(name, sites=1))
            told("run", "create", f"{name}.toml", "--model", "init.safetensors")
        options = ["--server", URL, "--app", APP, "--policy", "site.toml", "--state", "state", "--at-once", "3"]
        agent = hosts.client.umbel("agent", *options, cwd=tmp_path, UMBEL_TOKEN=token, SITE="north")
        try:
            wait_until("three runs at work", lambda: all(run["rounds_done"] for run in told("run", "list")))
            hosts.unplug(cut_s(600.0) + 2.0)
            for _ in range(N_CUTS):
                hosts.cut()
                time.sleep(draw.uniform(0.05, 1.0))
            before = {run["name"]: run["rounds_done"] for run in told("run", "list")}
            wait_until(
                "rounds after that",
                lambda: all(run["rounds_done"] >= before[run["name"]] + 2 for run in told("run", "list")),
            )
            for name in names:
                told("run", "stop", name, "--reason", "the link has broken often enough", "--yes")
        finally:
            agent.terminate()
            agent.communicate(timeout=LIMIT_S)
        for run in told("run", "list"):
            name, count = run["name"], run["rounds_done"]
            records = [record for record in told("run", "show", name)["ended"] if record["committed"]]
            assert [(one["round"], one["attempt"]) for one in records] == [(n, 1) for n in range(1, count + 1)]
            told("run", "export", name, "--out", f"{name}.safetensors")
            weight = load_file(tmp_path / f"{name}.safetensors")["weight"]
            torch.testing.assert_close(weight, torch.full_like(weight, count * ADDS["north"]), rtol=0.0, atol=0.0)
