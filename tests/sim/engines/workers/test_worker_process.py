"""Memory that processes share goes with its last holder."""

import os

import torch

from umbel.sim.engines.workers.worker_process import SharedTensor, mapped


def test_what_one_writes_the_other_reads_and_the_descriptor_goes_with_the_tensor() -> None:
    shared = SharedTensor.of(torch.arange(6.0).view(2, 3))
    other, fd = mapped(shared.fd, (2, 3), torch.float32), shared.fd
    shared.tensor[1, 2] = 9.0
    assert other[1, 2] == 9.0
    del shared
    assert not os.path.exists(f"/proc/self/fd/{fd}"), "a run of many cohorts would use up what a process may open"
