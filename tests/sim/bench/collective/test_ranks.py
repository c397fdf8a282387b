"""Real ranks over the loopback: each method averages as it says, and counts the bytes that it sends."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.bench.collective.small_job import LIMIT_S, N_VALUES, SMALL, samples
from tests.suite.nights import at_night
from umbel.sim.bench.collective.job import METHODS, HookAnswer, HookJob, MethodRun
from umbel.sim.bench.collective.links import Loopback
from umbel.sim.bench.collective.ranks import run_ranks
from umbel.sim.processes import ChildDied


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, *at_night(4)])
def test_every_method_trains_all_ranks_alike_and_counts_its_bytes(n_ranks: int) -> None:
    answers = run_ranks(replace(SMALL, n_ranks=n_ranks), samples(), Loopback(), LIMIT_S)
    first, exact = answers[0].trained, answers[0].trained["float32"].loss
    assert [one.n_values for one in answers] == [N_VALUES] * n_ranks
    assert list(first) == list(METHODS)
    for name, trained in first.items():
        assert [one.trained[name].loss for one in answers] == [trained.loss] * n_ranks, name
        assert len(trained.steps_s) == SMALL.blocks * SMALL.steps
        assert min(trained.steps_s) > 0
        assert trained.cpu_s > 0
        assert trained.loss == pytest.approx(exact, rel=0.2), name
    assert exact < 0.9, "it has trained: a model that guesses has 1.39"
    assert first["umbel-float32"].loss == pytest.approx(exact, rel=1e-5)
    assert first["bf16"].loss == pytest.approx(exact, rel=0.01)
    whole = 2 * (n_ranks - 1) / n_ranks * 4 * N_VALUES
    sent = {name: trained.sent_bytes / whole for name, trained in first.items()}
    assert (sent["float32"], sent["bf16"]) == (1.0, 0.5)
    assert sent["umbel-float32"] == pytest.approx(1.0, rel=0.01)
    # P and Q of both weights, and the biases whole.
    p_and_q, biases = 16 + 256 + 256 + 4, 256 + 4
    assert sent["powersgd-1"] == pytest.approx((p_and_q + biases) / N_VALUES)
    assert 0.25 <= sent["umbel-8bit"] < 0.5, "small vectors are padded"
    assert sent["umbel-4bit"] < 0.6 * sent["umbel-8bit"]


@pytest.mark.nightly
@pytest.mark.slow
def test_equal_seeds_train_equally_and_others_differently() -> None:
    job = replace(SMALL, methods=("float32", "umbel-4bit"), blocks=1, steps=3)
    once, again, other = (
        run_ranks(replace(job, seed=seed), samples(), Loopback(), LIMIT_S)[0].trained for seed in (4, 4, 5)
    )
    for name in job.methods:
        assert once[name].loss == again[name].loss != other[name].loss


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_the_others_are_ended() -> None:
    with pytest.raises(ChildDied, match=r"rank [01] ended unexpectedly[\s\S]*shapes cannot be multiplied"):
        run_ranks(replace(SMALL, widths=(17, 4)), samples(), Loopback(), LIMIT_S)


def test_jobs_and_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    answer = HookAnswer(5, {"bf16": MethodRun([0.1, 0.2], 0.05, 10.0, 1.5)})
    SMALL.write(tmp_path)
    answer.write(tmp_path, 1)
    assert HookJob.read(tmp_path) == SMALL
    assert HookAnswer.read(tmp_path, 1) == answer
