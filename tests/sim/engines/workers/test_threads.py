"""Threads train clients side by side, each on a model of its own, and refuse what they cannot keep apart."""

import threading
import time
from typing import Literal

import pytest
import torch

from tests.sim.engines.cohorts import all_changes, recipe, start_of, work_of
from umbel.sim.engines.training import SequentialEngine
from umbel.sim.engines.work import EngineError
from umbel.sim.engines.workers.threads import ThreadsEngine

WORK = work_of([8 + 2 * i for i in range(12)], [3 + i % 4 for i in range(12)])


@pytest.mark.parametrize("n_workers", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(n_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.sim.engines.device._ROWS_MAX", 2)
    made_by = recipe("convolutions")
    expected, expected_losses = all_changes(SequentialEngine(made_by), start_of(made_by), WORK)
    values, losses = all_changes(ThreadsEngine(made_by, n_workers), start_of(made_by), WORK)
    assert torch.equal(values, expected)
    assert (losses == expected_losses).all()


@pytest.mark.parametrize("arithmetic", ["sdk", "fast"])
def test_threads_compute_in_the_arithmetic_that_is_asked_for(arithmetic: Literal["sdk", "fast"]) -> None:
    """With convolutions the two differ in their last bits."""
    made_by = recipe("convolutions")
    expected, _ = all_changes(SequentialEngine(made_by, arithmetic=arithmetic), start_of(made_by), WORK)
    values, _ = all_changes(ThreadsEngine(made_by, 2, arithmetic=arithmetic), start_of(made_by), WORK)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("name", ["with_dropout", "shaken"])
def test_a_model_that_draws_random_numbers_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(EngineError, match=r'draws random numbers.*set name = "processes" in \[engine\]'):
        next(ThreadsEngine(recipe(name), 2).train(start_of(recipe(name)), WORK))


def test_what_the_model_raises_comes_out_and_no_thread_is_left() -> None:
    with pytest.raises(ValueError, match="no such thing as 4 samples"):
        next(ThreadsEngine(recipe("broken"), 2).train(start_of(recipe("broken")), WORK))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("training")]


def test_a_cohort_that_is_broken_off_ends_its_threads_after_the_step_they_are_at() -> None:
    made_by = recipe("slow")
    work = work_of([8, 8], [1, 1 << 11])
    training = ThreadsEngine(made_by, 2).train(start_of(made_by), work)
    assert next(training).positions.tolist() == [0], "the short one"
    started = time.monotonic()
    training.close()  # type: ignore[attr-defined]  # it is a generator
    assert time.monotonic() - started < 60, "the other client alone takes 100 s"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("training")]


def test_the_threads_of_torch_are_the_callers_again_when_the_cohort_is_done() -> None:
    before = torch.get_num_threads()
    for _ in ThreadsEngine(recipe("linear"), 2).train(start_of(recipe("linear")), WORK):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(EngineError, match='set device = "cpu"'):
        ThreadsEngine(recipe("linear"), 2, device="cuda")
