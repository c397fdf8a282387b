"""Find errors of an experiment before its first round, at every point of a sweep.

Data are read and partitioned, files of devices are read, and each model is made once and applied to two samples.
"""

import contextlib
from collections.abc import Generator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.kinds import require_fitting, require_steppable
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.statistics import careful_of_statistics
from umbel.aggregation.phrases import counted
from umbel.aggregation.run.file import RunFile
from umbel.client.app import Client
from umbel.client.errors import WorkRefused
from umbel.client.training.probe import memory_free_bytes
from umbel.client.training.shared_state import SharedState
from umbel.sim.data.data_set import DataSet, LearningTask, SampleSet
from umbel.sim.data.load import DataSection, load
from umbel.sim.data.partition.section import PartitionSection
from umbel.sim.data.population import Population
from umbel.sim.data.sets.synthetic import SyntheticPopulation
from umbel.sim.engines.choose import stacked_engine
from umbel.sim.engines.clients.alive import other_model
from umbel.sim.engines.clients.app import ClientApp, measuring_client
from umbel.sim.engines.clients.section import ClientsSection
from umbel.sim.engines.clients.sequential import SequentialClients
from umbel.sim.engines.clients.work import ClientGroup
from umbel.sim.engines.device import found_device, n_cores
from umbel.sim.engines.model import LOSSES, ModelRecipe
from umbel.sim.engines.work import EngineError
from umbel.sim.engines.workers.ray_cluster import RAY_MISSING
from umbel.sim.engines.workers.threads import require_no_draws
from umbel.sim.experiment.file import EngineSection, TrialSpec
from umbel.sim.experiment.kinds import layout_of_run
from umbel.sim.experiment.world import client_app, population_of, recipe_of
from umbel.sim.federation.measures import require_measurable
from umbel.sim.federation.own_clients import OwnClients
from umbel.sim.federation.possible import SimulationError, require_possible
from umbel.sim.federation.site_policies import SitePolicies
from umbel.sim.fleet.build import devices_of
from umbel.sim.fleet.section import FleetSection
from umbel.sim.models import ModelError, ModelSection, build

_COPIES = 15  # of a model at least; 14.6 to 21 were measured at the peak, by engine and codec
_SHOWN = 2
_FAR = 3  # how many times too large or too small a number may be
_WORKERS_A_CORE = 8


def rehearse(trials: Sequence[TrialSpec], folder: Path, data_folder: Path | None) -> tuple[str, ...]:
    """Raise the error that the first run of each point would raise, with the point's name. `folder`, `data_folder`: as
    for `make_world`.

    Returns warnings, each once.
    """
    checks = _Rehearsal(folder, data_folder)
    seen, careful = set[str](), dict[str, None]()
    for trial in trials:
        if trial.label in seen:
            continue  # other seeds have the same clients and data
        seen.add(trial.label)
        with naming_point(trial.label):
            careful |= dict.fromkeys(filter(None, checks.check(trial)))
    return tuple(careful)


def _careful_of_total(file: RunFile, population: Population) -> str:
    """A warning if `total_samples` is far from what these clients have."""
    said = file.training.total_samples
    if said is None:
        return ""
    there = int(population.sizes(np.arange(population.n_clients)).sum())
    if there / _FAR <= said <= there * _FAR:
        return ""
    return (
        f"training.total_samples is {said:,}, but the {counted(population.n_clients, 'client')} of this experiment "
        f"have {there:,} samples together: the algorithm's mean over all clients will be far too "
        f"{'large' if said < there else 'small'}"
    )


@contextlib.contextmanager
def naming_point(label: str) -> Generator[None]:
    """Add the point's name to an error that is raised inside."""
    try:
        yield
    except (ValueError, EngineError, SimulationError) as error:
        if not label:
            raise
        raise ValueError(f"{error} (with {label})") from error


class _Rehearsal:
    """Checks, each made once for equal sections. Only the last data are kept."""

    def __init__(self, folder: Path, data_folder: Path | None) -> None:
        self._folder, self._data_folder = folder, data_folder
        self._loaded = lru_cache(1)(self._load)
        self._population = lru_cache(1)(self._dealt)
        self._layout = lru_cache(None)(self._checked_model)
        self._fleet = lru_cache(None)(self._built)

    def check(self, trial: TrialSpec) -> tuple[str, ...]:
        """Returns warnings, or an empty text in place of one that is not needed."""
        if trial.engine.name == "ray" and find_spec("ray") is None:
            raise EngineError(RAY_MISSING)
        if trial.engine.name != "ray":  # which uses devices of other machines
            found_device(trial.engine.device)
        _require_cores(trial.engine)
        self._fleet(trial.fleet, trial.seed)
        population = None if trial.data is None else self._population(trial.data, trial.partition, trial.seed)
        if trial.data is not None:
            _require_labels(trial.fleet, self._loaded(trial.data, trial.seed))
        if trial.clients is not None:
            return self._check_clients(trial, trial.clients, population)
        assert trial.model is not None, "checked when the file was read"
        assert trial.data is not None, "checked when the file was read"
        assert population is not None, "there are data"
        loaded = self._loaded(trial.data, trial.seed)
        require_measurable(trial.measure, population, loaded if isinstance(loaded, DataSet) else None)
        layout = layout_of_run(trial.run, self._layout(trial.model, trial.data, trial.seed, trial.engine.name))
        require_possible(trial.run, layout, population)
        unchecked = SitePolicies.read(trial.sites, self._folder, population.n_clients).unchecked_words
        has_equal_sites = trial.partition is not None and trial.partition.scheme == "iid"
        statistics = "" if has_equal_sites else careful_of_statistics(layout, trial.run.tensor_rules)
        return statistics, unchecked, _careful_of_total(trial.run, population)

    def _load(self, data: DataSection, seed: int) -> DataSet | SyntheticPopulation:
        return load(data, self._data_folder, seed)

    def _dealt(self, data: DataSection, partition: PartitionSection | None, seed: int) -> Population:
        population, _ = population_of(self._loaded(data, seed), partition, seed)
        return population

    def _check_clients(self, trial: TrialSpec, section: ClientsSection, data: Population | None) -> tuple[str, ...]:
        """Make client 0 and the last one, and the client that measures models. Returns warnings, as `check`."""
        app, rules = client_app(section, data, trial.seed), trial.run.tensor_rules
        if trial.engine.name in ("processes", "ray"):
            app.to_json()  # raises for a function that other processes cannot import
        layouts = [self._layout_of(app, number, data, trial.run) for number in (0, app.n_clients - 1)]
        if difference := layouts[0].difference(layouts[1]):
            raise EngineError(other_model(app, app.n_clients - 1, difference))
        if section.test is not None:
            tester = measuring_client(section.test, None if data is None else data.test, trial.seed, section.arguments)
            if difference := layouts[0].difference(_shared_layout(tester, section.test, trial.run)):
                raise EngineError(
                    f"the model of {section.test} is not the model of {section.app}: {difference}; give it the same "
                    "tensors, because it measures that model"
                )
        clients = OwnClients(SequentialClients(app, 1), app.n_clients, data, np.arange(0))
        require_possible(trial.run, layouts[0], clients, measure_themselves=True)
        unchecked = SitePolicies.read(trial.sites, self._folder, app.n_clients).unchecked_words
        return careful_of_statistics(layouts[0], rules), unchecked

    def _layout_of(self, app: ClientApp, number: int, data: Population | None, file: RunFile) -> Layout:
        made = app.make(number, ClientGroup.dealt(np.array([number]), data).share(0))
        _require_room(made.model)
        if not any(one.requires_grad for one in made.model.parameters()):
            raise EngineError(f"the model of client {number} has no parameter to train: give it one")
        return _shared_layout(made, f"client {number} of {app.name}", file)

    def _built(self, fleet: FleetSection | None, seed: int) -> None:
        devices_of(fleet, seed, self._folder, self._data_folder)

    def _checked_model(self, model: ModelSection, data: DataSection, seed: int, engine: str) -> Layout:
        loaded = self._loaded(data, seed)
        if ":" not in model.name:
            with torch.device("meta"):
                _require_room(build(model, loaded, seed))
        recipe = recipe_of(model, loaded, seed)
        made = recipe.make()
        _require_room(made)
        shown = SampleSet(loaded.test.inputs[:_SHOWN], loaded.test.targets[:_SHOWN])
        if not any(one.requires_grad for one in made.parameters()):
            raise ModelError(f"model {model.name} has no parameter to train: give it one, or set requires_grad")
        if recipe.loss in LOSSES:
            if isinstance(loaded, DataSet) and loaded.task is LearningTask.OTHER:
                raise ModelError(f"the targets of {loaded.name} are no classes, so they need a loss; set model.loss")
            _require_answers(made, model.name, shown, loaded.n_classes, loaded.name)
        else:
            _require_loss(made, recipe, model, shown)
        if engine in ("processes", "ray"):
            recipe.to_json()  # raises for a model that other processes cannot make
        if engine == "batched":
            _require_stackable(recipe, shown)
        if engine == "threads":
            require_no_draws(made, shown)
        return SharedState(made).layout


def _require_labels(fleet: FleetSection | None, data: DataSet | SyntheticPopulation) -> None:
    """Raise `ModelError` for devices that change labels of data without classes."""
    malicious = None if fleet is None else fleet.malicious
    if malicious is None or not malicious.share or "label-flip" not in malicious.kinds:
        return
    if isinstance(data, DataSet) and data.task is LearningTask.OTHER:
        raise ModelError(
            f'malicious devices of the kind "label-flip" need classes, and the targets of {data.name} are none; choose '
            "other fleet.malicious.kinds"
        )


def _shared_layout(client: Client, name: str, file: RunFile) -> Layout:
    """The layout of the tensors that the coordinator has. Raises `EngineError` for rules that do not fit the model."""
    rules = file.tensor_rules
    try:
        layout = SharedState(client).under(rules).layout_in(file.training)
        require_fitting(rules, layout, file.coarsest_step)
        require_steppable(file.aggregation, file.training, layout)
    except (LayoutError, WorkRefused) as error:
        raise EngineError(f"{name}: {error}") from error
    return layout


def _require_stackable(recipe: ModelRecipe, shown: SampleSet) -> None:
    try:
        stacked_engine(recipe).try_out(shown)
    except EngineError as error:
        raise EngineError(f'{error}; set name = "auto" in [engine], which then chooses another engine') from error


def _require_cores(engine: EngineSection) -> None:
    """Raise `EngineError` for too many workers: each takes memory and, as a process, seconds to start."""
    most = _WORKERS_A_CORE * n_cores()
    if engine.workers is not None and engine.workers > most and engine.name in ("auto", "threads", "processes"):
        raise EngineError(
            f"engine.workers is {engine.workers}, but this machine has {counted(n_cores(), 'core')}: more than {most} "
            "workers would only wait for each other; leave the key out to have one worker for each core"
        )


def _require_room(model: nn.Module) -> None:
    n_bytes = sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))
    free = memory_free_bytes()
    if free is not None and _COPIES * n_bytes > free:
        raise ModelError(
            f"this model has {n_bytes / 1e9:,.2f} GB of weights, and a simulation holds about {_COPIES} copies of "
            f"them, but only {free / 1e9:,.2f} GB of memory are free; use a smaller model, or a machine with more "
            "memory"
        )


def _require_answers(model: nn.Module, name: str, shown: SampleSet, n_classes: int, data: str) -> None:
    """Raise `ModelError` unless it has an answer of the right shape for two samples."""
    shape = tuple(shown.inputs.shape[1:])
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            answers = model(shown.inputs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ModelError(
            f"model {name} cannot take the inputs of {data} ({shown.inputs.dtype} of shape {shape}): "
            f"{(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error
    wanted = (len(shown), n_classes)
    if not isinstance(answers, torch.Tensor) or answers.ndim != len(wanted) or not _fits(answers, wanted):
        got = tuple(answers.shape) if isinstance(answers, torch.Tensor) else type(answers).__name__
        raise ModelError(
            f"model {name} returns {got} for {len(shown)} samples of {data}; it must return {wanted}, a number for "
            f"each sample and each of {n_classes} classes"
        )


def _require_loss(model: nn.Module, recipe: ModelRecipe, section: ModelSection, shown: SampleSet) -> None:
    """Raise `ModelError` unless the loss of two samples is one finite number that depends on the model."""
    loss = recipe.mean_loss()
    try:
        with torch.random.fork_rng(devices=[]):
            found = cast(object, loss(model.eval()(shown.inputs), shown.targets))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(
            f"the loss {section.loss} cannot be computed of the answers of the model {section.name} and the targets "
            f"({shown.targets.dtype} of shape {tuple(shown.targets.shape)}): "
            f"{(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.requires_grad:
        got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise ModelError(
            f"the loss {section.loss} returned {got}; it must return one number as a tensor, the mean over the batch, "
            "that depends on the model's answers"
        )


def _fits(answers: torch.Tensor, wanted: tuple[int, int]) -> bool:
    return len(answers) == wanted[0] and answers.shape[1] >= wanted[1]
