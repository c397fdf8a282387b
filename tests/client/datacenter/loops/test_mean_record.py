"""What a mean costs a loop, and the norms and angles of the ranks' changes."""

import pytest
import torch

from umbel.client.datacenter.loops import mean_record
from umbel.client.datacenter.loops.mean_record import LoopMeter, norm_and_cosine


def test_a_loops_own_share_counts_from_the_mean_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 14.0, 14.0])
    monkeypatch.setattr(mean_record, "monotonic", lambda: next(clock))
    meter = LoopMeter()
    meter.add(1.0)
    meter.add(1.5)
    assert meter.ended(20) == (0.75, 2.0)
    meter.add(3.0)
    assert meter.ended(22) == (0.25, 0.5)
    assert meter.ended(22)[1] == 0.0, "the clock stands still"


def test_the_norm_and_the_angle_of_a_change() -> None:
    change, mean = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    norm, cosine = norm_and_cosine(change, mean)
    assert [float(norm), float(cosine)] == pytest.approx([5.0, 24 / 25])
    assert [float(one) for one in norm_and_cosine(torch.zeros(2), mean)] == [0.0, 0.0]
    assert [float(one) for one in norm_and_cosine(change, torch.zeros(2))] == [5.0, 0.0]
