"""A Flower app as an experiment of umbel's own: its ClientApp trains, and umbel does what its strategy would do.

The ServerApp runs until it starts its strategy, whose settings become keys of the experiment. So codecs, masks, partial
updates that are left out, checkpoints and everything else of umbel's rounds apply, and `--set` changes them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from flwr.server.server import Server
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, FedProx, Strategy

from umbel.aggregation.plans.masks import MINIMUM_LEAST
from umbel.client.app import Client
from umbel.client.errors import WorkRefused
from umbel.client.flower.calls import AppFailed
from umbel.client.flower.client import FlowerClient
from umbel.client.flower.host import AppHost, array_record, arrays_of, load_object
from umbel.client.flower.in_process import InProcess
from umbel.client.flower.local_grid import LocalGrid, run_server_app
from umbel.client.flower.project import Config, FlowerProject
from umbel.client.flower.records import SAMPLES
from umbel.client.local.arrays import Array, ArrayModel, NamedArrays
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import Evaluation
from umbel.client.training.array_client import ArrayClient
from umbel.client.user_code import where_raised
from umbel.sim.engines.flower.section import FlowerSection
from umbel.sim.flower.attempts import is_metric
from umbel.sim.flower.project import digest_of, project_of
from umbel.sim.flower.rows import scored_names
from umbel.sim.flower.server_optimizers import STRATEGIES, aggregation_of

_HERE = "umbel.sim.flower.native"


@dataclass(frozen=True, slots=True)
class Started:
    """What a ServerApp has started: its strategy, and the arguments of its `start`."""

    strategy: Strategy
    arrays: ArrayRecord
    n_rounds: int
    train_config: Config
    evaluate_config: Config
    evaluate_fn: Any  # (round, ArrayRecord) -> MetricRecord | None; None: none


class _Caught(BaseException):  # no `except Exception` of the app's may keep it
    def __init__(self, started: Started) -> None:
        super().__init__()
        self.started = started


class _IdleGrid(LocalGrid):
    def __init__(self, n_nodes: int) -> None:
        super().__init__()
        self._n_nodes = n_nodes

    def get_node_ids(self) -> Iterable[int]:
        return range(2, 2 + self._n_nodes)

    def answers(self, messages: Sequence[Message], *, timeout_s: float | None) -> Sequence[Message | None]:
        raise AppFailed(
            "the ServerApp sends messages before it starts a strategy, so umbel cannot take the strategy's place: "
            "leave --native out",
            "",
        )


def native_experiment(table: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The experiment of umbel's own that a table with [flower] describes. `base`: for the app's relative path.

    The table's other sections are kept: they say what the app does not. Raises `ValueError` with a sentence, for a
    strategy that umbel does not have, too.
    """
    given: Any = table.get("flower")
    if not isinstance(given, Mapping) or "app" not in given:
        raise ValueError("there is no Flower app to run natively: name it with --flower-app")
    if swept := [key for key in table.get("sweep", {}) if key.startswith("flower.")]:
        raise ValueError(
            f"sweep: {swept[0]} cannot be swept with --native, which reads the app once: leave one of them out"
        )
    section = FlowerSection(**given)
    project = project_of(section, base)
    started = _started(project, section.clients)
    own = {key: value for key, value in table.items() if key != "flower"}
    arguments = {
        "folder": str(project.folder),
        "run_config": json.dumps(dict(project.run_config), sort_keys=True),
        "samples": section.samples,
        "code": digest_of(project.folder),  # another code is another experiment
    }
    made = _rounds_of(started, section.clients)
    clients: dict[str, Any] = {"app": f"{_HERE}:make_client", "count": section.clients, "arguments": arguments}
    if started.evaluate_fn is not None:
        clients["test"] = f"{_HERE}:make_tester"
    elif (n_measure := made.pop("n_measure")) > 0:
        clients["test_clients"] = n_measure
    else:
        made["engine"] = {"score_every": started.n_rounds}
    made.pop("n_measure", None)
    if "secure_aggregation" in own:
        made["rounds"]["minimum"] = min(MINIMUM_LEAST, made["rounds"]["target"])
    made["fleet"] = {"partial_work": False} if "fleet" in own else None  # a call cannot be cut short
    return _merged({**{key: value for key, value in made.items() if value is not None}, "clients": clients}, own)


def _rounds_of(started: Started, n_nodes: int) -> dict[str, Any]:
    """The sections that the strategy stands for. Raises `ValueError` for one that umbel does not have."""
    strategy, kind = started.strategy, type(started.strategy)
    if kind not in (own := (FedAvg, FedProx, *STRATEGIES)):
        names = ", ".join(one.__name__ for one in own)
        raise ValueError(
            f"the app's strategy is {kind.__module__}.{kind.__name__}, and umbel's own are {names}: leave --native "
            "out, and the app's strategy itself makes the rounds"
        )
    assert isinstance(strategy, FedAvg), "the others are one, too"
    plain = FedAvg()
    for name in ("weighted_by_key", "arrayrecord_key", "configrecord_key", *_AGGREGATE):
        if getattr(strategy, name) != getattr(plain, name):
            raise ValueError(
                f"the app's strategy sets {name}, which umbel's own rounds do not have: leave --native out"
            )
    if started.evaluate_config.items() - started.train_config.items():
        raise ValueError(
            "the app's strategy has an evaluate_config of its own, and umbel sends train_config in every round: leave "
            "--native out"
        )
    training: dict[str, Any] = {"options": dict(started.train_config)} if started.train_config else {}
    if isinstance(strategy, FedProx):
        training["proximal_mu"] = strategy.proximal_mu
    target = _n_sampled(n_nodes, strategy.fraction_train, strategy.min_train_nodes)
    n_measure = _n_sampled(n_nodes, strategy.fraction_evaluate, strategy.min_evaluate_nodes)
    if max(target, n_measure, strategy.min_available_nodes) > n_nodes:
        raise ValueError(
            f"the app's strategy waits for {max(target, n_measure, strategy.min_available_nodes)} nodes, and there are "
            f"{n_nodes}: set flower.clients"
        )
    if target < 1:
        raise ValueError("the app's strategy trains on no node (fraction_train is 0)")
    rounds = {"count": started.n_rounds, "target": target, "over_selection": 1.0}
    aggregation = aggregation_of(strategy)
    made: dict[str, Any] = {"rounds": rounds, "training": training, "n_measure": n_measure}
    return {**made, "aggregation": aggregation} if aggregation else made


_AGGREGATE = ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn")


def _n_sampled(n_nodes: int, fraction: float, least: int) -> int:
    """As Flower's FedAvg draws."""
    return max(int(n_nodes * fraction), least)


def _merged(made: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says counts, also key by key of a section."""
    both = {**made, **own}
    for key in made.keys() & own.keys():
        if isinstance(made[key], Mapping) and isinstance(own[key], Mapping):
            both[key] = {**made[key], **own[key]}
    return both


def _started(project: FlowerProject, n_nodes: int) -> Started:
    """Run the ServerApp until it starts its strategy. Raises `ValueError` if it never does."""
    spec = project.component("serverapp")
    before = Strategy.start

    def start(
        self: Strategy, grid: Any, initial_arrays: ArrayRecord, num_rounds: int = 3, *_: Any, **more: Any
    ) -> NoReturn:
        trained, measured = (dict(more.get(name) or {}) for name in ("train_config", "evaluate_config"))
        raise _Caught(Started(self, initial_arrays, num_rounds, trained, measured, more.get("evaluate_fn")))

    def fit(*_: Any, **__: Any) -> NoReturn:
        raise AppFailed("the app's strategy is of Flower's older API, which umbel cannot read: leave --native out", "")

    before_fit = Server.fit
    Strategy.start, Server.fit = start, fit  # type: ignore[method-assign]
    try:
        run_server_app(load_object(spec, ServerApp, project.folder), _IdleGrid(n_nodes), project.run_config)
    except _Caught as caught:
        return caught.started
    except AppFailed as error:
        raise ValueError(str(error)) from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"the ServerApp {spec} failed with {where_raised(error)}") from error
    finally:
        Strategy.start, Server.fit = before, before_fit  # type: ignore[method-assign]
    raise ValueError(
        f"the ServerApp {spec} has ended without starting a strategy of flwr.serverapp.strategy: leave --native out"
    )


# --- the clients of such an experiment --------------------------------------------------------------------------------


def make_client(number: int, of: int, folder: str, run_config: str, samples: int, code: str) -> Client:
    """The client of one node. `code`: is only part of the experiment's name."""
    project = _project(folder, run_config)
    app: ClientApp = load_object(project.component("clientapp"), ClientApp, project.folder)
    host = AppHost(app, project.run_config, {"partition-id": number, "num-partitions": of})
    # Client 0 is made with the run's seed, and has the first model; of others only the shapes count.
    arrays = arrays_of(_started(project, of).arrays) if number == 0 else _shapes(folder, run_config, of)
    return NodeClient(InProcess(host), tuple(host.kinds), ArrayModel(arrays), samples)


def make_tester(folder: str, run_config: str) -> Client:
    """The client that measures new models, with the app's own `evaluate_fn`."""
    started = _started(_project(folder, run_config), 2)
    return ServerMeasure(arrays_of(started.arrays), started.evaluate_fn)


def _project(folder: str, run_config: str) -> FlowerProject:
    return project_of(FlowerSection(folder, run_config=json.loads(run_config)), Path())


@cache
def _shapes(folder: str, run_config: str, n_nodes: int) -> Mapping[str, Array]:
    return {
        name: np.zeros_like(one)
        for name, one in arrays_of(_started(_project(folder, run_config), n_nodes).arrays).items()
    }


class NodeClient(FlowerClient):
    """A node. It has umbel's names for accuracy and loss, so that results show them."""

    def evaluate_arrays(self, arrays: dict[str, Array]) -> Evaluation | None:
        found = FlowerClient.evaluate_arrays(self, arrays)
        return None if found is None else Evaluation(found.sample_count, scored_names(found.metrics))


class ServerMeasure(ArrayClient):
    """Measures models as the ServerApp does."""

    sample_count = 1

    def __init__(self, arrays: NamedArrays, evaluate_fn: Any) -> None:
        self.model = ArrayModel(arrays)
        self._evaluate_fn, self._n_measured = evaluate_fn, 0

    def train_arrays(self, arrays: dict[str, Array], plan: LocalPlan) -> NoReturn:
        raise WorkRefused("the ServerApp only measures")

    def evaluate_arrays(self, arrays: dict[str, Array]) -> Evaluation | None:
        self._n_measured += 1
        found = self._evaluate_fn(self._n_measured, array_record(arrays))
        if found is None:
            return None
        numbers = {name: float(one) for name, one in found.items() if name != SAMPLES and is_metric(one, name)}
        return Evaluation(1, scored_names(numbers))
