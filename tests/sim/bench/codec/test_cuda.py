"""The rows of a GPU appear where one is, and nowhere else."""

import torch

from umbel.sim.bench.codec.cuda import cuda_rows


def test_rows_appear_where_there_is_a_gpu_and_two_have_a_promise() -> None:
    rows = cuda_rows()
    assert [row.hold for row in rows if row.hold] == (["<= 1.5", "<= 1.5"] if torch.cuda.is_available() else [])
    assert all(row.ours > 0 and row.theirs > 0 for row in rows)
