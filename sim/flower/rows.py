"""The rows of a run whose rounds a ServerApp makes.

What a round's model is worth shows only after it: nodes measure it, or the ServerApp does. So a round's row is held
back until the next round begins, or the ServerApp has measured its model.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from umbel.aggregation.plans.round import Task
from umbel.sim.federation.rows import Row
from umbel.sim.flower.attempts import PlayedAttempt

_ACCURACY, _LOSS = ("accuracy", "acc"), ("loss",)


@dataclass(slots=True)
class FlowerRows:
    """`tell`: gets each row, in their order."""

    tell: Callable[[Row], None]
    _held: list[Row] = field(default_factory=list[Row])
    _last: float = field(default_factory=time.perf_counter)

    def add(self, attempt: PlayedAttempt) -> None:
        """Note an attempt that has ended."""
        record, now = attempt.record, time.perf_counter()
        if record.task is Task.TRAINING:
            self.flush(record.model_sha256)
        ended_at = record.opened_at + record.wall_s
        device_time, declines = attempt.played.device_time, attempt.declines.values()
        row = Row.of(record, None, now - self._last, ended_at, device_time, declines=declines)
        self._last = now
        samples_in, samples_left_out = attempt.samples or (0, 0)  # the record has estimates
        row = replace(row, samples_in=samples_in, samples_left_out=samples_left_out)
        if record.task is Task.TRAINING:
            self._held = [replace(row, model_sha256=None, train_loss=named(row.train_metrics, _LOSS))]
            return
        if self._held and record.evaluation and record.round == self._held[0].round:
            self._held[0] = scored(self._held[0], record.evaluation)
        self._held.append(row)

    def score(self, number: int, metrics: Mapping[str, float]) -> None:
        """Note what the ServerApp has measured of the model after this round."""
        if self._held and self._held[0].round == number:
            self._held[0] = scored(self._held[0], metrics)
            self.flush(None)

    def flush(self, model_sha256: str | None) -> None:
        """Pass on what is held back. `model_sha256`: of the model after these rounds; None: not known."""
        for row in self._held:
            is_made = row.makes_model and row.model_sha256 is None
            self.tell(replace(row, model_sha256=model_sha256) if is_made else row)
        self._held = []


def scored(row: Row, metrics: Mapping[str, float]) -> Row:
    """The row with what was measured of its model."""
    accuracy, loss = named(metrics, _ACCURACY), named(metrics, _LOSS)
    return replace(row, accuracy=accuracy, loss=loss, test_metrics=dict(metrics))


def scored_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, with umbel's names `accuracy` and `loss` for what stands for them."""
    found = {"accuracy": named(metrics, _ACCURACY), "loss": named(metrics, _LOSS)}
    return {**{name: value for name, value in found.items() if value is not None}, **metrics}


def named(metrics: Mapping[str, float], words: tuple[str, ...]) -> float | None:
    """The first metric that has one of the words in its name, as in `eval_acc` or `train-loss`; None without one."""
    parts = {name: name.lower().replace("-", "_").replace(".", "_").replace("/", "_").split("_") for name in metrics}
    return next((metrics[name] for name in sorted(metrics) if any(word in parts[name] for word in words)), None)
