"""Whether a training fits into memory, and what is advised if it does not."""

import pytest
import torch

from umbel.client.datacenter.doctor.memory import findings_of_memory, memory_bytes
from umbel.client.datacenter.doctor.steps import StepMemory

GB = 10**9


@pytest.mark.parametrize(
    ("memory", "device", "n_ranks", "verdict", "words"),
    [
        (StepMemory(4 * GB, 4 * GB, 8 * GB), 80 * GB, 4, "pass", "16 GB, of 80 GB for a rank: it fits, so replicate"),
        (StepMemory(4 * GB, 4 * GB, 8 * GB, 30 * GB), 24 * GB, 4, "warning", "30 GB with activations at the peak"),
        (StepMemory(4 * GB, 4 * GB, 8 * GB), 10 * GB, 2, "warning", "shard the model over the 2 ranks (FSDP2)"),
        (StepMemory(4 * GB, 4 * GB, 8 * GB), 8 * GB, 2, "wrong", "divide the model into pipeline stages"),
        (StepMemory(4 * GB, 4 * GB, 8 * GB), 0, 2, "pass", "this system does not say how much memory"),
    ],
)
def test_what_fits_is_replicated_else_sharded_else_divided(
    memory: StepMemory, device: int, n_ranks: int, verdict: str, words: str
) -> None:
    (found,) = findings_of_memory(memory, device, n_ranks)
    assert found.verdict == verdict
    assert words in str(found)
    assert "4 GB parameters, 4 GB gradients, 8 GB of the optimizer: 16 GB" in found.found


def test_ranks_of_one_machine_share_its_memory() -> None:
    whole = memory_bytes(torch.device("cpu"), 1)
    assert whole > 1 << 28
    assert memory_bytes(torch.device("cpu"), 4) == whole // 4
