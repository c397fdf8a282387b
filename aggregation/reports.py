"""What clients report of their work: of training, of an evaluation, or of a masked update; and what a sum holds."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from umbel.aggregation.canonical import later
from umbel.aggregation.counts import CountsByName, require_counts
from umbel.aggregation.types import (
    BYTES_MAX,
    LINE_RATE_MAX,
    LINE_RATE_MIN,
    METRIC_ABS_MAX,
    METRICS_MAX,
    SECONDS_MAX,
    STEPS_MAX,
    ClientId,
    require_metric_name,
    require_sample_count,
    require_sha256,
)

_SIGNATURE = re.compile(r"[A-Za-z0-9+/]{86}==")


@dataclass(frozen=True, slots=True)
class Probe:
    """What a client measured of itself in a canary; None for what it could not measure.

    `steps_full`: the steps of a whole round's work. `step_s`: seconds a step takes. `download_bytes_per_s`: of the
    model. `memory_bytes`: the process's peak; `memory_free_bytes`: what the machine (or container) had left then;
    `device_memory_bytes` of `device_memory_total_bytes`: the accelerator's peak. `first_loss`, `last_loss`: of the
    first and the last step, and finite; `is_loss_finite`: whether every loss that was seen is.
    """

    steps_full: int
    step_s: float
    download_bytes_per_s: float | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    device_memory_bytes: int | None = None
    device_memory_total_bytes: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    is_loss_finite: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.steps_full <= STEPS_MAX:
            raise ValueError(f"steps_full must lie between 1 and 2^62, not {self.steps_full}")
        if not 0 <= self.step_s <= SECONDS_MAX:  # also refuses a NaN
            raise ValueError(f"step_s must lie between 0 and {SECONDS_MAX:g}, not {self.step_s}")
        _require_rate(self.download_bytes_per_s, "download_bytes_per_s")
        for name in ("memory_bytes", "memory_free_bytes", "device_memory_bytes", "device_memory_total_bytes"):
            if (n_bytes := getattr(self, name)) is not None and not 0 <= n_bytes <= BYTES_MAX:
                raise ValueError(f"{name} must lie between 0 and 2^60, not {n_bytes}")
        for name in ("first_loss", "last_loss"):
            if (loss := getattr(self, name)) is not None and not abs(loss) <= METRIC_ABS_MAX:
                raise ValueError(f"{name} is {loss}; leave it out, and set is_loss_finite to false")


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What a client says of its update.

    `steps_done` of `steps_planned` local steps: fewer is partial work, and welcome. `update_sha256`: of the uploaded
    bytes. `metrics`: means over the local training; `evaluation`: of the model as it came, over
    `evaluation_sample_count` held-out samples. Metric values are finite. `upload_bytes_per_s`: how fast the update
    went, None where that was not measured. `probe`: in a canary, and there alone. `counts`, `evaluation_counts`: what
    adds up over clients (`counts.py`), of the training and of the held-out samples. `weights`, `evaluation_weights`:
    of metrics that are means over other things than all samples, how many things; 0 if there
    were none, and then the metric has no value.
    """

    sample_count: int
    steps_done: int
    steps_planned: int
    update_sha256: str
    train_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    evaluation: Mapping[str, float] = field(default_factory=dict[str, float])
    evaluation_sample_count: int = 0
    upload_bytes_per_s: float | None = None
    probe: Probe | None = None
    counts: Mapping[str, tuple[int, ...]] = later(factory=dict)  # `dict[...]()` takes ten times as long
    evaluation_counts: Mapping[str, tuple[int, ...]] = later(factory=dict)
    weights: Mapping[str, int] = later(factory=dict)
    evaluation_weights: Mapping[str, int] = later(factory=dict)

    def __post_init__(self) -> None:
        require_sample_count(self.sample_count, "sample_count")
        if not 1 <= self.steps_done <= self.steps_planned <= STEPS_MAX:
            raise ValueError(
                f"steps_done must lie between 1 and steps_planned, not {self.steps_done} of {self.steps_planned}"
            )
        require_sha256(self.update_sha256, "update_sha256")
        if not (math.isfinite(self.train_s) and self.train_s >= 0):
            raise ValueError("train_s must be finite and not negative")
        require_sample_count(self.evaluation_sample_count, "evaluation_sample_count", least=0)
        if (self.evaluation or self.evaluation_counts) and not self.evaluation_sample_count:
            raise ValueError("an evaluation needs evaluation_sample_count")
        for metrics in (self.metrics, self.evaluation):
            if metrics:  # a simulated round makes very many reports without any
                _require_metrics(metrics)
        for counts in (self.counts, self.evaluation_counts):
            if counts:
                require_counts(counts)
        for weights, metrics in ((self.weights, self.metrics), (self.evaluation_weights, self.evaluation)):
            if weights:
                _require_weights(weights, metrics)
        _require_rate(self.upload_bytes_per_s, "upload_bytes_per_s")

    @property
    def is_partial(self) -> bool:
        return self.steps_done < self.steps_planned


class _TellsNoTraining:
    """The zeros of a report that says nothing about local training."""

    __slots__ = ()

    @property
    def metrics(self) -> Mapping[str, float]:
        return {}

    @property
    def counts(self) -> CountsByName:
        return {}

    @property
    def weights(self) -> Mapping[str, int]:
        return {}

    @property
    def steps_done(self) -> int:
        return 0

    @property
    def steps_planned(self) -> int:
        return 0

    @property
    def is_partial(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class EvaluationDone(_TellsNoTraining):
    """What a client says of a model that it was asked to measure, and nothing else: there is no update.

    `evaluation`: means over `sample_count` held-out samples, finite. The last two: as in `WorkDone`.
    """

    sample_count: int
    evaluation: Mapping[str, float]
    evaluate_s: float = 0.0
    evaluation_counts: Mapping[str, tuple[int, ...]] = later(factory=dict[str, tuple[int, ...]])
    evaluation_weights: Mapping[str, int] = later(factory=dict[str, int])

    def __post_init__(self) -> None:
        require_sample_count(self.sample_count, "sample_count")
        if not (math.isfinite(self.evaluate_s) and self.evaluate_s >= 0):
            raise ValueError("evaluate_s must be finite and not negative")
        _require_metrics(self.evaluation)
        require_counts(self.evaluation_counts)
        _require_weights(self.evaluation_weights, self.evaluation)

    @property
    def evaluation_sample_count(self) -> int:
        return self.sample_count


@dataclass(frozen=True, slots=True)
class MaskedInput(_TellsNoTraining):
    """The report of a masked update. It says nothing about the client's work, whose numbers are masked too.

    `update_sha256`: of the uploaded bytes. `signature`: base64 of 64 bytes. With it the client signs its masked update,
    and the list of clients that share its masks (`secagg/session.py`). Other fields are refused: the report is kept as
    it was signed, and must hold nothing about the client's work.
    """

    update_sha256: str
    signature: str
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as in the run file

    def __post_init__(self) -> None:
        require_sha256(self.update_sha256, "update_sha256")
        if not _SIGNATURE.fullmatch(self.signature):
            raise ValueError("signature must be the base64 of 64 bytes")

    @property
    def sample_count(self) -> int:
        return 0

    @property
    def evaluation_sample_count(self) -> int:
        return 0

    @property
    def evaluation(self) -> Mapping[str, float]:
        return {}

    @property
    def evaluation_counts(self) -> CountsByName:
        return {}

    @property
    def evaluation_weights(self) -> Mapping[str, int]:
        return {}


Work: TypeAlias = WorkDone | EvaluationDone | MaskedInput


@dataclass(frozen=True, slots=True)
class Aggregate:
    """What a closed round's sum holds. `clients` in the order of their names."""

    clients: tuple[ClientId, ...]
    total_weight: int
    sample_count: int
    n_partial: int


def _require_rate(bytes_per_s: float | None, what: str) -> None:
    if bytes_per_s is not None and not LINE_RATE_MIN <= bytes_per_s <= LINE_RATE_MAX:
        raise ValueError(f"{what} must lie between 1e-6 and 1e15, not {bytes_per_s}")


def _require_metrics(metrics: Mapping[str, float]) -> None:
    if len(metrics) > METRICS_MAX:
        raise ValueError(f"at most {METRICS_MAX} metrics, not {len(metrics)}")
    for name, value in metrics.items():
        require_metric_name(name)
        if not abs(value) <= METRIC_ABS_MAX:  # also refuses a NaN
            raise ValueError(f"metric {name!r} is {value}; leave out what is not a number up to {METRIC_ABS_MAX:g}")


def _require_weights(weights: Mapping[str, int], metrics: Mapping[str, float]) -> None:
    """Raise `ValueError` for a weight out of range, or without its metric. A metric with the weight 0 has no value."""
    if len(weights) > METRICS_MAX:
        raise ValueError(f"at most {METRICS_MAX} weights of metrics, not {len(weights)}")
    for name, weight in weights.items():
        require_metric_name(name)
        require_sample_count(weight, f"the weight of {name!r}", least=0)
        if (name in metrics) is not (weight > 0):
            what = "no metric of this name" if weight else "its metric has a value; leave the value out"
            raise ValueError(f"the metric {name!r} has the weight {weight}, but {what}")
