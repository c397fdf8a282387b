"""Where an update is encoded: on the GPU of the model if there is room, with the bytes of the CPU."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.aggregation.codec.gpu_cases import PLANS, crossed, encoded
from tests.client.doubles.double import TOKEN, URL, Double
from tests.client.doubles.secure_double import SecureDouble
from tests.client.test_secure_rounds import SAMPLES, Ward, take_part
from tests.suite.stand_in_gpu import GPU, StandInGpu
from umbel.aggregation.kernels import kernels
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.tensors import TensorKind
from umbel.aggregation.secagg.masked_input import lane_dtype
from umbel.client import Client, LocalPlan, TrainResult, run_client
from umbel.client.training.encoding_device import CPU, encoding_device, where_memory_suffices
from umbel.client.training.shared_state import SharedState


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton needs a real GPU."""
    monkeypatch.setattr(kernels, "_triton", lambda: None)


class Holder(Client):
    """A client whose model has just these tensors. Each round adds `steps` to them. `kinds`: that it declares."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        steps: dict[str, Tensor] | None = None,
        kinds: dict[str, TensorKind] | None = None,
    ) -> None:
        self.model, self.sample_count, self._steps, self._kinds = nn.Module(), 1, steps or {}, kinds or {}
        for name, tensor in tensors.items():
            self.model.register_buffer(name, tensor)

    def shares(self, name: str) -> TensorKind | None:
        return self._kinds.get(name)

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        for name, step in self._steps.items():
            model.get_buffer(name).add_(step)
        return TrainResult(1, 1, 1)


# --- which device -----------------------------------------------------------------------------------------------------


def test_a_model_on_the_cpu_or_on_a_device_without_float64_is_encoded_on_the_cpu() -> None:
    assert encoding_device(nn.Linear(2, 2)) == CPU
    assert encoding_device(nn.Module()) == CPU
    assert encoding_device(nn.Linear(2, 2, device="meta")) == CPU


def test_one_tensor_on_a_gpu_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with StandInGpu():
        app = Holder({"counter": torch.zeros(3), "weight": torch.zeros(3).to(GPU)})
        assert encoding_device(app.model) == GPU
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert encoding_device(app.model) == CPU


def test_without_room_on_the_gpu_the_cpu_encodes_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tried = list[torch.device]()

    def make(device: torch.device) -> str:
        tried.append(device)
        if device == GPU:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return "made"

    with caplog.at_level(logging.INFO, "umbel.client"):
        assert where_memory_suffices(make, GPU) == "made"
    assert tried == [GPU, CPU]
    assert caplog.messages == [
        "the GPU has too little free memory to encode the update, so the CPU encodes it: CUDA out of memory. Tried to "
        "allocate 2.00 GiB"
    ]
    caplog.clear()
    assert where_memory_suffices(make, CPU) == "made"
    assert not caplog.messages


def test_another_failure_of_the_gpu_is_not_hidden() -> None:
    def make(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        where_memory_suffices(make, GPU)


# --- the same bytes ---------------------------------------------------------------------------------------------------

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WHOLE = (torch.int64, torch.int32, torch.uint8, torch.bool)
SHAPES = st.sampled_from([(), (0,), (1,), (7,), (300,), (20, 17), (3, 2, 5), (40, 65)])


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in WHOLE:
        return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)
    return (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)).to(dtype)


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor], list[tuple[str, str]]]:
    """The start, the trained weights, and pairs of names for one tensor. Some tensors are exact, one is transposed."""
    names: list[str] = draw(
        st.lists(st.sampled_from(["bias", "count", "running_mean", "scale", "weight"]), unique=True)
    )
    start, local = dict[str, Tensor](), dict[str, Tensor]()
    for name in names:
        dtypes = WHOLE if name == "count" else FLOATS
        shape, dtype, seed = draw(SHAPES), draw(st.sampled_from(dtypes)), draw(st.integers(0, 1 << 30))
        start[name], local[name] = drawn(shape, dtype, seed), drawn(shape, dtype, seed + 1)
        if len(shape) == 2 and draw(st.booleans()):
            local[name] = local[name].t().contiguous().t()
    has_tie = bool(names) and draw(st.booleans())
    ties = [("tied", draw(st.sampled_from(names)))] if has_tie else []
    return start | {new: start[old] for new, old in ties}, local, ties


def update_of(name: str, start: dict[str, Tensor], app: Client, device: torch.device, clip: float | None) -> bytes:
    shared, plan = SharedState(app), replace(PLANS[name], clip_norm=clip)
    return encoded(plan, shared.layout, shared.changes(shared.layout.full_state(start), device))


_OF_FLOATS = sorted(set(get_args(TensorKind)) - {"count", "control"})  # which are for integers, and of no site
KINDS = st.dictionaries(st.sampled_from(["bias", "scale"]), st.sampled_from(_OF_FLOATS), max_size=2)


@given(models(), KINDS, st.sampled_from(sorted(PLANS)), st.sampled_from([None, 2.0]))
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_an_update_of_any_model_has_the_same_bytes(
    model: tuple[dict[str, Tensor], dict[str, Tensor], list[tuple[str, str]]],
    kinds: dict[str, TensorKind],
    name: str,
    clip: float | None,
) -> None:
    start, local, ties = model
    kinds |= {new: kinds[old] for new, old in ties if old in kinds}
    app = Holder(local | {new: local[old] for new, old in ties}, kinds=kinds)
    expected = update_of(name, start, app, CPU, clip)
    with StandInGpu():
        there = {one: tensor.to(GPU) for one, tensor in local.items()}
        app = Holder(there | {new: there[old] for new, old in ties}, kinds=kinds)
        assert encoding_device(app.model) == (GPU if local else CPU)
        assert update_of(name, start, app, encoding_device(app.model), clip) == expected


# --- whole rounds -----------------------------------------------------------------------------------------------------

N_ROWS, N_COLUMNS = 30, 1000


def weights(seed: int) -> dict[str, Tensor]:
    shapes = {"bias": (N_ROWS,), "weight": (N_ROWS, N_COLUMNS)}
    return {name: drawn(shape, torch.float32, seed + place) for place, (name, shape) in enumerate(shapes.items())}


def sent_by(folder: Path, plan: CodecPlan, device: torch.device) -> list[bytes]:
    """The updates of two rounds of a client whose model is on this device."""
    double = Double(Holder(weights(0)).model, rounds=2)
    double.codec = plan
    start, steps = ({name: one.to(device) for name, one in weights(seed).items()} for seed in (5, 9))
    app = Holder(start, steps)
    end = run_client(app, URL, folder, "demo", TOKEN, transport=double.transport())
    assert end.accepted == 2
    return [bytes(one.data) for one in double.uploads.values()]


FED = replace(PLANS["topk"], feedback=True)
ROUNDS = {"eden": PLANS["eden"], "ternary": PLANS["ternary"], "topk with error feedback": FED}


@pytest.mark.parametrize("plan", ROUNDS.values(), ids=ROUNDS)
def test_rounds_of_a_model_on_the_gpu_send_the_bytes_of_the_cpu(tmp_path: Path, plan: CodecPlan) -> None:
    expected = sent_by(tmp_path / "cpu", plan, CPU)
    with StandInGpu() as gpu:
        assert sent_by(tmp_path / "gpu", plan, GPU) == expected
    n_kept = 2 * N_ROWS * (N_COLUMNS + 1) if plan.feedback else 0  # on the client's disk, as float32
    assert crossed(gpu.down).get(torch.float32, 0) == n_kept


@pytest.mark.parametrize("plan", ROUNDS.values(), ids=ROUNDS)
def test_rounds_for_which_the_gpu_has_no_room_send_the_same_bytes(
    tmp_path: Path, plan: CodecPlan, caplog: pytest.LogCaptureFixture
) -> None:
    n_bytes = 4 * N_ROWS * (N_COLUMNS + 1)
    with StandInGpu(memory_bytes=5 * n_bytes // 2):  # the model, its steps, and half of one
        sent = sent_by(tmp_path / "gpu", plan, GPU)
    assert sent == sent_by(tmp_path / "cpu", plan, CPU)
    assert caplog.text.count("the GPU has too little free memory to encode the update") == 2, "once a round"


class OnGpuWard(Ward):
    """The ward of the secure rounds' tests, with its model on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Holder({name: one.to(GPU) for name, one in self.model.state_dict().items()}).model

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        for buffer in model.buffers():
            buffer.add_(0.75)
        return TrainResult(self.sample_count, 4, 4, {"loss": 0.5})


@pytest.mark.parametrize("memory_bytes", [None, 2000], ids=["with room", "without"])
def test_a_secure_round_of_a_model_on_the_gpu_is_summed_and_unmasked(tmp_path: Path, memory_bytes: int | None) -> None:
    """Its peers change every weight by a quarter. Without room for the change, the CPU makes the masked update."""
    double = SecureDouble(Ward().model)
    with StandInGpu("linalg_vector_norm", memory_bytes=memory_bytes) as gpu:
        assert take_part(tmp_path, double, OnGpuWard()).opened == 1
    totals = double.totals[-1]
    mean, weight = totals.mean.mean_slice(0, 310), totals.total_weight
    share = SAMPLES / weight
    assert float((mean - (0.75 * share + 0.25 * (1 - share))).abs().max()) < 0.1
    assert set(crossed(gpu.down)) == {torch.float32 if memory_bytes else lane_dtype(double.plan.bits)}
