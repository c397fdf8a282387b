"""What attempts cost: times of their parts, and bytes as the system counts them."""

from dataclasses import replace
from pathlib import Path

import pytest

from umbel.client.datacenter.train import cost
from umbel.client.datacenter.train.cost import PARTS, AttemptCost, CostMeter, bytes_sent

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
