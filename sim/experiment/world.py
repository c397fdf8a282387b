"""The world of one trial: clients with their data, devices, a model and an engine; and the SHA-256 of each input."""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from umbel.aggregation.optimizers.build import optimizer_of
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.seeds import derive_seed
from umbel.client.training.shared_state import SharedState
from umbel.sim.data.data_set import DataSet, Described, LearningTask
from umbel.sim.data.load import load
from umbel.sim.data.partition.partition import Partition
from umbel.sim.data.partition.section import PartitionSection, features, split
from umbel.sim.data.population import Population, ShardedPopulation
from umbel.sim.data.sets.synthetic import SyntheticPopulation
from umbel.sim.engines.choose import named_clients_engine, named_engine
from umbel.sim.engines.clients.app import ClientApp, measuring_client
from umbel.sim.engines.clients.section import ClientsSection
from umbel.sim.engines.clients.work import ClientGroup
from umbel.sim.engines.device import found_device
from umbel.sim.engines.model import LOSSES, ModelRecipe
from umbel.sim.experiment.file import TrialSpec
from umbel.sim.experiment.kinds import layout_of_run
from umbel.sim.federation.local_work import Meter, batch_figures
from umbel.sim.federation.own_clients import OwnClients, drawn_to_test
from umbel.sim.federation.site_policies import SitePolicies
from umbel.sim.federation.world import World
from umbel.sim.fleet.build import devices_of
from umbel.sim.fleet.section import FleetSection
from umbel.sim.given import is_given
from umbel.sim.models import ModelSection, build, loss_name


@dataclass(frozen=True, slots=True)
class TrialWorld:
    """A trial's world and first model. `partition`: of `data`, if they were partitioned."""

    world: World
    model: ModelState
    data: DataSet | None = None
    partition: Partition | None = None


def make_world(trial: TrialSpec, folder: Path, data_folder: Path | None) -> TrialWorld:
    """Make a trial's world. `folder`: for relative paths in the file; `data_folder`: `--data`.

    Raises `ValueError`, `OSError` or `EngineError`, with a sentence that says what to do.
    """
    if trial.clients is not None:
        return _world_of_clients(trial, trial.clients, folder, data_folder)
    assert trial.data is not None, "checked when the file was read"
    assert trial.model is not None, "checked when the file was read"
    loaded = load(trial.data, data_folder, trial.seed)
    population, partition = population_of(loaded, trial.partition, trial.seed)
    recipe = recipe_of(trial.model, loaded, trial.seed)
    model = recipe.make()
    engine = named_engine(trial.engine.name, recipe, trial.engine.workers, trial.engine.device)
    draws_by_size = trial.run.rounds.weighting is Weighting.PROPORTIONAL
    fleet = devices_of(trial.fleet, trial.seed, folder, data_folder, draws_by_size=draws_by_size)
    device = found_device("cpu" if trial.engine.name == "ray" else trial.engine.device)  # "ray" has others
    meter = _meter(recipe, trial.model, device)
    sites = SitePolicies.read(trial.sites, folder, population.n_clients)
    world = World(population, fleet, engine, meter, trial.engine.masks, trial.measure, sites=sites)
    data = loaded if isinstance(loaded, DataSet) else None
    layout = layout_of_run(trial.run, SharedState(model).layout)
    return TrialWorld(
        world, ModelState.first(model.state_dict(), layout, optimizer_of(*trial.run.server_terms())), data, partition
    )


def _meter(recipe: ModelRecipe, section: ModelSection, device: torch.device) -> Meter:
    """Raises `EngineError` for a loss that cannot be found."""
    model = recipe.make().to(device)
    if recipe.loss in LOSSES:
        return Meter(model, LOSSES[recipe.loss], accuracy=True, device=device, mean_loss=recipe.mean_loss())
    figures = batch_figures(section.loss, recipe.mean_loss())
    return Meter(model, batch=figures, device=device, mean_loss=recipe.mean_loss())


def _world_of_clients(trial: TrialSpec, section: ClientsSection, folder: Path, data_folder: Path | None) -> TrialWorld:
    """The world of real `Client` objects. Their first model is client 0's."""
    loaded = None if trial.data is None else load(trial.data, data_folder, trial.seed)
    data, partition = (None, None) if loaded is None else population_of(loaded, trial.partition, trial.seed)
    app = client_app(section, data, trial.seed)
    first = app.make_first(ClientGroup.dealt(np.arange(1), data).share(0))
    shared = SharedState(first).under(trial.run.tensor_rules)
    clients = OwnClients(
        named_clients_engine(trial.engine.name, app, section.alive, trial.engine.workers, trial.engine.device),
        app.n_clients,
        data,
        drawn_to_test(app.n_clients, section.test_clients, trial.seed),
        None
        if section.test is None
        else measuring_client(section.test, None if data is None else data.test, trial.seed, section.arguments),
    )
    fleet = devices_of(trial.fleet, trial.seed, folder, data_folder)
    sites = SitePolicies.read(trial.sites, folder, app.n_clients)
    world = World(clients, fleet, None, None, trial.engine.masks, trial.measure, clients, sites)
    described = loaded if isinstance(loaded, DataSet) else None
    return TrialWorld(
        world,
        ModelState.first(
            shared.shared(), shared.layout_in(trial.run.training), optimizer_of(*trial.run.server_terms())
        ),
        described,
        partition,
    )


def client_app(section: ClientsSection, data: Population | None, seed: int) -> ClientApp:
    """The app of `[clients]`. `data`: what is dealt out. Raises `EngineError` for a function that is no make_client."""
    count = section.count if data is None else data.n_clients
    assert count is not None, "checked when the file was read"
    return ClientApp.of(section.app, count, seed, section.arguments, has_data=data is not None)


def population_of(
    loaded: DataSet | SyntheticPopulation, section: PartitionSection | None, seed: int
) -> tuple[Population, Partition | None]:
    """The clients' data, and the partition if the data were partitioned. Raises `ValueError` if it is impossible."""
    if not isinstance(loaded, DataSet):
        population: Population = loaded  # pyright: ignore[reportAssignmentType]  # `test` is cached
        return population, None
    assert section is not None, "checked when the file was read"
    return deal(loaded, section, seed)


def deal(data: DataSet, section: PartitionSection, seed: int) -> tuple[ShardedPopulation, Partition]:
    """Partition the data. Raises `ValueError` if that is not possible."""
    names = None if data.natural is None else data.natural.names
    partition = split(section, data.labels, seed, data.groups, names)
    if section.scheme == "natural" and section.holdout == 0 and data.natural is not None:
        held = dict(zip(data.natural.names, data.natural.holdouts, strict=True))
        holdouts = [held[name] for name in partition.names or ()]
        own = tuple(holdouts) if any(len(one) for one in holdouts) else None
    else:
        own = None if partition.holdouts is None else tuple(data.rows[one] for one in partition.holdouts)
    shards = tuple(data.rows[shard] for shard in partition.shards)
    transform = features(section, partition.n_clients, seed)
    population = ShardedPopulation(data.samples, shards, data.test, own, transform)
    population.data_of(np.zeros(1, dtype=np.int64))  # refuse inputs that cannot be transformed before the first round
    return population, replace(partition, shards=shards, holdouts=own)


def recipe_of(section: ModelSection, data: Described, seed: int) -> ModelRecipe:
    """The recipe by which any process makes the trial's model."""
    arguments = {
        "section": {
            "name": section.name,
            "hidden": None if section.hidden is None else list(section.hidden),
            "arguments": dict(section.arguments),
        },
        "data": {
            "name": data.name,
            "task": data.task.value,
            "n_classes": data.n_classes,
            "input_shape": list(data.input_shape),
        },
        "seed": seed,
    }
    seed_of_tables = derive_seed(seed, "model's other tables")
    return ModelRecipe(f"{__name__}:made_model", arguments, loss_name(section.loss), seed_of_tables)


@dataclass(frozen=True, slots=True)
class _DataFacts:
    """What a model must know of its data, in another process."""

    name: str
    task: LearningTask
    n_classes: int
    input_shape: tuple[int, ...]


def made_model(section: Mapping[str, Any], data: Mapping[str, Any], seed: int) -> nn.Module:
    """The model of a recipe from `recipe_of`."""
    hidden = None if section["hidden"] is None else tuple(section["hidden"])
    facts = _DataFacts(data["name"], LearningTask(data["task"]), data["n_classes"], tuple(data["input_shape"]))
    return build(ModelSection(section["name"], hidden, section["arguments"]), facts, seed)


Digests = Mapping[str, str]


def digests_of(trial: TrialSpec, data: DataSet | None, folder: Path, data_folder: Path | None) -> dict[str, str]:
    """The SHA-256 of each input, by a name for sentences. `folder`, `data_folder`: as for `make_world`.

    Of a user's module only its file counts, not its imports; of data, the values.
    """
    fleet, model, clients = trial.fleet or FleetSection(), trial.model, trial.clients
    found = {f"the run ({trial.name})": _of_run(trial)}
    if data is not None and trial.data is not None:
        found[f"data ({trial.data.name})"] = data_digest(data)
    if fleet.recorded is not None:
        found[f"fleet.recorded ({fleet.recorded})"] = _of_file(folder / fleet.recorded)
    if fleet.presence is not None:
        found[f"fleet.presence.file ({fleet.presence.file})"] = _of_file(folder / fleet.presence.file)
    if fleet.network is not None and fleet.network.phones is not None and data_folder is not None:
        found[f"fleet.network.phones ({fleet.network.phones})"] = _of_file(data_folder / fleet.network.phones)
    for name in () if trial.sites is None else dict.fromkeys(trial.sites.files):
        if name:
            found[f"sites.policy ({name})"] = _of_file(folder / name)
    named = {} if model is None else {"model.name": model.name}
    if clients is not None:
        named |= {"clients.app": clients.app, "clients.test": clients.test or ""}
    for key, name in named.items():
        if ":" in name and (file := _module_file(name)) is not None:
            found[f"{key} ({name}, in {file.name})"] = _of_file(file)
    return found


def changed(before: Digests, now: Digests) -> list[str]:
    """The names of changed inputs."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _of_run(trial: TrialSpec) -> str:
    """Of its point and its run file, without the number of rounds, which may grow (`extension.py`)."""
    parts = {one.name: getattr(trial.run, one.name) for one in fields(trial.run)}
    parts["rounds"] = replace(trial.run.rounds, count=1)
    return hashlib.sha256(repr((trial.point, parts)).encode()).hexdigest()


def _module_file(name: str) -> Path | None:
    """The file of the user's module; None without one, and for an object, whose name holds its own digest."""
    if is_given(name):
        return None
    file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    return None if file is None else Path(file)


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def data_digest(data: DataSet) -> str:
    """The SHA-256 of a data set's values, and of who holds them."""
    digest = hashlib.sha256(str(data.n_classes).encode())
    natural = data.natural
    parts = [
        data.samples.inputs,
        data.samples.targets,
        data.test.inputs,
        data.test.targets,
        torch.from_numpy(data.rows),
    ]
    if natural is not None:
        digest.update("\0".join(natural.names).encode())
        parts += [torch.from_numpy(one) for one in (*natural.shards, *natural.holdouts)]
    for chunk in _chunks(parts):
        digest.update(chunk)
    return digest.hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor] | Sequence[Tensor]) -> str:
    """The SHA-256 of tensors, with their names if they have any."""
    digest = hashlib.sha256()
    if isinstance(tensors, Mapping):
        digest.update("\0".join(tensors).encode())
        tensors = list(tensors.values())
    for chunk in _chunks(tensors):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(tensors: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """The type, the shape and the values of each tensor."""
    for one in tensors:
        yield f"\0{one.dtype}\0{tuple(one.shape)}\0".encode()
        yield _bytes(one)


def _bytes(values: Tensor) -> memoryview:
    flat = torch.empty(values.numel(), dtype=values.dtype)  # only contiguous memory can be viewed as bytes
    return flat.copy_(values.detach().reshape(-1)).view(torch.uint8).numpy().data
