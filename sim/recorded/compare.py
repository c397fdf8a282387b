"""How far rounds that were simulated are from those that were recorded."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from umbel.aggregation.run.records import Fate
from umbel.aggregation.run.trace import Trace, TracedAttempt

_GONE = (Fate.LOST, Fate.DECLINED)


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One figure, as it was recorded and as it was simulated."""

    what: str
    unit: str
    recorded: float
    simulated: float

    @property
    def relative(self) -> float | None:
        """How much of the recorded figure the simulated one is too large; None where next to nothing was recorded."""
        relative = (self.simulated - self.recorded) / self.recorded if self.recorded else math.inf
        return relative if math.isfinite(relative) else None


def compare(recorded: Trace, simulated: Trace) -> tuple[ErrorRow, ...]:
    """The figures of both, of attempts unless another is named. `simulated`: of its records (`trace_of`)."""
    return tuple(
        ErrorRow(what, unit, measure(recorded.attempts), measure(simulated.attempts))
        for what, unit, measure in _FIGURES
    )


def _mean(of: Callable[[TracedAttempt], float]) -> Callable[[Sequence[TracedAttempt]], float]:
    return lambda attempts: float(np.mean([of(attempt) for attempt in attempts]))


def _open_s(share: float) -> Callable[[Sequence[TracedAttempt]], float]:
    return lambda attempts: float(np.quantile([attempt.open_s for attempt in attempts], share))


def _report_s(share: float) -> Callable[[Sequence[TracedAttempt]], float]:
    def quantile(attempts: Sequence[TracedAttempt]) -> float:
        seconds = [c.report_s for attempt in attempts for c in attempt.clients if c.report_s is not None]
        return float(np.quantile(seconds, share)) if seconds else 0.0

    return quantile


_FIGURES: tuple[tuple[str, str, Callable[[Sequence[TracedAttempt]], float]], ...] = (
    ("open, mean", "s", _mean(lambda attempt: attempt.open_s)),
    ("open, median", "s", _open_s(0.5)),
    ("open, nine in ten within", "s", _open_s(0.9)),
    ("committed", "share", _mean(lambda attempt: float(attempt.committed))),
    ("clients asked", "clients", _mean(lambda attempt: len(attempt.clients))),
    ("reports in", "clients", _mean(lambda attempt: len(attempt.in_time))),
    ("partial reports", "clients", _mean(lambda attempt: sum(c.fate is Fate.PARTIAL for c in attempt.clients))),
    ("drop-outs: asked and not in", "clients", _mean(lambda attempt: len(attempt.clients) - len(attempt.in_time))),
    ("lost or declined", "clients", _mean(lambda attempt: sum(c.fate in _GONE for c in attempt.clients))),
    ("report after, median client", "s", _report_s(0.5)),
    ("report after, nine in ten clients", "s", _report_s(0.9)),
    ("bytes up", "bytes", _mean(lambda attempt: attempt.bytes_up)),
    ("bytes down", "bytes", _mean(lambda attempt: attempt.bytes_down)),
)
