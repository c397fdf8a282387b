"""Among engines of equal bits the choice is by what the first rounds cost, and changes no bit."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.sim.engines.cohorts import all_changes, recipe, start_of, work_of
from umbel.sim.engines.measured import MeasuredEngine
from umbel.sim.engines.training import SequentialEngine
from umbel.sim.engines.work import Changes, CohortWork, Engine, EngineError

SIZES, STEPS = [12, 7, 3, 20, 9, 5], [40, 10, 30, 20, 50, 10]


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(SequentialEngine):
    """Trains as "sequential", and says how long that takes: `start_s` once, `step_s` for each step."""

    def __init__(self, name: str, clock: Clock, step_s: float, start_s: float = 0.0) -> None:
        super().__init__(recipe("mlp" if name != "processes" else "with_dropout"))
        self.name = name
        self._clock, self._step_s, self._start_s = clock, step_s, start_s
        self.steps = list[int]()  # of each cohort
        self.is_closed = False

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        self.steps.append(int(work.steps.sum()))
        self._clock.now += self._start_s + self._step_s * self.steps[-1]
        self._start_s = 0.0
        yield from super().train(start, work)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Choice:
    """A measured engine over timed ones. `worker_step_s`: a step of the workers, all together."""

    step_s: float
    worker_step_s: float
    n_workers: int = 2
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.alone = Timed("sequential", self.clock, self.step_s)
        self.workers: Timed | None = None
        self.engine = MeasuredEngine(self.alone, self.made, self.n_workers, "the cause", self.clock)

    def made(self, name: str) -> Engine:
        self.workers = Timed(name, self.clock, self.worker_step_s, start_s=5.0)
        return self.workers

    def rounds(self, n: int) -> list[str]:
        """The engine after each round. Each round's changes are those of one client after another, bit for bit."""
        made_by, names = recipe("mlp"), list[str]()
        expected = all_changes(SequentialEngine(made_by), start_of(made_by), work_of(SIZES, STEPS))
        for _ in range(n):
            values, losses = all_changes(self.engine, start_of(made_by), work_of(SIZES, STEPS))
            assert torch.equal(values, expected[0])
            assert (losses == expected[1]).all()
            names.append(self.engine.name)
        return names


def test_short_rounds_are_not_shared() -> None:
    choice = Choice(step_s=1e-4, worker_step_s=1e-9)
    assert choice.rounds(3) == ["sequential"] * 3
    assert choice.workers is None
    assert choice.engine.why == (
        "the cause; with one client after another the first round takes 0.016 s, too short to be shared among threads"
    )


def test_long_rounds_are_shared_from_the_first_round_on() -> None:
    choice = Choice(step_s=0.1, worker_step_s=0.05)
    assert choice.rounds(3) == ["threads"] * 3
    assert choice.workers is not None
    assert choice.alone.steps == [40], "one client has shown what a step takes"
    assert choice.workers.steps == [120, 160, 160]
    assert choice.engine.why == "the cause; with one client after another a round takes 16 s, and with threads 8 s"


def test_workers_that_turn_out_slower_are_given_up_after_the_second_round() -> None:
    choice = Choice(step_s=0.1, worker_step_s=0.3)
    assert choice.rounds(4) == ["threads", "sequential", "sequential", "sequential"]
    assert choice.workers is not None
    assert choice.workers.is_closed
    assert choice.engine.why.endswith("a round takes 16 s, and with threads 48 s")


def test_one_worker_shares_with_nobody() -> None:
    choice = Choice(step_s=0.1, worker_step_s=0.05, n_workers=1)
    assert choice.rounds(2) == ["sequential"] * 2
    assert choice.workers is None


def test_time_in_which_results_are_used_does_not_count() -> None:
    choice = Choice(step_s=0.1, worker_step_s=0.05)
    made_by = recipe("mlp")
    for _ in range(2):
        for _changes in choice.engine.train(start_of(made_by), work_of(SIZES, STEPS)):
            choice.clock.now += 1000.0
    assert choice.engine.name == "threads"
    assert choice.engine.why.endswith("a round takes 16 s, and with threads 8 s")


def test_workers_that_cannot_be_had_leave_the_run_to_one_client_after_another() -> None:
    choice = Choice(step_s=0.1, worker_step_s=0.05)

    def refuse(name: str) -> Engine:
        raise EngineError(f"no {name} here")

    engine = MeasuredEngine(choice.alone, refuse, 2, "the cause", choice.clock)
    all_changes(engine, start_of(recipe("mlp")), work_of(SIZES, STEPS))
    assert engine.name == "sequential"
    assert engine.why == "the cause; no threads here; so clients are trained one after another"


@pytest.mark.parametrize(("model", "name"), [("mlp", "threads"), ("with_dropout", "processes")])
def test_models_that_draw_at_random_are_for_processes(model: str, name: str) -> None:
    asked, clock = list[str](), Clock()

    class Slow(SequentialEngine):
        def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
            clock.now += 1.0
            yield from super().train(start, work)

    def make(name: str) -> Engine:
        asked.append(name)
        return SequentialEngine(recipe(model))

    engine = MeasuredEngine(Slow(recipe(model)), make, 2, "the cause", clock)
    all_changes(engine, start_of(recipe(model)), work_of(SIZES, STEPS))
    assert asked == [name]
