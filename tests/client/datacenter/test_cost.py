"""What attempts and means cost: times of their parts, and bytes as the system counts them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from umbel.client.datacenter import cost
from umbel.client.datacenter.cost import PARTS, AttemptCost, CostMeter, LoopMeter, bytes_sent, norm_and_cosine

COUNTERS = """Inter-| Receive | Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0      200      1    0    0    0     0       0       0
  eth0:     300       1    0    0    0     0          0         0     4000      1    0    0    0     0       0       0
"""


def test_the_bytes_of_all_interfaces_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_COUNTERS", tmp_path / "dev")
    assert bytes_sent() is None
    assert CostMeter().ended() == AttemptCost()
    (tmp_path / "dev").write_text(COUNTERS)
    assert bytes_sent() == 4200
    meter = CostMeter()
    (tmp_path / "dev").write_text(COUNTERS.replace("4000", "5000"))
    assert meter.ended().sent_bytes == 1000


def test_each_part_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr(cost, "monotonic", lambda: next(clock))
    meter = CostMeter()
    for part in PARTS:
        meter.end(part)
    assert replace(meter.ended(), sent_bytes=None) == AttemptCost(1.0, 2.0, 3.0, 4.0)


def test_a_loops_own_share_counts_from_the_mean_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 14.0, 14.0])
    monkeypatch.setattr(cost, "monotonic", lambda: next(clock))
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
