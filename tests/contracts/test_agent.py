"""An agent as the command line starts it, with a process for each run, against a real coordinator."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner, Result

from tests.contracts.house import House
from tests.repository import ROOT
from tests.servers.waits import LIMIT_S, wait_for_file, wait_until
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.types import RunId
from umbel.client.agent.board import ALIVE_S, BoardFile, RunsBoard, SiteRun, boards_in
from umbel.client.agent.notes import Doing
from umbel.client.agent.verdict import Stand
from umbel.client.cli.site_runs import site_app
from umbel.client.state.store import Store

pytestmark = pytest.mark.slow

APP = '''
import os, time
from pathlib import Path
import torch
from umbel.client import Client, TrainResult

class Ward(Client):
    """Notes that it trains, in a file named after its run, and trains for as long as a file holds it."""

    def __init__(self):
        self.model, self.sample_count = torch.nn.Linear(2, 1), 3

    def train(self, model, plan):
        run, site = os.environ["UMBEL_RUN"], os.environ["SITE"]
        Path(f"training-{site}-{run}").write_text(str(os.getpid()))
        while Path(f"hold-{run}").exists() and not plan.should_stop():
            time.sleep(0.02)
        return TrainResult(3, 2, 2)

def broken():
    raise RuntimeError("the data are not mounted")
'''


def run_file(name: str, count: int = 1, target: int = 1, more: str = "") -> str:
    rounds = f"count = {count}, target = {target}, minimum = {target}, over_selection = 1.0, window_s = 100"
    return f'name = "{name}"\nrounds = {{ {rounds} }}\n{more}'


@dataclass
class SiteAgent:
    """One site. `folder`: its code is here, and what it notes."""

    url: str
    name: str
    folder: Path
    token: str
    arguments: Sequence[str] = ()
    process: "subprocess.Popen[bytes] | None" = None
    lives: int = field(default=0)

    @property
    def state(self) -> Path:
        return self.folder / f"state-{self.name}"

    @property
    def log(self) -> Path:
        return self.folder / f"log-{self.name}"

    def start(self) -> None:
        (self.folder / "ward_code.py").write_text(APP)
        code = "import typer; from umbel.client.cli.agent import agent as verb; typer.run(verb)"
        arguments = ["--server", self.url, "--state", str(self.state), "--name", self.name, *self.arguments]
        more = {"UMBEL_TOKEN": self.token} if self.lives == 0 else {}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SITE": self.name, **more}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments], cwd=self.folder, env=environment, stdout=log, stderr=log
            )
        self.lives += 1

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(timeout=LIMIT_S)

    def stop(self) -> None:
        """End it as systemd would, however long it takes; kill it after that."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=LIMIT_S)
            self.process.kill()

    def board(self) -> RunsBoard | None:
        homes = boards_in(self.state)
        return BoardFile(homes[0]).read() if homes else None

    def run(self, name: str) -> SiteRun | None:
        board = self.board()
        return next((one for one in board.runs if one.run.name == name), None) if board is not None else None

    def wait_for(self, name: str, *states: str) -> SiteRun:
        """The run on the agent's board, once it is in one of these states."""

        def there() -> SiteRun | None:
            assert self.process is not None
            assert self.process.poll() is None, self.words()
            found = self.run(name)
            return found if found is not None and found.state in states else None

        return wait_until(f"run {name} {states}", there, lambda: f"{self.run(name)}\n{self.words()}")

    def trains(self, name: str) -> int:
        """Wait until the site trains in this run; the process that does."""
        path = wait_for_file(self.folder / f"training-{self.name}-{name}", self.process, self.log)
        return int(wait_until("its process", path.read_text))

    def words(self) -> str:
        return self.log.read_text()[-4000:]

    def umbel(self, *arguments: str) -> Result:
        return CliRunner().invoke(site_app, [*arguments, "--state", str(self.state)])

    def allow(self, name: str) -> Result:
        """Allow the run that `umbel site runs` shows now."""
        [shown] = json.loads(self.umbel("runs", "--json").stdout)
        return self.umbel("allow", name, shown["hashes"].get(name, "unknown"))


@contextmanager
def agent_of(house: House, folder: Path, *arguments: str, name: str = "ward") -> Generator[SiteAgent]:
    with house.operator() as operator:
        [token] = operator.create_tokens()
    site = SiteAgent(house.url, name, folder, token, arguments or ("--app", "ward_code:Ward"))
    site.start()
    try:
        yield site
    finally:
        site.stop()


def create(house: House, text: str, *, value: float = 0.0, shares_model: bool = False) -> None:
    """Create the run of this file, from a model whose weights all have this value."""
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    [_, name, *_] = text.split('"')
    with house.operator() as operator:
        digest = operator.upload_model(encode_model(model.state_dict()))
        operator.create_run(name, text, digest, same_first_model=shares_model)


def wait_for_status(house: House, name: str, expected: RunStatus) -> None:
    def there() -> bool:
        with house.operator() as operator:
            return operator.run(name).status is expected

    wait_until(f"run {name} {expected.value}", there)


def hold(folder: Path, *runs: str) -> None:
    """From now on trainings of these runs go on until `release`."""
    for run in runs:
        (folder / f"hold-{run}").touch()


def release(folder: Path, *runs: str) -> None:
    for run in runs:
        (folder / f"hold-{run}").unlink()


@pytest.mark.nightly
def test_of_three_allowed_runs_two_train_at_once_and_one_after(house: House, tmp_path: Path) -> None:
    names = ("ward-a", "ward-b", "ward-c")
    hold(tmp_path, *names)
    policy = tmp_path / "site.toml"
    policy.write_text('allowed_runs = ["ward-*"]\n')
    with agent_of(house, tmp_path, "--app", "ward-*=ward_code:Ward", "--policy", str(policy)) as site:
        for name in (*names, "other"):
            create(house, run_file(name))
        assert "does not allow run 'other'" in site.wait_for("other", Stand.REFUSED).reason
        for name in names:
            site.wait_for(name, Doing.TRAINING, Doing.HELD_UP)
        [late] = [one for one in names if site.wait_for(one, Doing.TRAINING, Doing.HELD_UP).state == Doing.HELD_UP]
        first, second = (one for one in names if one != late)
        assert {site.trains(first), site.trains(second)} & {site.process.pid if site.process else 0} == set()
        assert "--at-once" in site.wait_for(late, Doing.HELD_UP).reason
        with house.operator() as operator:
            live = operator.progress(late).live
            assert live is not None
            assert live.closes_in_s is None, "no round waits for a client that cannot train"
        release(tmp_path, late, first)
        site.wait_for(first, "finished")
        site.wait_for(late, "finished")
        assert site.wait_for(second, Doing.TRAINING).reports == 0
        release(tmp_path, second)
        assert site.wait_for(second, "finished").reports == 1
        wait_until("nothing left of runs that are over", lambda: not list(site.state.glob("*/runs/*")), site.words)
        refused = site.allow("other")
        assert refused.exit_code == 1
        assert "no person can allow run 'other'" in refused.stderr
    assert "SIGTERM" in site.words()


def away(house: House, run: str) -> list[str]:
    """Which clients do not come to a run, as its operator sees it."""
    with house.operator() as operator:
        return [f"{one.kind}: {one.reason}" for one in operator.progress(run).turned_away]


def test_a_person_allows_and_denies_and_takes_it_back(house: House, tmp_path: Path) -> None:
    hold(tmp_path, "one")
    with agent_of(house, tmp_path) as site:
        create(house, run_file("one", count=2))
        asked = site.wait_for("one", Stand.ASKED)
        assert "umbel site allow one" in asked.reason
        shown = site.umbel("runs")
        assert "waiting for a person" in shown.stdout
        assert "this site's update" in shown.stdout
        wait_until(
            "its word",
            lambda: away(house, "one") == ["not ready: a person at the site must decide: umbel site allow one"],
        )
        said = site.allow("one")
        assert said.exit_code == 0, said.stderr
        assert said.stdout.startswith("allowed one: 3 values (")
        site.trains("one")
        assert "denied one" in site.umbel("deny", "one").stdout
        assert site.wait_for("one", Stand.DENIED).reports == 0
        wait_until("its word", lambda: away(house, "one") == ["stays away: a person at the site denied it"])
        with house.operator() as operator:
            assert operator.progress("one").live
            assert operator.run("one").rounds_done == 0, "what was trained until then has not left the site"
        release(tmp_path, "one")
        assert site.allow("one").exit_code == 0
        site.wait_for("one", "finished")
        assert away(house, "one") == []
        assert site.allow("nothing").exit_code == 1


@pytest.mark.nightly
def test_a_stopped_run_ends_at_the_site_and_the_others_go_on(house: House, tmp_path: Path) -> None:
    hold(tmp_path, "one", "two")
    with agent_of(house, tmp_path) as site:
        for name in ("one", "two"):
            create(house, run_file(name))
            site.wait_for(name, Stand.ASKED)
            site.allow(name)
            site.trains(name)
        with house.operator() as operator:
            operator.stop_run("one", "enough")
        assert "enough" in site.wait_for("one", "stopped").reason
        assert site.wait_for("two", Doing.TRAINING)
        release(tmp_path, "two")
        site.wait_for("two", "finished")


@pytest.mark.parametrize("whom", ["agent", pytest.param("run", marks=pytest.mark.nightly)])
def test_after_a_kill_in_a_round_everything_goes_on(house: House, tmp_path: Path, whom: str) -> None:
    hold(tmp_path, "one")
    with agent_of(house, tmp_path) as site:
        create(house, run_file("one", count=2))
        site.wait_for("one", Stand.ASKED)
        site.allow("one")
        child = site.trains("one")
        (tmp_path / "training-ward-one").unlink()
        if whom == "run":
            os.kill(child, signal.SIGKILL)
            wait_until("its failure in the log", lambda: "killed by SIGKILL" in site.words(), site.words)
        else:
            site.signal(signal.SIGKILL)
            wait_until("the end of its run's process", lambda: not _is_there(child))
            assert "does not run" in site.umbel("runs").stdout or _seen_lately(site)
            site.start()
        assert site.trains("one") != child
        release(tmp_path, "one")
        site.wait_for("one", "finished")
        with house.operator() as operator:
            assert [one.id for one in operator.clients()] == ["ward"], "it is the same client as before"


@pytest.mark.nightly
def test_the_policy_is_read_again_when_its_file_changes(house: House, tmp_path: Path) -> None:
    hold(tmp_path, "one")
    policy = tmp_path / "site.toml"
    policy.write_text('allowed_runs = ["one"]\n')
    with agent_of(house, tmp_path, "--app", "ward_code:Ward", "--policy", str(policy)) as site:
        create(house, run_file("one", count=3))
        site.trains("one")
        policy.write_text('allowed_runs = ["one"]\nsecure_aggregation = "sometimes"\n')
        broken = site.wait_for("one", Stand.REFUSED)
        assert "secure_aggregation" in broken.reason
        policy.write_text('allowed_runs = ["one"]\nmax_parameters = 2\n')
        wait_until("the limit", lambda: "max_parameters" in site.wait_for("one", Stand.REFUSED).reason, site.words)
        release(tmp_path, "one")
        policy.write_text('allowed_runs = ["one"]\nmax_parameters = 3\n')
        site.wait_for("one", "finished")


def test_code_that_fails_hurts_no_other_run_and_is_said_once(house: House, tmp_path: Path) -> None:
    apps = ("--app", "bad=ward_code:broken", "--app", "good=ward_code:Ward")
    policy = tmp_path / "site.toml"
    policy.write_text('allowed_runs = ["*"]\n')
    with agent_of(house, tmp_path, *apps, "--policy", str(policy)) as site:
        for name in ("bad", "nobody", "good"):
            create(house, run_file(name))
        site.wait_for("good", "finished")
        assert "--app 'nobody=MODULE:NAME'" in site.wait_for("nobody", Stand.NO_APP).reason
        failed = site.wait_for("bad", "failed")
        assert "RuntimeError: the data are not mounted (ward_code.py, line" in failed.reason
        assert "umbel site allow bad" in failed.reason
        wait_until("a second try", lambda: site.log.read_text().count("own code failed") >= 2, site.words)
        assert site.log.read_text().count("run bad failed:") == 1


@pytest.mark.nightly
def test_another_run_under_an_allowed_name_is_asked_about_again(house: House, tmp_path: Path) -> None:
    """The coordinator was restored from a backup, and its operator made the run again, with other content."""
    with agent_of(house, tmp_path) as site:
        wait_until("its enrolment", lambda: site.board() is not None)
        house.stop()
        shutil.copytree(house.data, tmp_path / "backup")
        house.restart()
        hold(tmp_path, "one")
        create(house, run_file("one"))
        site.wait_for("one", Stand.ASKED)
        site.allow("one")
        site.trains("one")
        house.stop()
        shutil.rmtree(house.data)
        (tmp_path / "backup").rename(house.data)
        house.restart()
        create(house, run_file("one", count=2))
        again = wait_until("the question", lambda: _asked_again(site), site.words)
        assert "a person at this site allowed another run of this name" in again.reason


def _asked_again(site: SiteAgent) -> SiteRun | None:
    found = site.run("one")
    return found if found is not None and found.run.rounds == 2 and found.state == Stand.ASKED else None


@pytest.mark.nightly
def test_two_secure_runs_at_once_from_one_model_lose_nothing_by_the_kill_of_an_agent(
    house: House, tmp_path: Path
) -> None:
    """Three sites; the third run comes after. The site that is killed has begun both runs, and its keys are lost."""
    runs = ("one", "two")
    hold(tmp_path, *runs)
    with (
        agent_of(house, tmp_path, name="east") as east,
        agent_of(house, tmp_path, name="north") as north,
        agent_of(house, tmp_path, name="south") as south,
    ):
        sites = (east, north, south)
        for name in runs:
            create(house, run_file(name, 2, 3, "secure_aggregation = {}\n"), shares_model=True)
            allow_at(sites, name)
        for site, name in itertools.product(sites, runs):
            site.trains(name)
        south.signal(signal.SIGKILL)
        south.start()
        release(tmp_path, *runs)
        for name in runs:
            wait_for_status(house, name, RunStatus.FINISHED)
        create(house, run_file("three", 2, 3, "secure_aggregation = {}\n"), value=1.0)
        allow_at(sites, "three")
        wait_for_status(house, "three", RunStatus.FINISHED)
        for site in sites:
            kept = Store(site.state, site.url).secure
            counts = {name: len(kept.revealed(RunId(name))) for name in (*runs, "three")}
            assert counts == {"one": 2, "two": 2, "three": 2}, site.words()
            assert all(set(one.clients) == {"east", "north", "south"} for one in kept.revealed(RunId("one")))
    with house.operator() as operator:
        committed = [record for name in runs for record in operator.progress(name).ended if record.committed]
    assert [record.reported for record in committed] == [3] * 4


def allow_at(sites: Sequence[SiteAgent], name: str) -> None:
    for site in sites:
        site.wait_for(name, Stand.ASKED)
        assert site.allow(name).exit_code == 0


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _seen_lately(site: SiteAgent) -> bool:
    """The board of an agent that was killed a moment ago is still young."""
    return time.time() - next(site.state.glob("*/agent.json")).stat().st_mtime < ALIVE_S
