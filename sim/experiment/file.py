"""An experiment's file: a run file, and what the world is like in which the run is simulated.

```toml
name = "digits"
seeds = [0, 1, 2]              # one run for each: data, split, devices and cohorts are drawn anew; default [0]
target_accuracy = 0.9          # the summary says how soon a run reaches it
stop_at_target = false         # true: there the run ends
best_over = ["training.proximal_mu"]  # names of [sweep]; the summary says which of their values is the best

[data]                         # sim/data/load.py
name = "digits"

[partition]                    # sim/data/partition/section.py; "natural": by the data's own holders
scheme = "dirichlet"
clients = 100
alpha = 0.3

[model]                        # sim/models.py; default: an MLP
name = "mlp"
hidden = [64]

[fleet]                        # sim/fleet/section.py; without it nobody is too slow, lost, or asked in excess

# [clients]                    # sim/engines/clients/section.py; instead of [model]: real `Client` objects
# app = "my_hospital:make_client"

# [flower]                     # sim/engines/flower/section.py; instead of [data] and [model]: a whole Flower app
# app = "my_project"

[engine]
name = "auto"                  # "sequential", "batched", "threads", "processes", "ray"
workers = 2                    # of the last three engines; default: one for each core, or for each GPU
score_every = 1                # measure the model on the test set after every N rounds
masks = false                  # whether clients of secure rounds make keys and masks; the sum is the same either way

[measure]                      # sim/federation/measures.py; more figures in every row
updates = true

[sites]                        # sim/federation/site_policies.py; what each site's policy allows
policy = "site.toml"

[sweep]                        # simulates every combination of these
"training.proximal_mu" = [0, 0.1, 1.0]

[[sweep.work]]                 # settings that go together have a label
label = "part of it counts"
"rounds.window_s" = 60.0

[[sweep.work]]
label = "all or nothing"
"rounds.window_s" = 600.0
"fleet.partial_work" = false

[rounds]                       # from here on: docs/reference/run-file.md
count = 50
target = 10
```
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.canonical import canonical
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.of_experiment import TOP_KEYS, WORLD_KEYS
from umbel.aggregation.types import require_within
from umbel.client.operator.run_files import run_file_hint
from umbel.client.toml_file import findings, read_toml
from umbel.sim.data.load import DataSection
from umbel.sim.data.partition.section import PartitionSection
from umbel.sim.engines.clients.section import ClientsSection
from umbel.sim.engines.device import require_device_name
from umbel.sim.engines.flower.section import FlowerSection
from umbel.sim.experiment.flower_run import run_of_app
from umbel.sim.federation.measures import MeasureSection
from umbel.sim.federation.site_policies import SitesSection
from umbel.sim.fleet.section import FleetSection
from umbel.sim.models import ModelSection

EngineName = Literal["auto", "sequential", "batched", "threads", "processes", "ray"]
NO_APP: Mapping[str, str] = {
    "threads": 'clients draw from the process\'s generators, which threads would share; choose "processes"',
    "batched": 'it cannot prove that stacked training treats a client\'s own code the same; choose "sequential" or '
    '"processes"',
}  # why an engine cannot run [clients]
ATTEMPTS_MAX = 200  # for a round, if the file has no limit: virtual time is free, and some rounds can never succeed
SEEDS_MAX, POINTS_MAX = 1000, 10_000
_NAME_BYTES_MAX = 200  # most file systems allow 255 bytes, and the seed takes some
BYTES_MAX = 1 << 22
_TABLE = TypeAdapter(dict[str, Any])


@dataclass(frozen=True, slots=True)
class EngineSection:
    """How the clients are trained. Engines differ only by rounding."""

    name: EngineName = "auto"
    workers: int | None = None
    device: str = "cpu"  # "cpu", "cuda" (the first GPU; workers share all GPUs), or one of several, "cuda:1"
    score_every: int = 1
    masks: bool = False  # make real keys, shares and masks in secure rounds: slower, and the same records and models
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if self.workers is not None:
            require_within(self.workers, "workers", 1, 4096)
        require_device_name(self.device)
        require_within(self.score_every, "score_every", 1, 1_000_000)


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """One run to simulate: the file with one value of each swept key, and one seed."""

    point: Mapping[str, object]  # swept keys and their values; the label of settings that go together
    seed: int
    run: RunFile  # with this seed, and `ATTEMPTS_MAX` if it has no limit
    data: DataSection | None  # None: the clients bring their own
    model: ModelSection | None  # None: the clients' own
    partition: PartitionSection | None
    fleet: FleetSection | None  # None: clients without devices, so `run` asks exactly the target
    engine: EngineSection
    measure: MeasureSection = field(default_factory=MeasureSection)
    clients: ClientsSection | None = None
    sites: SitesSection | None = None  # None: no site has a policy
    flower: FlowerSection | None = None  # the app whose ServerApp makes the rounds; None: umbel does
    stop_at_target: float | None = None  # the accuracy at which the run ends; None: after its last round

    @property
    def label(self) -> str:
        """Its point in words, such as `proximal_mu=0.1`; empty without a sweep."""
        return point_label(self.point)

    @property
    def name(self) -> str:
        """Its point and its seed in words."""
        return ", ".join(filter(None, (self.label, f"seed {self.seed}")))

    @property
    def folder(self) -> str:
        """A name for its files, of its point and its seed."""
        kept = self.point_folder
        return f"{kept}_seed-{self.seed}" if kept else f"seed-{self.seed}"

    @property
    def point_folder(self) -> str:
        """A name for its point's files; empty without a sweep."""
        return file_name(self.label)


@dataclass(frozen=True, slots=True)
class Experiment:
    """All runs of an experiment."""

    name: str
    trials: tuple[TrialSpec, ...]
    target_accuracy: float | None
    text: str = field(repr=False)  # canonical (RFC 8785): equal experiments have equal texts
    folder: Path = field(default_factory=Path)  # for relative paths in it
    notes: tuple[str, ...] = ()  # sentences about keys of the file that have no effect in it
    best_over: tuple[str, ...] = ()  # names of the sweep, of whose values the results say which is the best


def read_experiment(path: Path, changes: Mapping[str, object] | None = None) -> Experiment:
    """The experiment of a file. Raises `OSError`, or `ValueError` with a sentence that names the file and the key.

    `changes`: values that replace the file's, by dotted key.
    """
    table = read_table(path)
    try:
        return experiment_of(table, changes, path.parent)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_table(path: Path) -> dict[str, Any]:
    """The table of an experiment's file. Raises `OSError`, or `ValueError` with a sentence."""
    try:
        return read_toml(path, _TABLE, BYTES_MAX, "experiment", run_file_hint)[1]
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}") from error
    except IsADirectoryError as error:
        hint = f"; a Flower app is simulated by --flower-app {path}" if (path / "pyproject.toml").is_file() else ""
        raise ValueError(f"{path} is a folder, and an experiment is a TOML file{hint}") from error


def experiment_of(
    table: Mapping[str, Any], changes: Mapping[str, object] | None = None, folder: Path | None = None
) -> Experiment:
    """The experiment of a table like that of a TOML file. Raises `ValueError`."""
    whole = with_changes(table, changes)
    if "local" in whole:
        raise ValueError(
            "the section [local] is now a part of [training], which production reads too: move momentum, weight_decay "
            "and clip_norm there, and leave [local] out"
        )
    if "seed" in whole:  # a run file as it is
        if "seeds" in whole:
            raise ValueError(
                "the file has `seed` and `seeds`: list the seeds of its runs in `seeds`, and leave `seed` out"
            )
        whole["seeds"] = [whole.pop("seed")]
    text = canonical({"seeds": [0], **whole})
    try:
        top = _TOP.validate_json(json.dumps({key: whole.pop(key) for key in TOP_KEYS if key in whole}), strict=True)
    except ValidationError as error:
        raise ValueError(findings(error, run_file_hint)) from error
    for key in changes or {}:
        if key in top.swept:
            raise ValueError(
                f"{key} is set by the sweep, so a value outside the sweep has no effect; change the values in sweep, "
                "or remove the sweep with sweep={}"
            )
    stop_at = top.target_accuracy if top.stop_at_target else None
    trials = tuple(_trial(whole, point, seed, stop_at) for point in points(top.sweep) for seed in top.seeds)
    if len({one.folder for one in trials}) < len(trials):
        raise ValueError(
            'sweep: two labels or values differ only in characters that umbel writes as "_" in folder names; make them '
            "differ in a letter or digit"
        )
    _require_timed_sweep(trials, top.swept)
    notes = _notes(trials, whole)
    return Experiment(trials[0].run.name, trials, top.target_accuracy, text, folder or Path(), notes, top.best_over)


def with_changes(table: Mapping[str, Any], changes: Mapping[str, object] | None) -> dict[str, Any]:
    """A copy of a table, with these values by dotted key. Raises `ValueError` for what a file cannot hold."""
    whole: dict[str, Any] = _plain(table)
    for key, value in (changes or {}).items():
        _put(whole, key, _plain(value, key))
    return whole


@dataclass(frozen=True, slots=True)
class _Top:
    seeds: tuple[int, ...] = (0,)
    target_accuracy: float | None = None
    stop_at_target: bool = False
    best_over: tuple[str, ...] = ()
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        require_within(len(self.seeds), "the number of seeds", 1, SEEDS_MAX)
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds has one seed twice; each seed is one run, so name it once")
        for seed in self.seeds:
            require_within(seed, "a seed", 0, (1 << 63) - 1)
        if self.target_accuracy is not None:
            require_within(self.target_accuracy, "target_accuracy", 0.0, 1.0)
        elif self.stop_at_target:
            raise ValueError("stop_at_target ends a run at the target_accuracy, which is missing: set it")
        for name, values in self.sweep.items():
            check_values(name, values)
        self._require_swept(self.best_over)
        for key in self.swept:
            if key == "seed" or key.split(".")[0] in TOP_KEYS:
                raise ValueError(f"sweep: {key} cannot be swept; to try several seeds, list them in the key seeds")
        settings_of = [{key for one in values for key in settings(name, one)} for name, values in self.sweep.items()]
        for i, keys in enumerate(settings_of):
            if both := sorted(keys & set[str]().union(*settings_of[:i])):
                raise ValueError(f"sweep: {both[0]} is set in two places, and only one would count; set it in one")
        n_points = math.prod(len(values) for values in self.sweep.values())
        require_within(n_points * len(self.seeds), "the number of runs of the sweep", 1, POINTS_MAX)

    def _require_swept(self, names: Sequence[str]) -> None:
        """Raise `ValueError` unless `best_over` has different names of the sweep."""
        if len(set(names)) < len(names):
            raise ValueError("best_over has one name twice; name it once")
        if unknown := [name for name in names if name not in self.sweep]:
            known = f"its names are {', '.join(self.sweep)}" if self.sweep else "the file has no sweep"
            raise ValueError(
                f'best_over: "{unknown[0]:.80}" is not a name of the sweep, so it has no values to compare; {known}'
            )

    @property
    def swept(self) -> set[str]:
        """Every key that the sweep sets."""
        return {key for name, values in self.sweep.items() for one in values for key in settings(name, one)}


@dataclass(frozen=True, slots=True)
class _Worlds:
    """The sections that a run file does not have."""

    data: DataSection | None = None
    model: ModelSection | None = None
    partition: PartitionSection | None = None
    fleet: FleetSection | None = None
    engine: EngineSection = field(default_factory=EngineSection)
    measure: MeasureSection = field(default_factory=MeasureSection)
    clients: ClientsSection | None = None
    sites: SitesSection | None = None
    flower: FlowerSection | None = None

    def __post_init__(self) -> None:
        if self.flower is not None:  # `run_of_app` has seen what goes with it
            return
        if self.clients is not None:
            self._require_simulated(self.clients)
        if self.data is None:
            self._require_own_data()
        elif self.data.is_synthetic and self.partition is not None:
            raise ValueError(
                "synthetic data are made for each client, so there is nothing to partition; leave [partition] out"
            )
        elif not self.data.is_synthetic and self.partition is None:
            raise ValueError(
                "[partition] is missing: give a scheme and the number of clients that share the data, or scheme = "
                '"natural"'
            )

    def _require_own_data(self) -> None:
        if self.clients is None:
            raise ValueError("[data] is missing: name the data to simulate with, or [clients] that bring their own")
        if self.clients.count is None:
            raise ValueError(
                "clients.count is missing: without [data] the clients bring their own, so say how many there are"
            )
        if self.partition is not None:
            raise ValueError("[partition] deals out [data], which this file does not have; leave [partition] out")

    def _require_simulated(self, clients: ClientsSection) -> None:
        """Refuse what would have no effect beside clients that train themselves, with the reason."""
        if self.data is not None and clients.count is not None:
            raise ValueError("clients.count is only for clients that bring their own data; [partition] says how many")
        if self.model is not None:
            raise ValueError("the clients of [clients] bring their own model; leave [model] out")
        if self.engine.name in NO_APP:
            raise ValueError(f'the engine "{self.engine.name}" cannot run [clients]: {NO_APP[self.engine.name]}')
        if self.engine.device != "cpu" and self.engine.name != "ray":  # which must know that its actors need a GPU
            raise ValueError("the clients of [clients] choose their own device; leave engine.device out")
        if self.measure.train_loss or self.measure.groups:
            raise ValueError(
                "[measure] train_loss and groups need a loss that the simulator knows, and the clients of [clients] "
                "bring their own; leave the two out, and have `evaluate` return what you want to see"
            )
        malicious = None if self.fleet is None else self.fleet.malicious
        if malicious is not None and malicious.share and "label-flip" in malicious.kinds:
            raise ValueError(
                'malicious devices of the kind "label-flip" need labels that the simulator can change, and the data of '
                "[clients] are their own; choose other fleet.malicious.kinds"
            )


_TOP, _WORLD, _RUN = TypeAdapter(_Top), TypeAdapter(_Worlds), TypeAdapter(RunFile)


def _trial(table: Mapping[str, Any], chosen: Mapping[str, Any], seed: int, stop_at: float | None) -> TrialSpec:
    point = {name: value[LABEL] if goes_together(value) else value for name, value in chosen.items()}
    whole = json.loads(json.dumps(table))
    for name, value in chosen.items():
        for key, one in settings(name, value).items():
            _put(whole, key, one)
    parts = {key: whole.pop(key) for key in WORLD_KEYS if key in whole}
    if "flower" in parts:
        whole = run_of_app(whole, parts)
    whole["seed"] = seed
    try:
        world = _WORLD.validate_json(json.dumps(parts), strict=True)
        run = _RUN.validate_json(json.dumps(whole), strict=True)
    except ValidationError as error:
        at = f" (with {point_label(point)})" if point else ""
        raise ValueError(f"{findings(error, run_file_hint)}{at}") from error
    if stop_at is not None and world.flower is not None:
        raise ValueError("the ServerApp of a Flower app decides when its run ends: leave stop_at_target out")
    if world.fleet is None and world.flower is None:
        run = without_devices(run)
    if run.rounds.attempts_max is None:
        run = replace(run, rounds=replace(run.rounds, attempts_max=ATTEMPTS_MAX))
    brings_model = world.clients is not None or world.flower is not None
    model = ModelSection() if world.model is None and not brings_model else world.model
    parts_of_world = (world.data, model, world.partition, world.fleet, world.engine)
    others = (world.measure, world.clients, world.sites, world.flower)
    return TrialSpec(point, seed, run, *parts_of_world, *others, stop_at)


# --- without [fleet] --------------------------------------------------------------------------------------------------

_OF_DEVICES = ("over_selection", "window_s", "window_min_s")  # keys of [rounds] without effect if there are no devices
_ADD_FLEET = "add [fleet] (an empty one has ordinary devices)"


def without_devices(run: RunFile) -> RunFile:
    """The run as it is simulated without `[fleet]`: each round asks exactly its target, since every client reports.

    Raises `ValueError` for a run that learns from devices.
    """
    if run.rounds.self_tuning:
        raise ValueError(
            "rounds.self_tuning learns from the times at which devices report, but without [fleet] no time passes: "
            f"{_ADD_FLEET}, or set self_tuning = false"
        )
    override = tuple(one if one.over_selection is None else replace(one, over_selection=1.0) for one in run.override)
    return replace(run, rounds=replace(run.rounds, over_selection=1.0), override=override)


def _require_timed_sweep(trials: Sequence[TrialSpec], swept: set[str]) -> None:
    """Raise `ValueError` for a sweep over a key that has no effect, whose points would all be the same."""
    keys = [f"rounds.{name}" for name in _OF_DEVICES if f"rounds.{name}" in swept]
    if keys and any(one.fleet is None for one in trials):
        raise ValueError(
            f"sweep: {keys[0]} has no effect without [fleet], because then no client is late, so its values would give "
            f"the same run; {_ADD_FLEET}, or leave the key out of the sweep"
        )


def _notes(trials: Sequence[TrialSpec], table: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence if the file sets keys that have no effect without `[fleet]`."""
    rounds = table.get("rounds", {})
    named = [name for name in _OF_DEVICES if name in rounds and (name, rounds[name]) != ("over_selection", 1)]
    if not named or all(one.fleet is not None for one in trials):
        return ()
    verb = "have" if len(named) > 1 else "has"
    return (
        f"{' and '.join(f'rounds.{name}' for name in named)} {verb} no effect without [fleet]: each round asked "
        f"exactly its target, and nobody was late. To simulate devices, {_ADD_FLEET}.",
    )


def _plain(value: Any, key: str = "") -> Any:
    """A copy of a table's value. Raises `ValueError`, with its key, for a value that a run file cannot hold."""
    match value:
        case dict():
            table = cast(Mapping[Any, Any], value)
            return {name: _plain(one, f"{key}.{name}" if key else str(name)) for name, one in table.items()}
        case list() | tuple():
            return [_plain(one, key) for one in cast(Sequence[Any], value)]
        case float() if not math.isfinite(value):
            raise ValueError(f"{key} is {value}; it must be a finite number")
        case np.generic():
            return _plain(value.item(), key)
        case None | str() | bool() | int() | float():
            return value
        case _:
            kind = type(value).__name__
            raise ValueError(f"{key} is a {kind} ({value}); it must be a number, a text, a list or a table")


def _put(table: dict[str, Any], dotted: str, value: object) -> None:
    """Set one value by its dotted key. Raises `ValueError` if a part of the key is a value."""
    *outer, key = dotted.split(".")
    for part in outer:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{dotted}: {part} is not a section")
        table = cast(dict[str, Any], inner)
    table[key] = value


LABEL = "label"
LABEL_CHARACTERS_MAX = 100


def point_label(point: Mapping[str, object]) -> str:
    """A point in words: `proximal_mu=0.1`, `codec=eden` for a name, the label for settings that go together."""
    return ", ".join(f"{_short(key)}={value}" if "." in key else f"{value}" for key, value in point.items())


def _short(key: str) -> str:
    *_, section, last = key.split(".")
    return section if last == "name" else last


def file_name(label: str) -> str:
    """A name for files of the points with this label, of at most some 200 bytes; labels that differ may share one."""
    kept = "".join(c if c.isalnum() or c in "=.-" else "_" for c in label)
    if len(kept.encode()) > _NAME_BYTES_MAX:
        digest = hashlib.sha256(label.encode()).hexdigest()[:16]
        kept = f"{kept.encode()[:_NAME_BYTES_MAX].decode(errors='ignore')}_{digest}"
    return kept


def check_values(name: str, values: Sequence[Any]) -> None:
    """Raise `ValueError` unless there are different values, either all or none of them tables with a label."""
    if not values:
        raise ValueError(f"sweep: {name} has no value to try")
    if twice := [one for i, one in enumerate(values) if one in values[:i] and not goes_together(one)]:
        raise ValueError(f"sweep: {name} has the value {twice[0]} twice")
    labels = [one[LABEL] for one in values if goes_together(one)]
    if not labels:
        return
    if "." in name:
        raise ValueError(
            f"sweep: {name} names one key, so its values cannot be tables with a label. Give a list of such tables "
            "a name without a dot"
        )
    if len(labels) < len(values) or not all(isinstance(label, str) and label for label in labels):
        raise ValueError(f'sweep: each value of {name} must be a table with a label = "..." and the keys that it sets')
    if len(set(labels)) < len(labels):
        raise ValueError(f"sweep: two values of {name} have the same label")
    if longest := [label for label in labels if len(label) > LABEL_CHARACTERS_MAX]:
        raise ValueError(
            f"sweep: a label has {len(longest[0])} characters; it names a folder, so the limit is "
            f"{LABEL_CHARACTERS_MAX}"
        )


def points(sweep: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in product(*sweep.values()):
        yield dict(zip(sweep, values, strict=True))


def goes_together(value: Any) -> bool:
    """Whether a value of the sweep is a table of settings that go together."""
    return isinstance(value, dict) and LABEL in value


def settings(name: str, value: Any) -> dict[str, Any]:
    """The settings of one value of the sweep, by dotted key."""
    return {key: one for key, one in value.items() if key != LABEL} if goes_together(value) else {name: value}
