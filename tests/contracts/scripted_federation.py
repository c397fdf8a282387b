"""One script of a federation, played twice: by a real coordinator and real clients over HTTP, and by the simulator.

The script says what becomes of each place of a cohort, by steps and requests and never by a clock: who does all of its
work, who is stopped after some steps, who dies and where, whose work is not needed in the end. The simulator is
played first. So it is known by name what each client is to do over HTTP; who is asked there and was not in the
simulation declines with an error, and no round is made.
"""

import threading
import time
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TypeAlias

import httpx
import numpy as np
import torch
from pydantic import TypeAdapter
from torch import nn
from torch.utils.data import TensorDataset

from tests.federations.consortium import OFFICERS, first_list, signed
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import with_first_control
from umbel.aggregation.optimizers.build import optimizer_of
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.plans.tensors import TensorKind
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.run.records import Fate, RoundRecord
from umbel.aggregation.run.standing import beginning
from umbel.aggregation.secagg.numbers.contribution import seeded_secret
from umbel.aggregation.trust.members import members_bytes
from umbel.aggregation.types import client_name
from umbel.client import Client, Evaluation, LocalPlan, Operator, SitePolicy, TrainResult, run_client
from umbel.client.loop import RunEnd
from umbel.client.policy.site import SecureRandom
from umbel.client.state.identity import make_own_key, own_keys
from umbel.client.training.shared_state import SharedState
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.clients.trainer import stop_after
from umbel.sim.engines.device import one_thread
from umbel.sim.engines.model import LOSSES, ModelRecipe
from umbel.sim.engines.training import SequentialEngine
from umbel.sim.experiment.file import experiment_of
from umbel.sim.experiment.world import make_world
from umbel.sim.federation.federation import Federation
from umbel.sim.federation.local_work import Meter
from umbel.sim.federation.site_policies import SitePolicies
from umbel.sim.federation.world import World
from umbel.sim.fleet.fates import CohortAsk, DeviceStage, Fates, LineRates
from umbel.sim.fleet.faults import Fault, Faults
from umbel.sim.fleet.section import CorruptSection, MaliciousSection

SIZES = (7, 12, 5, 21, 9, 16, 6, 11)
"""Samples of each client, no two alike."""
N_FEATURES, N_CLASSES = 6, 3
DEADLINE_S = 120.0
MINIMUM_WORK = 0.05  # of a client's steps: less than any straggler does
_PAUSE_S = 0.02
_HERE = "tests.contracts.scripted_federation"

# --- the script -------------------------------------------------------------------------------------------------------


class Death(Enum):
    """Where a client dies: after some steps, or as it begins to send what it has made of them."""

    IN_TRAINING = "in training"
    AT_ITS_UPLOAD = "at its upload"


class Return(Enum):
    """When one that has died is started again."""

    NEVER = "never"
    IN_THIS_ROUND = "in this round"
    IN_THE_NEXT = "in the next round"


@dataclass(frozen=True, slots=True)
class Role:
    """What becomes of one place in a cohort. `steps`: after which it is stopped, or dies; None: it does all of them.
    `is_unneeded`: it is at work until the round has closed without it. `has_nan`: what it makes cannot be sent.
    """

    steps: int | None = None
    death: Death | None = None
    comes_back: Return = Return.NEVER
    is_unneeded: bool = False
    has_nan: bool = False

    @property
    def reports(self) -> bool:
        """Whether its work is in the sum."""
        return not self.is_unneeded and (self.death is None or self.comes_back is Return.IN_THIS_ROUND)


WHOLE = Role()
Attempt: TypeAlias = tuple[int, int]
"""The number of a round, and of the attempt at it."""
Script: TypeAlias = Mapping[Attempt, Mapping[int, Role]]
"""By attempt, by place in the order of the cohort's names; who is not named does all its work."""


@dataclass(frozen=True, slots=True)
class Made:
    """What an attempt has made. `model_sha256`: None of one that was abandoned. `accepted`: by client, its samples, the
    steps that it did, and those that it was asked; zeros in a secure round, where only the sum is known.
    """

    attempt: Attempt
    model_sha256: str | None
    cohort: tuple[str, ...]
    declined: tuple[str, ...]
    accepted: Mapping[str, tuple[int, int, int]]
    metrics: Mapping[
        str, float
    ]  # what clients say of their training; in an abandoned attempt, simulated ones do not train
    evaluation: Mapping[str, float]  # and of the model before it

    @property
    def without_metrics(self) -> "Made":
        """The same without what only a client's own code measures."""
        return replace(self, metrics={}, evaluation={})

    @staticmethod
    def of(record: RoundRecord) -> "Made":
        clients = sorted(record.clients, key=lambda one: one.client)
        counted = (one for one in clients if one.fate in (Fate.ACCEPTED, Fate.PARTIAL))
        return Made(
            (record.round, record.attempt),
            record.model_sha256 if record.committed else None,
            tuple(one.client for one in clients),
            tuple(one.client for one in clients if one.fate is Fate.DECLINED),
            {one.client: (one.sample_count, one.steps_done, one.steps_planned) for one in counted},
            record.metrics if record.committed else {},
            record.evaluation if record.committed else {},
        )


# --- the clients ------------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    """With weights that are trained, statistics and a counter that run along, and draws at random."""
    return nn.Sequential(
        nn.Linear(N_FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, N_CLASSES)
    )


MODEL = ModelRecipe(f"{_HERE}:model", seed=3)


def samples() -> SampleSet:
    """Those of all clients, one client after another."""
    draw = torch.Generator().manual_seed(11)
    inputs = torch.randn(sum(SIZES), N_FEATURES, generator=draw)
    targets = torch.randint(N_CLASSES, (sum(SIZES),), generator=draw)
    return SampleSet(inputs, targets)


def shards() -> list[Indices]:
    """Whose they are."""
    return np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])


def own_data(number: int) -> TensorDataset:
    own = samples().take(shards()[number])
    return TensorDataset(own.inputs, own.targets)


# --- the simulator ----------------------------------------------------------------------------------------------------


def first_layout(file: RunFile) -> Layout:
    """The layout of the model in the run of this file."""
    layout, rules = Layout.of_state(MODEL.make().state_dict()), file.tensor_rules
    layout = layout if rules is None else layout.with_kinds(lambda name: rules.kind_of(name) or "mean")
    return layout.with_control if file.training.has_control else layout


class ScriptedDevices:
    """A fleet of which is said outright what becomes of each. A device that is not needed is the slowest."""

    faults = Faults(0, CorruptSection(0.0), MaliciousSection(0.0))

    def __init__(self, script: Script) -> None:
        self._script = script
        self._gone = dict[int, int]()  # by client, the round in which it died for good
        self.roles = dict[Attempt, dict[str, Role]]()  # by name, in the order of attempts, as it turned out

    def waiting(self, now: float, number: int, attempt: int, n_devices: int, n_wanted: int) -> Indices:
        return np.array([one for one in range(n_devices) if self._gone.get(one, number) >= number])

    def fates(self, devices: Indices, number: int, attempt: int, opened_at: float, ask: CohortAsk) -> Fates:
        roles = [self._script.get((number, attempt), {}).get(rank, WHOLE) for rank in range(len(devices))]
        for one, role in zip(devices.tolist(), roles, strict=True):
            if role.death and role.comes_back is Return.NEVER:
                self._gone.setdefault(one, number)
        self.roles[number, attempt] = {
            client_name(one): role for one, role in zip(devices.tolist(), roles, strict=True)
        }
        return _fates(devices, roles, ask)


def _fates(devices: Indices, roles: Sequence[Role], ask: CohortAsk) -> Fates:
    k, window_s, latency_s = len(devices), ask.window_s, 1.0
    done = [n if role.steps is None or role.death else role.steps for role, n in zip(roles, ask.steps, strict=True)]
    steps, is_in = np.array(done), np.array([role.reports for role in roles])
    has_died = np.array([role.death is not None for role in roles])
    at_upload = np.array([role.death is Death.AT_ITS_UPLOAD for role in roles])
    is_back = np.array([role.comes_back is Return.IN_THIS_ROUND for role in roles])
    trained_s = np.where([role.is_unneeded for role in roles], 0.9, np.where(is_back, 0.4, 0.2)) * window_s
    lost_s = np.where(at_upload & ~is_back, trained_s + latency_s / 2, 0.1 * window_s)
    return Fates(
        devices=devices,
        ask=ask,
        lines=LineRates(np.full(k, 1e9), np.full(k, 1e9), np.full(k, 1e9), np.full(k, latency_s)),
        fetched_s=np.full(k, 2 * latency_s),
        step_s=trained_s / steps,
        trained_s=np.where(is_in | at_upload | ~has_died, trained_s, np.inf),
        steps_done=np.where(has_died & ~is_in, 0, steps),
        report_s=np.where(has_died & ~is_in, np.inf, trained_s + 2 * latency_s),
        lost_s=np.where(has_died, lost_s, np.inf),
        back_s=np.where(is_back, 0.2 * window_s, np.inf),
        stage=np.where(
            has_died, np.where(at_upload, DeviceStage.UPLOAD, DeviceStage.TRAINING), DeviceStage.NONE
        ).astype(np.int8),
        fault=np.where([role.has_nan for role in roles], Fault.NAN, Fault.NONE).astype(np.int8),
    )


@dataclass(frozen=True, slots=True)
class Simulated:
    """`roles`: by attempt, what each client of the cohort was to do, if its site's policy allows it. `refusals`: by
    attempt, why the others have declined.
    """

    made: list[Made]
    roles: Mapping[Attempt, Mapping[str, Role]]
    refusals: list[dict[str, str]]


def simulated_by_engine(run_file: str, script: Script) -> Simulated:
    """The federation with the simulator's own training; under masks, with masks."""
    file = TypeAdapter(RunFile).validate_python(tomllib.loads(run_file))
    everyone, all_samples = ScriptedDevices(script), samples()
    population = ShardedPopulation(all_samples, shards(), all_samples.take(np.arange(0)))
    meter = Meter(MODEL.make(), LOSSES["cross-entropy"], accuracy=True)
    first = ModelState.first(MODEL.make().state_dict(), first_layout(file), optimizer_of(*file.server_terms()))
    world = World(population, everyone, SequentialEngine(MODEL), meter, masks=True)
    return _played(Federation(world, beginning(file, first), first), everyone)


def simulated_by_clients(
    run_file: str, script: Script, app: str, engine: str, policies: Mapping[int, SitePolicy] | None = None
) -> Simulated:
    """The federation of an experiment's file that names the app; under masks, with masks. `policies`: of some sites."""
    table = tomllib.loads(run_file)
    seed = table.pop("seed")
    world = {"clients": {"app": app, "count": len(SIZES)}, "engine": {"name": engine, "workers": 2, "masks": True}}
    (trial,) = experiment_of({**table, "seeds": [seed], "fleet": {}, **world}).trials
    everyone, made = ScriptedDevices(script), make_world(trial, Path(), None)
    try:
        scripted = replace(made.world, fleet=everyone, sites=SitePolicies(None, policies or {}))
        run = Federation(scripted, beginning(trial.run, made.model), made.model)
        return _played(run, everyone)
    finally:
        made.world.close()


def _played(run: Federation, everyone: ScriptedDevices) -> Simulated:
    records = [one.record for one in run.attempts()]
    refusals = [refusals_of(record) if run.world.sites else {} for record in records]
    declined = {(one.round, one.attempt): why for one, why in zip(records, refusals, strict=True)}
    roles = {
        attempt: {name: role for name, role in asked.items() if name not in declined[attempt]}
        for attempt, asked in everyone.roles.items()
    }
    return Simulated(list(map(Made.of, records)), roles, refusals)


def refusals_of(record: RoundRecord) -> dict[str, str]:
    """Why clients have declined."""
    return {one.client: one.reason for one in record.clients if one.fate is Fate.DECLINED}


# --- over HTTP --------------------------------------------------------------------------------------------------------


class Died(BaseException):
    """This client's process is gone: nothing of the SDK may catch it."""


_generators = threading.Lock()  # torch's, Python's and numpy's: threads here share what each process would have


class Director:
    """Tells clients in their threads what to do in the round under way, and waits for them by name."""

    def __init__(self) -> None:
        self.roles: Mapping[str, Role] = {}
        self.strangers = set[str]()
        self._at_work, self._dead = set[str](), set[str]()
        self._may_train, self._is_over = threading.Event(), threading.Event()

    def begin(self, roles: Mapping[str, Role]) -> None:
        self._may_train.clear()
        self._is_over.clear()
        self.roles, self._at_work, self._dead = roles, set(), set()

    def let_train(self) -> None:
        self._may_train.set()

    def end(self) -> None:
        self._is_over.set()

    @property
    def all_are_at_work(self) -> bool:
        assert not self.strangers, f"{self.strangers} were asked over HTTP, and not in the simulation"
        return self._at_work == set(self.roles)

    def role_of(self, name: str) -> Role:
        """Called by a client that is to train, which waits here until the whole cohort is at work."""
        if name not in self.roles:
            self.strangers.add(name)
            raise AssertionError(f"{name} is not in the simulated cohort {sorted(self.roles)}")
        self._at_work.add(name)
        assert self._may_train.wait(DEADLINE_S)
        return self._now(name)

    def dies(self, name: str, where: Death) -> bool:
        """Whether this client is to die here, which it does once."""
        return name in self.roles and self._now(name).death is where

    def has_died(self, name: str) -> bool:
        """Note it; whether it is started again, which then is now the time to do."""
        role = self.roles[name]
        self._dead.add(name)
        if role.comes_back is Return.IN_THE_NEXT:
            assert self._is_over.wait(DEADLINE_S)
        return role.comes_back is not Return.NEVER

    def _now(self, name: str) -> Role:
        return WHOLE if name in self._dead else self.roles[name]


MakeClient: TypeAlias = Callable[[int, int], Client]


class ScriptedSite(Client):
    """The site's own client, with what may happen to it."""

    def __init__(self, number: int, director: Director, make: MakeClient) -> None:
        with _generators:
            self._own = make(number, len(SIZES))
        self.model, self.sample_count = self._own.model, self._own.sample_count
        self._name, self._director = client_name(number), director

    def shares(self, name: str) -> TensorKind | None:
        return self._own.shares(name)

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        with _generators, one_thread():
            return self._own.evaluate(model)

    def training_loss(self, model: nn.Module) -> float | None:
        with _generators, one_thread():
            return self._own.training_loss(model)

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        if plan.is_whole:  # only the gradient
            with _generators, one_thread():
                return self._own.train(model, plan)
        role = self._director.role_of(self._name)
        if role.is_unneeded:
            until(lambda: plan.told_to_stop() is not None, "the round goes on without this client")
        with _generators, one_thread():
            done = self._own.train(model, replace(plan, told_to_stop=self._stops(role, plan.told_to_stop)))
        if role.has_nan:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = torch.nan
        return done

    def _stops(self, role: Role, told_to_stop: Callable[[], str | None]) -> Callable[[], str | None]:
        if role.steps is None:
            return told_to_stop
        is_time = stop_after(role.steps)

        def stop() -> str | None:
            if (reason := is_time()) is not None and role.death is Death.IN_TRAINING:
                raise Died
            return reason

        return stop


class MortalLine(httpx.BaseTransport):
    """A client's way to its coordinator, on which it may die as it begins to send an update."""

    def __init__(self, name: str, director: Director) -> None:
        self._name, self._director = name, director
        self._inner = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        is_upload = request.method == "POST" and request.url.path.endswith("/update")
        if is_upload and self._director.dies(self._name, Death.AT_ITS_UPLOAD):
            raise Died
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


class AsSimulated(SecureRandom):
    """Draws what the simulator draws for the same client."""

    def training_seed(self, offer: Assignment) -> int:
        return offer.seed

    def contribution_secret(self, offer: Assignment) -> bytes:
        return seeded_secret(offer.seed, offer.attempt)


@dataclass
class Sites:
    """All clients, each in a thread that lives as long as its script lets it. `ends`: of those that left."""

    url: str
    run: str
    folder: Path
    tokens: Sequence[str]
    make: MakeClient
    policy: SitePolicy | None = None  # of those that have none in `policies`
    policies: Mapping[int, SitePolicy] = field(default_factory=dict[int, SitePolicy])
    director: Director = field(default_factory=Director)
    ends: dict[str, RunEnd] = field(default_factory=dict[str, RunEnd])

    def start(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._live, args=(i,), daemon=True) for i in range(len(self.tokens))]
        for thread in threads:
            thread.start()
        return threads

    def _live(self, number: int) -> None:
        name, goes_on = client_name(number), True
        while goes_on:
            try:
                self.ends[name] = run_client(
                    ScriptedSite(number, self.director, self.make),
                    self.url,
                    self.folder / name,
                    self.run,
                    self.tokens[number],
                    name,
                    policy=self.policies.get(number, self.policy),
                    transport=MortalLine(name, self.director),
                    secure_random=AsSimulated(),
                )
                return
            except Died:
                goes_on = self.director.has_died(name)


def listed(url: str, folder: Path) -> SitePolicy:
    """A policy with which all of them, whose keys it lists, send masked updates of part of their work, too."""
    keys = dict[str, str]()
    for name in map(client_name, range(len(SIZES))):
        make_own_key(folder / name, url)
        (own,) = own_keys(folder / name)
        keys[name] = own.public_key
    members = replace(first_list(), members=keys)
    path = folder / "pilot.json"
    path.write_bytes(members_bytes(signed(members, *OFFICERS)))
    return SitePolicy(members=path, members_sha256=members.sha256, minimum_work=MINIMUM_WORK, cohort_change="warn")


def over_http(
    operator: Operator,
    url: str,
    run_file: str,
    folder: Path,
    roles: Mapping[Attempt, Mapping[str, Role]],
    make: MakeClient,
    policy: SitePolicy | None = None,
    policies: Mapping[int, SitePolicy] | None = None,
) -> list[Made]:
    """The federation for real. Between attempts the run is paused until all that live wait for work, so that the cohort
    is drawn from the same candidates as in the simulation.
    """
    name = str(tomllib.loads(run_file)["name"])
    file = TypeAdapter(RunFile).validate_python(tomllib.loads(run_file))
    first = SharedState(make(0, len(SIZES)), file.tensor_rules)
    layout = first.layout_in(file.training)
    model = encode_model(with_first_control(first.shared(), layout), layout)
    operator.create_run(name, run_file, operator.upload_model(model))
    operator.pause_run(name, "until all are there")
    sites = Sites(url, name, folder, operator.create_tokens(len(SIZES)), make, policy, policies or {})
    threads, alive = sites.start(), set(map(client_name, range(len(SIZES))))
    for n_ended, (attempt, of_attempt) in enumerate(roles.items(), 1):
        sites.director.begin(of_attempt)
        with _explained(operator, name):
            until(partial(_n_waiting_is, operator, name, len(alive)), f"{len(alive)} wait for attempt {attempt}")
            operator.resume_run(name)
            until(lambda: sites.director.all_are_at_work, f"the cohort of attempt {attempt} is at work")
            operator.pause_run(name, "until all are back")
            sites.director.let_train()
            until(partial(_n_ended_is, operator, name, n_ended), f"attempt {attempt} has ended")
        sites.director.end()
        alive -= {one for one, role in of_attempt.items() if role.death and role.comes_back is Return.NEVER}
    if file.measures_last:
        with _explained(operator, name):
            until(partial(_n_waiting_is, operator, name, len(alive)), f"{len(alive)} wait for the last evaluation")
        operator.resume_run(name)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert {one: end.status for one, end in sites.ends.items()} == dict.fromkeys(sorted(alive), "finished")
    return [Made.of(record) for record in operator.progress(name).ended]


def _n_waiting_is(operator: Operator, run: str, n: int) -> bool:
    live = operator.progress(run).live
    return live is not None and live.waiting == n


def _n_ended_is(operator: Operator, run: str, n: int) -> bool:
    return len(operator.progress(run).ended) == n


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for it. Raises `TimeoutError` with these words."""
    ends_at = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"it never came to this: {what}")
        time.sleep(_PAUSE_S)


@contextmanager
def _explained(operator: Operator, run: str) -> Generator[None]:
    """What the coordinator says of the run, beside an error."""
    try:
        yield
    except (AssertionError, TimeoutError) as error:
        error.add_note(f"as the coordinator has it: {operator.progress(run)}")
        raise
