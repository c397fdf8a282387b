"""Figures of a simulated run that cost time, and so are measured only where the section `[measure]` asks for them.

```toml
[measure]
train_loss = true   # of each measured model, over the training data of all clients: the objective of federated learning
updates = true      # of each round: how long the clients' updates are, and how much they differ
clients = true      # of each attempt: what became of each client, with its metrics
groups = true       # of each measured model: means over natural holders of data, or clients, of the scores of each
smooth = 5          # best accuracy so far, and the mean accuracy of the last so many measured models
```

Updates are as the clients made them, before a codec or a mask.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from umbel.aggregation.reports import WorkDone
from umbel.aggregation.run.derived_metrics import with_derived
from umbel.aggregation.run.quantiles import quantiles
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.types import ClientId, client_name, require_within
from umbel.sim.data.data_set import DataSet
from umbel.sim.data.population import Population
from umbel.sim.federation.local_work import Meter

SMOOTH_MAX = 10_000
GROUPS_MAX = 32  # more would make the table unreadable
_CLIENTS_AT_ONCE = 1024
_VALUES_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class MeasureSection:
    """What is measured beside accuracy and loss on the test set."""

    train_loss: bool = False
    updates: bool = False
    clients: bool = False
    groups: bool = False
    smooth: int | None = None
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if self.smooth is not None:
            require_within(self.smooth, "smooth", 1, SMOOTH_MAX)

    @property
    def needs_updates(self) -> bool:
        return self.updates or self.clients


class CannotMeasure(ValueError):
    """The data do not have what `[measure]` asks for: one sentence that says what to do."""


def require_measurable(section: MeasureSection, population: Population, data: DataSet | None) -> None:
    """Raise `CannotMeasure` for scores of groups without held-out data of each."""
    if section.groups and not _natural(data) and population.holdout_of(np.zeros(1, dtype=np.int64)) is None:
        raise CannotMeasure(
            "[measure] groups needs held-out data of each client: set holdout = 0.1 in [partition], or leave groups out"
        )


# --- updates ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpdateFigures:
    """The updates u_i of a round with weights w_i, and their mean m = sum(w_i u_i) / sum(w_i)."""

    norms: Mapping[ClientId, float]  # |u_i|, L2
    spread: float  # sqrt(sum(w_i |u_i - m|^2) / sum(w_i))
    cosine: float  # the mean over clients of the cosine of the angle between u_i and m; 0 for an update of zeros
    # sqrt(sum(w_i |u_i|^2) / sum(w_i)) / |m|, 1 if all u_i are equal: B(w) of definition 3 of Li et al. 2020 (FedProx),
    # with the updates of the round's clients in place of the gradients of all. None for one update, and if m is 0.
    dissimilarity: float | None

    @property
    def norm(self) -> float:
        """The mean over clients."""
        return math.fsum(self.norms.values()) / len(self.norms)

    @property
    def norm_deviation(self) -> float:
        """The standard deviation of the norms of these clients (not of a sample)."""
        mean = self.norm
        return math.sqrt(math.fsum((one - mean) ** 2 for one in self.norms.values()) / len(self.norms))


class UpdateSums:
    """Adds up updates in float64, in memory for two of them. Clients come in any order and any groups."""

    def __init__(self, n_values: int) -> None:
        self._mean = torch.zeros(n_values, dtype=torch.float64)  # times the total weight
        self._directions = torch.zeros(n_values, dtype=torch.float64)  # the sum of u_i / |u_i|
        self._squares = 0.0  # the sum of w_i |u_i|^2
        self._weight = 0
        self._norms = dict[ClientId, float]()

    def add(self, clients: Sequence[ClientId], values: Tensor, weights: Sequence[int]) -> None:
        """`values`: float32 (k, n_values), finite."""
        n_at_once = max(1, _VALUES_AT_ONCE // max(1, values.shape[1]))
        for first in range(0, len(clients), n_at_once):
            rows = values[first : first + n_at_once].double()
            weight = torch.tensor(weights[first : first + n_at_once], dtype=torch.float64)
            norms = torch.linalg.vector_norm(rows, dim=1)
            self._mean += weight @ rows
            self._directions += torch.where(norms > 0, 1 / norms.clamp(min=1e-300), 0.0) @ rows
            self._squares += float(weight @ norms**2)
            self._norms.update(zip(clients[first : first + n_at_once], norms.tolist(), strict=True))
        self._weight += sum(weights)

    def figures(self) -> UpdateFigures | None:
        """None without an update."""
        if not self._weight:
            return None
        mean = self._mean / self._weight
        length, square = float(torch.linalg.vector_norm(mean)), self._squares / self._weight
        spread = math.sqrt(max(0.0, square - length**2))
        cosine = float(self._directions @ mean) / (len(self._norms) * length) if length else 0.0
        dissimilarity = math.sqrt(square) / length if length and len(self._norms) > 1 else None
        return UpdateFigures(self._norms, spread, cosine, dissimilarity)


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured figures of a row; None for those that were not measured."""

    train_loss_all: float | None = None
    groups_accuracy: float | None = None  # this and the next two: over groups, each with the same weight
    groups_accuracy_least: float | None = None
    groups_loss: float | None = None
    groups_quantiles: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])  # of each metric
    update_norm: float | None = None
    update_norm_deviation: float | None = None
    update_spread: float | None = None
    update_cosine: float | None = None
    update_dissimilarity: float | None = None
    clients: Sequence[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])


def of_updates(section: MeasureSection, found: UpdateFigures | None) -> dict[str, Any]:
    """The fields of `Measured` about a round's updates."""
    if found is None or not section.updates:
        return {}
    return {
        "update_norm": found.norm,
        "update_norm_deviation": found.norm_deviation,
        "update_spread": found.spread,
        "update_cosine": found.cosine,
        "update_dissimilarity": found.dissimilarity,
    }


def of_model(section: MeasureSection, meter: Meter, population: Population, data: DataSet | None) -> dict[str, Any]:
    """The fields of `Measured` about the model that `meter` holds."""
    found = dict[str, Any]()
    if section.train_loss:
        found["train_loss_all"] = train_loss_of_all(meter, population)
    if section.groups:
        by_name = group_scores(meter, data) or client_scores(meter, population)
        if not by_name:  # every client has too few samples to hold one back
            return found
        scores = list(by_name.values())
        if all("accuracy" in one for one in scores):  # some losses have none
            found["groups_accuracy"] = math.fsum(one["accuracy"] for one in scores) / len(scores)
            found["groups_accuracy_least"] = min(one["accuracy"] for one in scores)
        found["groups_loss"] = math.fsum(one["loss"] for one in scores) / len(scores)
        found["groups_quantiles"] = {name: asdict(one) for name, one in quantiles(by_name.items()).items()}
    return found


def of_clients(
    section: MeasureSection, record: RoundRecord, works: Mapping[ClientId, WorkDone], found: UpdateFigures | None
) -> list[Mapping[str, Any]]:
    """What became of each client, as JSON: its fate, samples and steps; and if it trained, its metrics and its norm.

    `metrics`: means over its training, and figures that follow from its counts; `evaluation`: likewise of the model
    before, on its held-out data.
    """
    if not section.clients:
        return []
    norms = found.norms if found is not None else {}
    rows = list[Mapping[str, Any]]()
    for one in record.clients:
        work = works.get(ClientId(one.client))
        rows.append(
            {
                "client": one.client,
                "fate": one.fate.value,
                "sample_count": one.sample_count,
                "steps_done": one.steps_done,
                "steps_planned": one.steps_planned,
                "metrics": with_derived(work.metrics, work.counts) if work is not None else {},
                "evaluation": with_derived(work.evaluation, work.evaluation_counts) if work is not None else {},
                "update_norm": norms.get(ClientId(one.client)),
            }
        )
    return rows


def train_loss_of_all(meter: Meter, population: Population) -> float:
    """The mean loss over the training samples of all clients, a thousand clients at a time."""
    total, n_samples = 0.0, 0
    for first in range(0, population.n_clients, _CLIENTS_AT_ONCE):
        data = population.data_of(np.arange(first, min(population.n_clients, first + _CLIENTS_AT_ONCE)))
        n = len(data.rows)
        total += meter.of(data.samples.take(data.rows))["loss"] * n
        n_samples += n
    return total / n_samples


def group_scores(meter: Meter, data: DataSet | None) -> dict[str, Mapping[str, float]]:
    """The means over the held-back data of each natural holder, by name, also of holders outside the run.

    Empty without natural holders or held-back data, and for more than `GROUPS_MAX` holders. `meter`: with the model.
    """
    if data is None or not (held := _natural(data)):
        return {}
    return {name: meter.of(data.samples.take(rows)) for name, rows in held.items()}


def client_scores(meter: Meter, population: Population) -> dict[str, Mapping[str, float]]:
    """The means over the held-back data of each client that has some, by its name."""
    scores = dict[str, Mapping[str, float]]()
    for first in range(0, population.n_clients, _CLIENTS_AT_ONCE):
        held = population.holdout_of(np.arange(first, min(population.n_clients, first + _CLIENTS_AT_ONCE)))
        assert held is not None, "checked before the first round"
        scores |= {client_name(number): one for number, one in enumerate(meter.of_each(held), first) if one}
    return scores


def _natural(data: DataSet | None) -> dict[str, Any]:
    """The held-back rows of each natural holder, if there are few enough holders."""
    if data is None or data.natural is None or len(data.natural.names) > GROUPS_MAX:
        return {}
    held = zip(data.natural.names, data.natural.holdouts, strict=True)
    return {name: rows for name, rows in held if len(rows)}
