"""An engine that chooses, by what the first rounds cost, between one client after another and workers that share them.

The engines "sequential", "threads" and "processes" give each client the same bits, so a choice by time changes no
model. The first clients are trained one after another. If the rest of the round is worth it, workers train the rest.
The second round shows whether workers are faster. If they are not, all further rounds are trained one after another.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from umbel.sim.engines.device import part_of
from umbel.sim.engines.training import Draws, SequentialEngine
from umbel.sim.engines.work import Changes, CohortWork, Engine, EngineError

_TRIED_S = 0.5  # train single clients until this time is measured
_WORTH_S = {"threads": 0.1, "processes": 1.0}  # less work does not pay for starting them
log = logging.getLogger("umbel.sim")


@dataclass(slots=True)
class _Spent:
    """The seconds spent waiting for an engine, without the time in which its results were used."""

    clock: Callable[[], float]
    seconds: float = 0.0

    def over(self, changes: Iterator[Changes]) -> Iterator[Changes]:
        """The same changes, with the time until each added to `seconds`."""
        while True:
            began = self.clock()
            one = next(changes, None)
            self.seconds += self.clock() - began
            if one is None:
                return
            yield one


class MeasuredEngine:
    """`sequential`: trains one client after another. `make`: makes an engine by its name, with `n_workers`.

    `cause`: why clients are not stacked, in words. `why`: the choice in words, empty before the first cohort.
    """

    def __init__(
        self,
        sequential: SequentialEngine,
        make: Callable[[str], Engine],
        n_workers: int,
        cause: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sequential, self._make, self._n_workers = sequential, make, n_workers
        self._cause, self._clock = cause, clock
        self._current: Engine = sequential
        self._step_s: float | None = None  # of a step, one client after another
        self._is_settled = False
        self.why = ""

    @property
    def name(self) -> str:
        """Of the engine that trained last."""
        return self._current.name

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        """As `Engine.train`."""
        if self._is_settled:
            yield from self._current.train(start, work)
        elif self._step_s is None:
            yield from self._first(start, work)
        else:
            yield from self._second(start, work, self._step_s)

    def close(self) -> None:
        self._current.close()
        self._sequential.close()

    def _first(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        """Measure some clients, and choose for the others."""
        n, done, fastest_s, spent_s = len(work.data), 0, np.inf, 0.0
        while done < n and spent_s < _TRIED_S:
            one, spent = np.array([done]), _Spent(self._clock)
            yield from _placed(spent.over(self._sequential.train(start, part_of(work, one))), one)
            spent_s += spent.seconds
            fastest_s = min(fastest_s, spent.seconds / int(work.steps[done]))  # the first one also warms up
            done += 1
        rest = np.arange(done, n)
        self._step_s = float(fastest_s)
        self._choose(self._step_s * int(work.steps[rest].sum()), self._step_s * int(work.steps.sum()))
        if len(rest):
            yield from _placed(self._current.train(start, part_of(work, rest)), rest)

    def _choose(self, rest_s: float, round_s: float) -> None:
        """Choose by what the rest of the round, and a whole round, would take one after another."""
        name = "threads" if self._sequential.draws is Draws.NOTHING else "processes"
        if self._n_workers == 1:
            self._settle(f"there is one worker, so clients are trained one after another, a round in {round_s:.2g} s")
        elif rest_s < _WORTH_S[name]:
            self._settle(
                f"with one client after another the first round takes {round_s:.2g} s, too short to be shared among "
                f"{name}"
            )
        else:
            try:
                self._current = self._make(name)
            except EngineError as error:
                self._settle(f"{error}; so clients are trained one after another")
                return
            self._say(f"with one client after another a round would take {round_s:.2g} s, so {name} share its clients")

    def _second(self, start: Tensor, work: CohortWork, step_s: float) -> Iterator[Changes]:
        """Measure the workers on a whole cohort, now that they run."""
        spent = _Spent(self._clock)
        yield from spent.over(self._current.train(start, work))
        alone_s, name = step_s * int(work.steps.sum()), self._current.name
        if spent.seconds > alone_s:
            self._current.close()
            self._current = self._sequential
        self._settle(
            f"with one client after another a round takes {alone_s:.2g} s, and with {name} {spent.seconds:.2g} s"
        )

    def _settle(self, words: str) -> None:
        self._is_settled = True
        self._say(words)

    def _say(self, words: str) -> None:
        self.why = f"{self._cause}; {words}"
        log.info("engine %s: %s", self.name, self.why)


def _placed(changes: Iterator[Changes], positions: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Iterator[Changes]:
    """The changes of a part of a cohort, with their positions in the whole."""
    for one in changes:
        yield replace(one, positions=positions[one.positions])
