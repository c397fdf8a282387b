"""A million enrolled clients, of which ten thousand are asked: the time of a round beside training, and the memory.

Logistic regression on Synthetic(1, 1), 20 samples a client, generated on demand; with 20 epochs, as in Li et al. 2020,
and with one, in which a client takes two steps. *Training* is the time inside the engine. The rest of the round is who
waits, the draw, the clients' data, seeds, virtual time, updates on the grid, their exact sum, the next model and its
hash, and a record of each client.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.sim.bench.measuring import MeasuredCall, in_child
from umbel.sim.bench.report import BenchRow, Hold
from umbel.sim.bench.simulate.timing import federation_of
from umbel.sim.data.sets.synthetic import SyntheticLaw, SyntheticPopulation
from umbel.sim.engines.device import one_thread
from umbel.sim.engines.model import LOSSES, ModelRecipe
from umbel.sim.engines.stacked.stacked import StackedEngine
from umbel.sim.engines.work import Changes, CohortWork
from umbel.sim.experiment.trials import seldom_collected

_MANY, _FEW = 1_000_000, 20_000
_N_ASKED, _N_SAMPLES, _SEED = 10_000, 20, 1
_PLAN = TrainingSection(local_epochs=20, batch_size=10, learning_rate=0.01)
M_WORDS = f"{_N_ASKED:,} of {_MANY:,} clients, logistic, {_N_SAMPLES} samples each"
_OVERHEAD_MAX = 0.2  # of the round
_MEMORY = Hold(1.25)  # of the memory for a fiftieth of the population


@dataclass(frozen=True, slots=True)
class ScaleTimes:
    """`round_s`: of a whole round; `training_s`: within its engine. Both the median."""

    round_s: float
    training_s: float


def scale_rows(*, quick: bool) -> list[BenchRow]:
    """Each federation in a process of its own."""
    n_rounds = 1 if quick else 3
    many = in_child(scale_of, _MANY, _PLAN, n_rounds)
    few = in_child(scale_of, _FEW, _PLAN, n_rounds)
    one_epoch = in_child(scale_of, _MANY, replace(_PLAN, local_epochs=1), n_rounds)
    return [
        _round("M: whole round of 20 epochs", many, Hold(round(1 / (1 - _OVERHEAD_MAX), 4))),
        _round("M: whole round of one epoch", one_epoch, None),
        BenchRow("M: peak memory", many.peak_bytes / 1e6, f"{_FEW:,} enrolled", few.peak_bytes / 1e6, "MB", _MEMORY),
    ]


def _round(what: str, measured: MeasuredCall[ScaleTimes], promise: Hold | None) -> BenchRow:
    found = measured.found
    return BenchRow(what, 1e3 * found.round_s, "its training alone", 1e3 * found.training_s, "ms", promise)


def scale_of(n_enrolled: int, plan: TrainingSection, n_rounds: int) -> ScaleTimes:
    """Time `n_rounds` rounds, after one to warm up."""
    recipe = ModelRecipe("umbel.sim.models:perceptron", {"input_shape": [60], "hidden": [], "n_classes": 10})
    population = SyntheticPopulation(SyntheticLaw(n_enrolled, samples=_N_SAMPLES), _SEED)
    engine = _TimedEngine(StackedEngine(recipe.make(), LOSSES[recipe.loss]))
    rounds = RoundsSection(n_rounds + 1, _N_ASKED, over_selection=1.0, window_s=86_400.0)
    run = federation_of(population, engine, recipe, RunFile("bench-m", rounds, _SEED, plan))
    whole, training = list[float](), list[float]()
    with one_thread(), seldom_collected():
        began = time.perf_counter()
        for _ in run.attempts():
            whole.append(time.perf_counter() - began)
            training.append(engine.spent_s)
            engine.spent_s, began = 0.0, time.perf_counter()
    return ScaleTimes(statistics.median(whole[1:]), statistics.median(training[1:]))


class _TimedEngine:
    """An engine, and its working time."""

    name = "watched"

    def __init__(self, engine: StackedEngine) -> None:
        self._engine = engine
        self.spent_s = 0.0

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        changes = self._engine.train(start, work)
        while True:
            began = time.perf_counter()
            found = next(changes, None)
            self.spent_s += time.perf_counter() - began
            if found is None:
                return
            yield found

    def close(self) -> None:
        self._engine.close()
