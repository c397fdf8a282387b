"""Simulated runs of which every machine makes the same models and the same records, to the last bit.

The simulator's own clients train with matrix products of a library, and its fleets are drawn with logarithms. So the
clients here draw their changes from Philox, the devices are as fast as SplitMix64 says in eighths of a second, and the
model measures itself with numbers that no order of adding can change. All the rest is the simulator's: cohorts,
windows, weights, codecs, masks, noise, sums, models, endings, records.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from tests.frozen.kept import digest, of_every_machine
from tests.vectors.test_bits import exact
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.report_times import Floats
from umbel.aggregation.run.standing import beginning
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.work import Changes, CohortWork
from umbel.sim.federation.federation import Federation
from umbel.sim.federation.local_work import Meter
from umbel.sim.federation.world import World
from umbel.sim.fleet.draws import Trait, words
from umbel.sim.fleet.fates import CohortAsk, Dropouts, Fates
from umbel.sim.fleet.faults import Faults
from umbel.sim.fleet.fleet import Fleet, Network, Speed, Stragglers
from umbel.sim.fleet.presence import Always, Zones
from umbel.sim.fleet.section import CorruptSection, MaliciousSection

N_CLIENTS, N_HELD = 12, 4
N_MEASURED = 8  # weights by which the model measures itself
COMPRESSED = ("integer", "auto", "qsgd", "planes")  # codecs whose bytes Zstandard makes
_RECORD, _FILE = TypeAdapter(RoundRecord), TypeAdapter(RunFile)


@dataclass(frozen=True, slots=True)
class Play:
    """One run. `file`: what its run file says beside `RUN`. The other fields: what its devices are like."""

    file: Mapping[str, Any]
    lost: float = 0.0
    stragglers: float = 0.0
    corrupt: CorruptSection = field(default_factory=lambda: CorruptSection(0.0))
    malicious: MaliciousSection = field(default_factory=lambda: MaliciousSection(0.0))
    masks: bool = False
    is_half: bool = False


RUN: Mapping[str, Any] = {
    "name": "exact",
    "seed": 11,
    "rounds": {"count": 3, "target": 5, "minimum": 3, "over_selection": 1.4, "window_s": 64.0},
    "training": {"local_epochs": 2, "batch_size": 4},
    "aggregation": {"server_learning_rate": 0.7},
}
_ROUNDS = RUN["rounds"]
_MASKED: Mapping[str, Any] = {
    "codec": {"name": "integer", "clip_norm": 3.0},
    "rounds": {**_ROUNDS, "target": 6, "minimum": 4, "over_selection": 1.0},
    "secure_aggregation": {"metrics": ["loss"], "minimum_work": 0.05},
}
_PRIVATE = {**_MASKED, "privacy": {"noise_multiplier": 1.0, "clip_norm": 2.0}, "codec": {"name": "integer"}}
PLAYS: Mapping[str, Play] = {
    "float32": Play({}),
    "float32 of a model in half precision": Play({}, is_half=True),
    "float32 with stragglers and devices that are lost": Play({}, lost=0.2, stragglers=0.4),
    "integer": Play({"codec": {"name": "integer", "clip_norm": 3.0}}),
    "auto": Play({"codec": {"name": "auto", "error": 0.02}}),
    "eden": Play({"codec": {"name": "eden", "clip_norm": 3.0}}),
    "eden of three bits": Play({"codec": {"name": "eden", "bits": 3}}),
    "sign": Play({"codec": {"name": "sign"}}),
    "sign with error feedback": Play({"codec": {"name": "sign", "error_feedback": True}}, lost=0.2),
    "ternary": Play({"codec": {"name": "ternary"}}),
    "qsgd": Play({"codec": {"name": "qsgd", "levels": 8}}),
    "topk": Play({"codec": {"name": "topk", "share": 0.1}}),
    "topk with error feedback, momentum and a warm-up": Play(
        {"codec": {"name": "topk", "share": 0.05, "error_feedback": True, "momentum": 0.5, "warm_up_rounds": 2}}
    ),
    "mask": Play({"codec": {"name": "mask", "every": 4, "mode": "structured"}}),
    "mask, sketched": Play({"codec": {"name": "mask", "every": 4, "mode": "sketched"}}),
    "planes": Play({"codec": {"name": "planes"}}),
    "changes down": Play({"codec": {"name": "integer"}, "downlink": {"name": "change"}}),
    "changes down of a model in half precision": Play({"downlink": {"name": "change", "step": 0.5}}, is_half=True),
    "masked": Play(_MASKED),
    "masked, with keys and masks and devices that are lost": Play(_MASKED, lost=0.15, masks=True),
    "masked and private": Play(_PRIVATE),
    "a canary": Play({"canary": {"clients": 3, "share": 0.5}}),
    "a canary that fails and is widened": Play(
        {"canary": {"clients": 4, "minimum": 4, "on_failure": "widen"}}, corrupt=CorruptSection(0.4, ("nan",))
    ),
    "a canary that fails and stops the run": Play(
        {"canary": {"clients": 5, "minimum": 5, "on_failure": "stop"}}, corrupt=CorruptSection(0.4, ("length",))
    ),
    "evaluations until patience is lost": Play(
        {
            "rounds": {**_ROUNDS, "count": 12},
            "evaluation": {"every": 1, "clients": 3, "window_s": 32.0},
            "stop": {"metric": "evaluation.loss", "mode": "min", "patience": 2, "minimum": 3},
        }
    ),
    "training clients measure, until a target is reached": Play(
        {
            "rounds": {**_ROUNDS, "count": 8},
            "training": {**RUN["training"], "evaluate": True},
            "stop": {"metric": "training.loss", "mode": "min", "target": 0.5, "minimum": 3},
        }
    ),
    "a self-tuned window": Play(
        {"rounds": {**_ROUNDS, "count": 8, "target": 8, "self_tuning": True, "window_s": 512.0}}, lost=0.1
    ),
    "weights in proportion": Play({"rounds": {**_ROUNDS, "weighting": "proportional"}}),
    "attempts that are abandoned": Play({"rounds": {**_ROUNDS, "minimum": 5, "over_selection": 1.2}}, lost=0.45),
    "attempts until there are too many": Play(
        {"rounds": {**_ROUNDS, "minimum": 5, "over_selection": 1.0, "attempts_max": 2}}, lost=0.5
    ),
    "coverage that is strict": Play(
        {"coverage": {"sites": ["client-0000003"], "samples": 0.8, "strict": True}}, lost=0.25
    ),
    "coverage that says what is missing": Play({"coverage": {"samples": 0.9}}, lost=0.3),
    "liars and devices that send rubbish": Play(
        {}, corrupt=CorruptSection(0.2), malicious=MaliciousSection(0.2, ("scaled", "sign-flip"), scale=4.0)
    ),
    "overrides and another shape of rounds": Play(
        {
            "override": [
                {"first_round": 2, "target": 3, "local_steps": 2, "window_s": 32.0},
                {"first_round": 3, "last_round": 3, "over_selection": 2.0, "evaluate": True},
            ]
        }
    ),
}


def made_by(play: Play) -> tuple[dict[str, Any], list[Any]]:
    """What is frozen of a run: the hash of each version, that of each record, and how the run ended. And the records,
    for people.
    """
    file = _FILE.validate_json(json_of({**RUN, **play.file}), strict=True)
    start = SelfMeasured(is_half=play.is_half)
    first = ModelState.first(start.state_dict())
    is_compressed = (file.codec.name in COMPRESSED and file.secure is None) or file.downlink.name == "change"
    world = World(clients(), Steady(play, is_compressed=is_compressed), Exact(), meter(start), masks=play.masks)
    federation = Federation(world, beginning(file, first), first)
    attempts = list(federation.attempts())
    records = [
        of_every_machine(_RECORD.dump_python(one.record, mode="json"), has_bytes=not is_compressed) for one in attempts
    ]
    facts = {
        "versions": [first.file.sha256, *(one.model.file.sha256 for one in attempts if is_of_model(one.record))],
        "records": list(map(digest, records)),
        "ends": f"{federation.standing.status.value}: {federation.standing.reason}",
    }
    return facts, records


def is_of_model(record: RoundRecord) -> bool:
    """Whether it made a version."""
    return record.committed and record.task.makes_model


def json_of(value: object) -> bytes:
    return TypeAdapter(Any).dump_json(value)


# --- clients ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exact:
    """An engine of clients whose changes and losses are a function of their seeds alone."""

    name: str = "exact"

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        for position, seed in enumerate(work.seeds.tolist()):
            loss = np.array([(seed % 64) / 16])
            values = exact(start.numel(), seed).unsqueeze(0)
            yield Changes(np.array([position]), values, loss, loss + 0.5, loss / 2)

    def close(self) -> None:
        """Holds nothing."""


class SelfMeasured(nn.Module):
    """A model that answers with some of its own weights, in whole 64ths: sums of them are the same in any order."""

    def __init__(self, *, is_half: bool = False) -> None:
        super().__init__()
        values = exact(285, 5)
        parts = {"first": (16, 12), "bias": (16,), "last": (4, 16), "mean": (13,)}
        for name, shape in parts.items():
            n_values = int(np.prod(shape))
            part, values = values[:n_values].reshape(shape), values[n_values:]
            self.register_parameter(name, nn.Parameter(part.clone()))
        if is_half:
            self.register_buffer("narrow", exact(40, 6).to(torch.bfloat16))
            self.register_buffer("count", torch.tensor(3))

    def forward(self, inputs: Tensor) -> Tensor:
        weights = self.get_parameter("first").flatten()[:N_MEASURED]
        return (weights * 64).round() / 64 + 0 * inputs


def meter(model: nn.Module) -> Meter:
    return Meter(model, lambda outputs, targets: (outputs - targets).abs(), accuracy=False)


def clients() -> ShardedPopulation:
    """Each with some samples to train on, no two with as many, and some to measure on."""
    sizes = [3 + 2 * (5 * number % N_CLIENTS) for number in range(N_CLIENTS)]
    n_trained = sum(sizes)
    n_samples = n_trained + N_HELD * N_CLIENTS
    targets = torch.arange(n_samples * N_MEASURED).reshape(-1, N_MEASURED) % 7 / 8
    all_samples = SampleSet(torch.zeros(n_samples, N_MEASURED), targets)
    shards = np.split(np.arange(n_trained), np.cumsum(sizes)[:-1])
    held = np.split(np.arange(n_trained, n_samples), N_CLIENTS)
    return ShardedPopulation(all_samples, shards, all_samples.take(np.arange(0)), held)


# --- devices ----------------------------------------------------------------------------------------------------------


class InEighths(Trait):
    """A trait that is drawn without a logarithm: `unit` eighths of it, 1 to 16, which a device keeps for good, and
    another part of it in each attempt.
    """

    def usual(self, devices: Indices) -> Floats:
        return self._eighths(words(self.seed, devices, self.name))

    def today(self, devices: Indices, number: int, attempt: int) -> Floats:
        return self.usual(devices) + self._eighths(words(self.seed, devices, self.name, "in", number, attempt)) / 16

    def _eighths(self, bits: np.ndarray[Any, np.dtype[np.uint64]]) -> Floats:
        found: Floats = self.log_median[0] * (1 + (bits >> np.uint64(60)).astype(np.float64)) / 8
        return found


class Steady:
    """A fleet whose times are sums and quotients alone. `is_compressed`: what goes down the line has one length, for
    that of an update would hang on Zstandard's release.
    """

    def __init__(self, play: Play, *, is_compressed: bool) -> None:
        seed, nothing = 23, np.zeros(1)
        lines = [
            InEighths(name, seed, np.array([unit]), nothing, nothing) for name, unit in (("down", 512.0), ("up", 256.0))
        ]
        self._is_compressed = is_compressed
        self._fleet = Fleet(
            seed=seed,
            speed=Speed(InEighths("speed", seed, np.array([1.0]), nothing, nothing), "step"),
            network=Network(lines[0], lines[1], 0.0625),
            presence=Always(),
            dropouts=Dropouts(
                seed, Zones(seed), np.array([play.lost]), nothing, np.ones(1), (1.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0)
            ),
            faults=Faults(seed, play.corrupt, play.malicious),
            stragglers=Stragglers(seed, play.stragglers, 0.25, 0.75) if play.stragglers else None,
        )

    @property
    def faults(self) -> Faults:
        return self._fleet.faults

    def waiting(self, now: float, number: int, attempt: int, n_devices: int, n_wanted: int) -> Indices:
        return self._fleet.waiting(now, number, attempt, n_devices, n_wanted)

    def fates(self, devices: Indices, number: int, attempt: int, opened_at: float, ask: CohortAsk) -> Fates:
        if self._is_compressed:
            sent = np.array([1024])
            ask = replace(ask, down_bytes=np.full_like(ask.down_bytes, 2048), update_bytes=sent, update_bytes_max=1024)
        return self._fleet.fates(devices, number, attempt, opened_at, ask)
