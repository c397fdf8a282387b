"""The generators of this process."""

import random

import numpy as np
import pytest
import torch

from umbel.client.local import devices
from umbel.client.local.devices import seed_generators, seeded


@pytest.mark.parametrize("has_accelerator", [True, False])
def test_the_generators_draw_what_torch_s_own_seed_gives(
    has_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_has_accelerator", lambda: has_accelerator)
    with seeded(0, torch.device("cpu")):
        seed_generators((1 << 63) - 5)
        drawn = torch.rand(3), random.random(), np.random.rand()
        torch.manual_seed((1 << 63) - 5)
        random.seed((1 << 63) - 5)
        np.random.seed(((1 << 63) - 5) % (1 << 32))
        assert torch.equal(drawn[0], torch.rand(3))
        assert drawn[1:] == (random.random(), np.random.rand())
