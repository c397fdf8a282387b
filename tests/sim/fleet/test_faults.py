"""Devices that send rubbish or want to do harm: who, how many, and the same to the same update every time."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.fleet.sure import require_share
from umbel.sim.fleet.faults import Fault, Faults, flipped_labels
from umbel.sim.fleet.section import CorruptSection, MaliciousSection

N = 50_000
DEVICES = np.arange(N)
FAULTS = Faults(4, CorruptSection(0.1, per_round=0.5), MaliciousSection(0.2, kinds=("scaled", "noise"), scale=10.0))


def test_shares_and_kinds_are_as_the_section_says() -> None:
    kinds = FAULTS.of(DEVICES, 1, 1)
    for fault in (Fault.NAN, Fault.GARBAGE, Fault.LENGTH):
        require_share(kinds == fault, 0.1 / 3 / 2)
    for fault in (Fault.SCALED, Fault.NOISE):
        require_share(kinds == fault, 0.1)
    assert not np.isin(kinds, [Fault.SIGN_FLIP, Fault.LABEL_FLIP]).any()


def test_a_device_is_of_one_kind_for_good_and_corrupt_ones_show_it_now_and_then() -> None:
    rounds = np.array([FAULTS.of(DEVICES, number, 1) for number in range(1, 20)])
    malicious = np.isin(rounds[0], [Fault.SCALED, Fault.NOISE])
    assert (rounds[:, malicious] == rounds[0, malicious]).all()
    for column in rounds[:, ~malicious].T[:2000]:
        assert len(set(column.tolist()) - {0}) <= 1
    corrupt = (rounds[:, ~malicious] != 0).any(axis=0)
    require_share((rounds[:, ~malicious][:, corrupt] != 0)[10], 0.5)


def test_nobody_is_bad_unless_the_section_says_so() -> None:
    assert not Faults(4, CorruptSection(0.0), MaliciousSection(0.0)).of(DEVICES, 1, 1).any()


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 1 << 32))
def test_an_update_is_spoiled_alike_in_whatever_block_it_comes(k: int, n_values: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    devices, kinds = rng.permutation(1000)[:k], rng.integers(0, len(Fault), k).astype(np.int8)
    values = torch.from_numpy(rng.standard_normal((k, n_values)).astype(np.float32))
    together = values.clone()
    FAULTS.spoil(together, kinds, devices, 3, 1)
    for row in range(k):
        alone = values[row : row + 1].clone()
        FAULTS.spoil(alone, kinds[row : row + 1], devices[row : row + 1], 3, 1)
        assert alone.numpy().tobytes() == together[row : row + 1].numpy().tobytes()


def test_what_each_kind_does_to_an_update() -> None:
    values = torch.linspace(-1, 1, 1000).repeat(len(Fault), 1)
    before = values.clone()
    FAULTS.spoil(values, np.arange(len(Fault), dtype=np.int8), np.arange(len(Fault)), 3, 1)
    for fault in (Fault.NONE, Fault.GARBAGE, Fault.LENGTH, Fault.LABEL_FLIP):
        assert torch.equal(values[fault], before[fault])
    assert values[Fault.NAN].isnan().sum() == 1
    assert torch.equal(values[Fault.SCALED], 10 * before[0])
    assert torch.equal(values[Fault.SIGN_FLIP], -10 * before[0])
    noise = values[Fault.NOISE]
    assert noise.norm().item() == pytest.approx(10 * before[0].norm().item(), rel=1e-5)
    assert abs(torch.corrcoef(torch.stack([noise, before[0]]))[0, 1].item()) < 0.2


def test_flipped_labels_are_of_the_opposite_class_and_back() -> None:
    labels = torch.arange(10)
    assert flipped_labels(labels, 10).tolist() == labels.tolist()[::-1]
    assert torch.equal(flipped_labels(flipped_labels(labels, 10), 10), labels)
