"""A model that is compiled, or recomputes activations, trains and travels as the same model without that."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from umbel.aggregation.codec.vector_update import GradientProjections
from umbel.aggregation.model.artifact import decode_model
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.aggregation.run.file import RunFile
from umbel.client import LocalPlan, TorchClient
from umbel.client.datacenter.train.train import train_run
from umbel.client.rounds.site_code import train_from
from umbel.client.training.shared_state import SharedState

pytestmark = pytest.mark.slow
HALF = CodecPlan(Codec.LOWRANK, key=7, parameters={"rank": 2, "mode": "structured"})


class _Recomputing(nn.Module):
    """Keeps no activations of its layers, but computes them again."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layers, inputs, use_reentrant=False)
        return found


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8))
        self.head: nn.Module = nn.Linear(8, 3)
        self.body[0].bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(inputs))
        return found


def plain() -> _Network:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return _Network()


def compiled() -> nn.Module:
    return cast(nn.Module, torch.compile(plain(), backend="eager"))


def compiled_in_place() -> nn.Module:
    model = plain()
    model.compile(backend="eager")
    return model


def with_a_compiled_part() -> nn.Module:
    model = plain()
    model.body = cast(nn.Sequential, torch.compile(model.body, backend="eager"))
    return model


def with_checkpointed_parts() -> nn.Module:
    model = plain()
    model.body[3] = checkpoint_wrapper(model.body[3])
    model.head = checkpoint_wrapper(model.head)
    return model


WAYS: list[Callable[[], nn.Module]] = [compiled, compiled_in_place, with_a_compiled_part, with_checkpointed_parts]


def site(model: nn.Module) -> TorchClient:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(40, 4, generator=draw)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    return TorchClient(model, "classes", data, holdout=data, device="cpu")


def trained(model: nn.Module) -> tuple[SharedState, dict[str, Tensor], float]:
    """After two rounds: the tensors by the names that travel, and the loss on held-out data."""
    app = site(model)
    shared = SharedState(app)
    start = {name: one.clone() for name, one in SharedState(plain()).shared().items()}
    plan = LocalPlan(epochs=2, batch_size=8, seed=5, learning_rate=0.1, proximal_mu=0.1, clip_norm=0.5)
    for codec in (CodecPlan(), HALF):
        train_from(app, shared, start, plan_within(plan, codec, shared))
    evaluation = app.evaluate(app.model)
    assert evaluation is not None
    return shared, {name: one.clone() for name, one in shared.shared().items()}, evaluation.metrics["loss"]


def plan_within(plan: LocalPlan, codec: CodecPlan, shared: SharedState) -> LocalPlan:
    return replace(plan, within=GradientProjections(codec, shared.layout))


@pytest.mark.parametrize("make", WAYS)
def test_a_wrapped_model_has_the_names_of_the_bare_one_and_trains_the_same_bits(
    make: Callable[[], nn.Module],
) -> None:
    shared, tensors, loss = trained(make())
    bare, expected, expected_loss = trained(plain())
    assert shared.layout == bare.layout
    assert shared.names_of("global") == bare.names_of("global") == ["body.0.bias"]
    assert tensors.keys() == expected.keys()
    for name, one in tensors.items():
        assert torch.equal(one, expected[name]), name
    assert loss == expected_loss


def test_a_model_that_recomputes_by_itself_trains_the_same_bits() -> None:
    model, again = plain().body, _Recomputing(plain().body)
    for one in (model, again):
        one_site = site(one)
        one_site.train(one, LocalPlan(epochs=1, batch_size=8, seed=5))
    for name, weights in model.state_dict().items():
        assert torch.equal(again.state_dict()[f"layers.{name}"], weights), name


def make_compiled() -> TorchClient:
    return site(compiled())


def test_the_model_file_of_a_run_has_bare_names(tmp_path: Path) -> None:
    rounds = {"count": 1, "target": 1, "minimum": 1, "window_s": 300.0}
    file = TypeAdapter(RunFile).validate_python({"name": "compiled", "rounds": rounds})
    end, _ = train_run(file, f"{__name__}:make_compiled", tmp_path / "out", None, lambda _: None)
    assert end is not None
    _, state = decode_model(Path(end.model).read_bytes())
    assert state.keys() == plain().state_dict().keys()
