"""How cohorts are cut up: all of it, each client once, the longest first."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.engines.cohorts import work_of
from umbel.aggregation.plans.proximal import MuRule
from umbel.sim.engines.device import chunks, devices_of, part_of, rows_of_block
from umbel.sim.engines.work import CohortWork, EngineError

STEPS = st.lists(st.integers(1, 3000), min_size=1, max_size=200)


@given(steps=STEPS, n_workers=st.integers(1, 9), rows_max=st.integers(1, 40))
def test_every_client_is_in_one_chunk_and_longer_ones_come_first(
    steps: list[int], n_workers: int, rows_max: int
) -> None:
    cut = list(chunks(np.array(steps), n_workers, rows_max))
    flat = np.concatenate(cut)
    assert sorted(flat.tolist()) == list(range(len(steps)))
    assert all(1 <= len(chunk) <= rows_max for chunk in cut)
    in_order = np.array(steps)[flat]
    assert (np.diff(in_order) <= 0).all()


@given(steps=STEPS, n_workers=st.integers(1, 9))
def test_no_chunk_is_more_than_its_share_of_what_is_left_but_a_single_client(steps: list[int], n_workers: int) -> None:
    counts, left = np.array(steps), sum(steps)
    for chunk in chunks(counts, n_workers, 1 << 20):
        assert len(chunk) == 1 or counts[chunk].sum() <= left / n_workers / 4 + 1e-9
        left -= int(counts[chunk].sum())


@given(steps=STEPS, n_workers=st.integers(1, 9))
def test_whoever_is_free_takes_the_next_and_the_last_is_done_soon_after_the_first(
    steps: list[int], n_workers: int
) -> None:
    counts, busy = np.array(steps), [0] * n_workers
    for chunk in chunks(counts, n_workers, 1 << 20):
        busy[busy.index(min(busy))] += int(counts[chunk].sum())
    mean = sum(steps) / n_workers
    longest = max(max(steps), mean / 4)  # of a chunk
    assert max(busy) <= mean + (1 - 1 / n_workers) * longest + 1e-9


def test_a_part_holds_what_its_clients_hold_in_their_order() -> None:
    work = work_of([3, 5, 1, 4], [1, 2, 3, 4])
    part = part_of(work, np.array([3, 1]))
    assert part.data.sizes.tolist() == [4, 5]
    assert torch.equal(part.data.of(0).inputs, work.data.of(3).inputs)
    assert torch.equal(part.data.of(1).targets, work.data.of(1).targets)
    assert (part.seeds.tolist(), part.steps.tolist()) == (work.seeds[[3, 1]].tolist(), [4, 2])


def test_blocks_hold_a_row_of_any_model_and_many_of_a_small_one() -> None:
    assert rows_of_block(1 << 30) == 1
    assert rows_of_block(10) == 1024
    assert rows_of_block(1_663_370) == 2


def test_workers_are_counted() -> None:
    assert devices_of("cpu", 3) == ["cpu"] * 3
    assert len(devices_of("cpu", None)) >= 1
    with pytest.raises(EngineError, match="at least one worker"):
        devices_of("cpu", 0)


@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_work_that_goes_to_another_process_keeps_the_rounds_mu_and_not_its_rule(mu: float) -> None:
    """An adaptive mu may be 0 in a round, which FedProx without a rule may not."""
    adaptive = work_of([3, 5], [1, 2], proximal_mu=mu, optimizer={"algorithm": "fedprox", "mu_rule": MuRule(0.0, 0.1)})
    plain = work_of([3, 5], [1, 2], proximal_mu=mu)
    there = CohortWork.on(adaptive.data, adaptive.arrays, json.loads(json.dumps(adaptive.terms)))
    assert there.plan == plain.plan
    assert there.steps.tolist() == [1, 2]
