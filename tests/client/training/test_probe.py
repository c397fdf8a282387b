"""What a client does of a share of the work, and what it measures of itself."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import Assignment, ModelRef, assignment_id
from umbel.aggregation.plans.codec import CodecPlan, Grid
from umbel.aggregation.plans.round import Task
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.types import ClientId, RunId
from umbel.client import Client, LocalPlan, TorchClient, TrainResult
from umbel.client.errors import CoordinatorMisbehaved
from umbel.client.rounds.site_code import train
from umbel.client.training.probe import memory_free_bytes, probe_of
from umbel.client.training.shared_state import SharedState
from umbel.client.wire.offers import check_offer
from umbel.client.wire.timing import Bandwidth


class Ward(Client):
    """Says nothing but what it must."""

    def __init__(self) -> None:
        self.model, self.sample_count = nn.Linear(2, 1), 100

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return TrainResult(100, 1, 1)


def offer(training: TrainingPlan | None = None, share: float = 0.01) -> Assignment:
    layout = Layout.of_state(Ward().model.state_dict())
    return Assignment(
        id=assignment_id(RunId("demo"), 1, 1, ClientId("w"), Task.CANARY),
        run=RunId("demo"),
        round=1,
        attempt=1,
        model=ModelRef(0, "ab" * 32, 500, layout.digest),
        training=training or TrainingPlan(),
        codec=CodecPlan(),
        grid=Grid.finest(max_abs=64.0, total_weight_max=100),
        sample_count_max=100,
        seed=1,
        window_s=60.0,
        task=Task.CANARY,
        share=share,
    )


@pytest.mark.parametrize(
    ("plan", "steps", "full"),
    [
        (LocalPlan(epochs=2), 60, 60),
        (LocalPlan(epochs=2, share=0.01), 3, 60),
        (LocalPlan(epochs=2, share=0.1), 6, 60),
        (LocalPlan(steps=7, share=0.5), 4, 7),
        (LocalPlan(steps=100, share=0.07), 7, 100),
        (LocalPlan(share=0.01), 3, 30),
        (LocalPlan(steps=2, share=0.01), 2, 2),
    ],
)
def test_a_share_of_the_steps_is_at_least_three_where_there_are_so_many(plan: LocalPlan, steps: int, full: int) -> None:
    assert (plan.steps_for(30), plan.full_steps_for(30)) == (steps, full)


def test_the_ready_trainer_does_its_share_and_says_what_a_whole_round_is() -> None:
    data = TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
    app = TorchClient(nn.Linear(2, 1), nn.functional.mse_loss, data, device="cpu")
    whole = app.train(app.model, LocalPlan(epochs=4, batch_size=8))
    assert (whole.steps_done, whole.steps_planned, whole.steps_full) == (32, 32, 32)
    result = app.train(app.model, LocalPlan(epochs=4, batch_size=8, learning_rate=0.1, share=0.1))
    assert (result.steps_done, result.steps_planned, result.steps_full) == (4, 4, 32)
    assert result.first_loss is not None
    assert result.last_loss is not None
    assert result.first_loss > result.metrics["loss"] > result.last_loss


@pytest.mark.parametrize(
    ("training", "planned", "full"),
    [
        (TrainingPlan(local_epochs=2, batch_size=30), 1, 8),
        (TrainingPlan(local_steps=60), 1, 60),
        (TrainingPlan(local_steps=60), 90, 90),
    ],
)
def test_a_whole_round_is_estimated_where_the_site_does_not_tell(
    training: TrainingPlan, planned: int, full: int
) -> None:
    probe = probe_of(Ward(), TrainResult(100, 1, planned), 3.0, offer(training), Bandwidth())
    assert (probe.steps_full, probe.step_s) == (full, 3.0)
    assert (probe.download_bytes_per_s, probe.first_loss, probe.last_loss) == (None, None, None)
    assert probe.memory_bytes is not None
    assert probe.memory_bytes > 1 << 20


def test_losses_are_taken_from_where_they_are() -> None:
    told = TrainResult(100, 2, 2, {"loss": 0.5}, steps_full=200, first_loss=0.75, last_loss=0.25)
    probe = probe_of(Ward(), told, 3.0, offer(), Bandwidth(down=7e6))
    assert (probe.steps_full, probe.step_s, probe.download_bytes_per_s) == (200, 3.0, 7e6)
    assert (probe.first_loss, probe.last_loss, probe.is_loss_finite) == (0.75, 0.25, True)
    mean = probe_of(Ward(), TrainResult(100, 1, 1, {"loss": 0.5}), 3.0, offer(), Bandwidth())
    assert (mean.first_loss, mean.last_loss) == (None, 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_said_and_not_sent(bad: float) -> None:
    for result in (
        TrainResult(100, 1, 1, {"loss": bad}),
        TrainResult(100, 1, 1, {}, steps_full=1, first_loss=1.0, last_loss=bad),
    ):
        probe = probe_of(Ward(), result, 3.0, offer(), Bandwidth())
        assert (probe.last_loss, probe.is_loss_finite) == (None, False)


def test_free_memory_is_the_containers_where_that_is_less(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert memory_free_bytes(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:       16000000 kB\nMemAvailable:   4000000 kB\n")
    assert memory_free_bytes(meminfo, tmp_path) == 4_096_000_000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert memory_free_bytes(meminfo, tmp_path) == 4_096_000_000
    (tmp_path / "memory.max").write_text("10000\n")
    assert memory_free_bytes(meminfo, tmp_path) == 7000
    (tmp_path / "memory.current").write_text("13000\n")
    assert memory_free_bytes(meminfo, tmp_path) == 0


@pytest.mark.parametrize(("reserved", "told"), [((3, 5), (5, 8)), ((6, 0), (6, 16)), ((0, 0), (None, None))])
def test_the_memory_of_the_fullest_gpu_is_told_where_one_was_used(
    monkeypatch: pytest.MonkeyPatch, reserved: tuple[int, int], told: tuple[int | None, int | None]
) -> None:
    """Here the first has 16 bytes, the second 8."""
    totals = (16, 8)
    for name, fake in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "max_memory_reserved": lambda device: reserved[device],
        "get_device_properties": lambda device: SimpleNamespace(total_memory=totals[device]),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    probe = probe_of(Ward(), TrainResult(100, 1, 1), 3.0, offer(), Bandwidth())
    assert (probe.device_memory_bytes, probe.device_memory_total_bytes) == told


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, math.nan])
def test_a_share_that_makes_no_sense_is_refused(share: float) -> None:
    layout = Layout.of_state(Ward().model.state_dict())
    check_offer(offer(), RunId("demo"), ClientId("w"), layout)
    with pytest.raises(CoordinatorMisbehaved, match="a share of"):
        check_offer(offer(share=share), RunId("demo"), ClientId("w"), layout)


@pytest.mark.parametrize("rank", [-1, 1 << 32])
def test_a_rank_that_no_cohort_has_is_refused(rank: int) -> None:
    layout = Layout.of_state(Ward().model.state_dict())
    with pytest.raises(CoordinatorMisbehaved, match="rank is"):
        check_offer(replace(offer(), rank=rank), RunId("demo"), ClientId("w"), layout)


class Watch:
    """Stands for the module `time`: it shows what the test has set."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Cold(Ward):
    """Its first step takes long; it asks after each step, or never."""

    def __init__(self, asks: bool, watch: Watch) -> None:
        super().__init__()
        self.asks, self.watch = asks, watch

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.watch.now += 0.3
        for _ in range(2):
            if self.asks:
                plan.should_stop()
            self.watch.now += 0.01
        return TrainResult(100, 3, 3)


def test_the_first_step_is_left_out_of_what_a_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    monkeypatch.setattr("umbel.client.rounds.site_code.time", watch)
    model = tmp_path / "model.safetensors"
    state = Ward().model.state_dict()
    model.write_bytes(encode_model(state))
    once, never = Cold(True, watch), Cold(False, watch)
    warm = train(once, SharedState(once), model, LocalPlan())
    assert warm.train_s == pytest.approx(0.32)
    assert warm.step_s == pytest.approx(0.01)
    assert train(never, SharedState(never), model, LocalPlan()).step_s == pytest.approx(0.32 / 3)
