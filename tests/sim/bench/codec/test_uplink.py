"""A run's plans follow from one another as a coordinator's do, and error feedback is each client's own."""

import pytest
import torch
from torch import Tensor

from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.codec.update_codec import Part
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.grid import Grid
from umbel.aggregation.types import ClientId
from umbel.sim.bench.codec.uplink import Uplink

N_VALUES = 5000
LAYOUT = Layout.of_state({"x": torch.zeros(N_VALUES)})
GRID = Grid.finest(max_abs=64.0, total_weight_max=100)
ANN, BEN = ClientId("ann"), ClientId("ben")


def change(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(N_VALUES, generator=torch.Generator().manual_seed(seed)) * scale


def play(uplink: Uplink, *changes: Tensor) -> Tensor:
    """One round, of as many clients of weight 1; the mean."""
    total = uplink.codec.new_sum()
    for rank, (client, sent) in enumerate(zip((ANN, BEN), changes, strict=False)):
        total.add(uplink.read(uplink.write(client, rank, sent), rank), 1)
    mean = uplink.codec.mean(total, [Part(1, rank) for rank in range(len(changes))]).mean_slice(0, N_VALUES)
    uplink.go_on(total)
    return mean


def test_the_step_follows_the_updates_of_the_round_before() -> None:
    uplink = Uplink(CodecSection(name="integer", step=2.0, first_norm=0.707), GRID, LAYOUT, seed=1)
    errors = list[float]()
    for scale in (0.01, 0.01, 0.02, 0.02):
        sent = change(1, scale)
        errors.append(float((play(uplink, sent, sent) - sent).square().mean().sqrt()))
    first, same, lagging, doubled = errors
    assert same == pytest.approx(first, rel=0.1)
    assert lagging == pytest.approx(same, rel=0.1), "the step was made before the updates grew"
    assert doubled == pytest.approx(2 * same, rel=0.1)


def test_what_was_not_sent_is_sent_later_and_each_client_has_its_own() -> None:
    uplink = Uplink(CodecSection(name="topk", share=0.1, precision="float32", error_feedback=True), GRID, LAYOUT, 1)
    zero = torch.zeros(N_VALUES)
    found = [play(uplink, change(1), change(2)), *(play(uplink, zero, zero) for _ in range(12))]
    assert float((found[0] - (change(1) + change(2)) / 2).abs().max()) > 0.1
    torch.testing.assert_close(sum(found), ((change(1) + change(2)) / 2).double(), atol=1e-6, rtol=0)


def test_a_client_that_was_away_begins_anew() -> None:
    section = CodecSection(name="topk", share=0.1, precision="float32", error_feedback=True)
    stayed, left = Uplink(section, GRID, LAYOUT, 1), Uplink(section, GRID, LAYOUT, 1)
    for uplink in (stayed, left):
        play(uplink, change(1))
    play(stayed, torch.zeros(N_VALUES))
    left.go_on(left.codec.new_sum())
    assert float(play(stayed, torch.zeros(N_VALUES)).abs().max()) > 0
    assert float(play(left, torch.zeros(N_VALUES)).abs().max()) == 0
