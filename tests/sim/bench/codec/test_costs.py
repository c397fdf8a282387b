"""The benchmark of the codec's costs: what it measures, not how fast it was."""

import torch

from umbel.sim.bench.codec.costs import cuda_rows, kernel_note, kernel_rows


def test_each_kernel_is_measured_against_a_copy_and_three_have_a_promise() -> None:
    rows = kernel_rows(quick=True, repetitions=1)
    assert all(row.ours > 0 and row.theirs > 0 and row.against == "memory copy of 2^22 floats" for row in rows)
    assert [row.hold for row in rows if row.hold] == ["<= 1.5", "<= 3", "<= 1.2"]
    assert "one thread" in kernel_note()


def test_rows_of_a_gpu_appear_where_there_is_one_and_two_have_a_promise() -> None:
    rows = cuda_rows()
    assert [row.hold for row in rows if row.hold] == (["<= 1.5", "<= 1.5"] if torch.cuda.is_available() else [])
    assert all(row.ours > 0 and row.theirs > 0 for row in rows)
