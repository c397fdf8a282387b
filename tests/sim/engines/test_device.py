"""Engines on a GPU. Without one, torch's fake tensors stand "on cuda", and no operation takes one from elsewhere."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)

from tests.sim.engines.cohorts import Optimizing, all_changes, recipe, start_of, work_of
from umbel.aggregation.model.layout import Layout
from umbel.client.local.devices import whole_float32
from umbel.sim.engines import training
from umbel.sim.engines.choose import named_engine
from umbel.sim.engines.device import CPU, devices_of, found_device, moved, require_device_name
from umbel.sim.engines.model import LOSSES
from umbel.sim.engines.stacked.dense import dense_chain, train_dense
from umbel.sim.engines.stacked.lockstep import lockstep
from umbel.sim.engines.stacked.stacked import StackedEngine
from umbel.sim.engines.stacked.traced import _stack_of, stacked_gradients  # pyright: ignore[reportPrivateUsage]
from umbel.sim.engines.training import Draws, LocalTrainer
from umbel.sim.engines.work import EngineError
from umbel.sim.federation.local_work import Meter

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
SIZES, STEPS = [9, 3, 7], [5, 4, 2]
ALL_AT_ONCE = {"momentum": 0.9, "weight_decay": 0.01, "clip_norm": 1.0}
OPTIMIZERS = pytest.mark.parametrize(("optimizer", "mu"), [({}, 0.0), (ALL_AT_ONCE, 0.5)], ids=["plain", "all at once"])


# --- which device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:1 ", "mps", "CUDA", "cpu:0"])
def test_a_name_that_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match='must be "cpu", "cuda", or one GPU of several'):
        require_device_name(name)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpu", "cuda", "cuda:0", "cuda:12"):
        require_device_name(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EngineError, match='torch finds no GPU here; set device = "cpu"'):
        found_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert found_device("cuda") == torch.device("cuda", 0)
    assert found_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(EngineError, match='no GPU "cuda:2": torch finds 2 GPUs'):
        found_device("cuda:2")


def test_workers_take_all_gpus_in_turn_or_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices_of("cuda", None) == ["cuda:0", "cuda:1"]
    assert devices_of("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices_of("cuda:1", None) == ["cuda:1"]
    assert devices_of("cuda:1", 2) == ["cuda:1", "cuda:1"]


@pytest.mark.parametrize("name", ["auto", "sequential", "batched", "threads", "processes"])
def test_every_engine_of_this_machine_says_that_it_has_no_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EngineError, match="torch finds no GPU here"):
        named_engine(name, recipe("mlp"), None, "cuda")


# --- what goes there --------------------------------------------------------------------------------------------------


def test_only_the_cohort_s_samples_go_and_give_the_same_bits() -> None:
    work, start = work_of(SIZES, STEPS), start_of(recipe("mlp"))
    there = moved(work, CPU)
    assert len(there.data.samples) == sum(SIZES) < len(work.data.samples)
    for position in range(len(SIZES)):
        own, same = work.data.of(position), there.data.of(position)
        assert torch.equal(own.inputs, same.inputs)
        assert torch.equal(own.targets, same.targets)
    engine = named_engine("batched", recipe("mlp"))
    assert torch.equal(all_changes(engine, start, there)[0], all_changes(engine, start, work)[0])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device beside the processor, on which nothing is computed: as on a GPU, whatever meets there must be there.

    Without a GPU torch makes no tensor on "cuda"; it does on "meta", and fake ones are as strict with each other.
    """
    layout_of = Layout.of_state

    def of_state(state: Mapping[str, Tensor]) -> Layout:
        return layout_of({name: torch.zeros(one.shape, dtype=one.dtype) for name, one in state.items()})

    def model_moved(model: nn.Module, device: torch.device) -> nn.Module:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.detach().to(device)))
        return model

    monkeypatch.setattr(Layout, "of_state", of_state)  # which refuses tensors that have no values
    monkeypatch.setattr(nn.Module, "to", model_moved)  # which cannot change fake parameters in place
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 33, 1 << 34))
    with FakeTensorMode():
        yield "meta"


def test_what_is_on_two_devices_is_found_out(gpu: str) -> None:
    with pytest.raises(FakeTensorDeviceMismatchError):
        torch.add(torch.zeros(3), torch.zeros(3, device=gpu))


@OPTIMIZERS
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_chains_are_stacked_where_their_samples_are(gpu: str, name: str, optimizer: Optimizing, mu: float) -> None:
    device, model = torch.device(gpu), recipe(name).make()
    work = moved(work_of(SIZES, STEPS, optimizer=optimizer, proximal_mu=mu), device)
    layers, layout = dense_chain(model), Layout.of_state(model.state_dict())
    assert layers is not None
    weights = torch.empty(len(SIZES), layout.n_values, device=device)
    steps = lockstep(work, np.array([0, 1, 2]), 5)
    losses = train_dense(layers, torch.empty(layout.n_values, device=device), work, steps, weights)
    assert losses.device == device
    assert losses.shape == (sum(STEPS),)


@OPTIMIZERS
def test_any_module_is_stacked_where_its_samples_are(gpu: str, optimizer: Optimizing, mu: float) -> None:
    engine = StackedEngine(recipe("mlp").make(), by_hand=False, device=gpu)
    work = moved(work_of(SIZES, STEPS, optimizer=optimizer, proximal_mu=mu), torch.device(gpu))
    steps, seen = lockstep(work, np.array([0, 1, 2]), 5), list[str]()

    def gradients(
        weights: Mapping[str, Tensor], given: Tensor, wanted: Tensor, shares: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        seen.extend(one.device.type for one in (*weights.values(), given, wanted, shares))
        return dict(weights), shares.sum(1)  # a recording cannot be made of fake tensors

    engine._gradients[5] = gradients  # pyright: ignore[reportPrivateUsage]
    start = torch.empty(engine._layout.n_values, device=gpu)  # pyright: ignore[reportPrivateUsage]
    weights = start.expand(len(SIZES), -1).clone()
    losses = engine._train_traced(start, work, steps, weights)  # pyright: ignore[reportPrivateUsage]
    assert losses.device.type == gpu
    assert set(seen) == {gpu}


def test_a_module_is_recorded_where_it_is(gpu: str) -> None:
    examples = _stack_of(3, recipe("mlp").make().to(gpu), torch.zeros(5, 12, device=gpu), torch.zeros(5, device=gpu))
    assert {one.device.type for one in examples} == {gpu}


def test_what_is_recorded_of_a_module_names_no_device() -> None:
    """So that what it makes on its way is where its inputs are."""
    samples = work_of([5], [1]).data.samples
    for name in ("mlp", "small_convolution"):
        model = recipe(name).make()
        recorded = stacked_gradients(model, LOSSES["cross-entropy"], samples.inputs[:5], samples.targets[:5])
        graphs = [cell.cell_contents for cell in recorded.__closure__ or () if hasattr(cell.cell_contents, "graph")]
        (graph,) = (one.graph for one in graphs)
        named = [node for node in graph.nodes if node.kwargs.get("device") is not None]
        assert not named


@OPTIMIZERS
def test_clients_one_after_another_are_trained_where_the_model_is(
    gpu: str, optimizer: Optimizing, mu: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "difference", lambda *_: Draws.NOTHING)  # of generators, which are no fake ones
    made_by = recipe("mlp")
    trainer = LocalTrainer(made_by, gpu)
    work = work_of(SIZES, STEPS, optimizer=optimizer, proximal_mu=mu)
    trainer.begin(torch.empty(trainer.layout.n_values), work)
    # A fake loss is no number: that it is asked for means that every step before was taken.
    with pytest.raises(DataDependentOutputException):
        trainer.train(work, np.arange(3), torch.empty(3, trainer.layout.n_values))


def test_models_are_measured_where_they_are(gpu: str) -> None:
    samples = work_of([8], [1]).data.samples
    meter = Meter(recipe("mlp").make().to(torch.device(gpu)), LOSSES["cross-entropy"], True, torch.device(gpu))
    with pytest.raises(DataDependentOutputException):
        meter.of(samples)


def test_precision_is_as_it_was_before() -> None:
    cudnn: Any = torch.backends.cudnn
    before, inside = cudnn.conv.fp32_precision, list[str]()

    def fails() -> None:
        with whole_float32(torch.device("cuda", 0)):
            inside.append(cudnn.conv.fp32_precision)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fails()
    assert inside == ["ieee"] != [before]
    assert cudnn.conv.fp32_precision == before
    with whole_float32(CPU):
        assert cudnn.conv.fp32_precision == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("engine", ["sequential", "batched", "auto", "processes"])
@pytest.mark.parametrize("name", ["linear", "mlp", "small_convolution"])
def test_a_gpu_trains_the_same_within_rounding(engine: str, name: str) -> None:
    made_by, work = recipe(name), work_of(SIZES, STEPS, optimizer=ALL_AT_ONCE, proximal_mu=0.5)
    expected, expected_losses = all_changes(named_engine("sequential", made_by), start_of(made_by), work)
    with closing(named_engine(engine, made_by, None, "cuda")) as on_gpu:
        values, losses = all_changes(on_gpu, start_of(made_by), work)
    assert torch.allclose(values, expected, rtol=1e-3, atol=1e-5)
    assert np.allclose(losses, expected_losses, rtol=1e-4)
