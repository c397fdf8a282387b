"""A silo of several ranks trains as one process does, whatever its ranks hold of the model."""

import logging.handlers
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from examples import silo_of_ranks as example
from tests.aggregation.collective.ranks import in_ranks
from tests.suite.nights import at_night
from umbel.aggregation.codec.vector_update import GradientProjections
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.client import Client, Evaluation, TorchClient
from umbel.client.datacenter.ranks.group import Group, GroupError, joined
from umbel.client.datacenter.silo import rank as silo_rank
from umbel.client.datacenter.silo.client import SiloClient
from umbel.client.datacenter.silo.orders import Order, OrderKind
from umbel.client.datacenter.silo.rank import SiloRank, follow, require_parts
from umbel.client.datacenter.silo.results import one_evaluation
from umbel.client.datacenter.silo.tensors import SiloTensors
from umbel.client.errors import TrainingFailed
from umbel.client.local.batches import WHOLE, BatchPart
from umbel.client.local.plan import LocalPlan
from umbel.client.rounds.inexactness import MissingGamma
from umbel.client.rounds.site_code import train_from
from umbel.client.training.shared_state import SharedState

pytestmark = pytest.mark.slow
HERE = "tests.client.datacenter.silo.test_silo"
N, BATCH = 37, 8  # the last batch has five samples, so ranks take unequal parts
PLAN = LocalPlan(epochs=3, batch_size=BATCH, learning_rate=0.05, seed=4, momentum=0.9, client="a", run="r")


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 15), nn.LayerNorm(15), nn.ReLU(), nn.Linear(15, 3))


def within(codec: Codec, **parameters: Any) -> GradientProjections:
    plan = CodecPlan(codec, key=9, parameters={"mode": "structured", **parameters})
    return GradientProjections(plan, Layout.of_state(network().state_dict()))


PULLS = {name: torch.full_like(one, 0.02) for name, one in network().state_dict().items()}
PLANS: dict[str, LocalPlan] = {
    "plain": PLAN,
    "adamw": replace(PLAN, optimizer="adamw"),
    "prox": replace(PLAN, proximal_mu=0.3, clip_norm=0.5),
    "mask": replace(PLAN, within=within(Codec.MASK, every=3), clip_norm=0.5),
    "lowrank": replace(PLAN, within=within(Codec.LOWRANK, rank=2)),
    "feddyn": replace(PLAN, algorithm="feddyn", proximal_mu=0.1, pulls=PULLS),
}


def samples(n: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 6, generator=draw)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def client(model: nn.Module, part: BatchPart = WHOLE, accumulate: int = 1) -> TorchClient:
    return TorchClient(
        model, "classes", samples(N, 0), samples(21, 1), evaluation_batch_size=4, accumulate=accumulate, part=part
    )


def plain(plan: LocalPlan) -> tuple[TorchClient, Any, Any]:
    """The client in one process, and its result and evaluation."""
    one = client(network())
    before = one.evaluate(one.model)
    return one, one.train(one.model, plan.bound_to(one.model)), before


def ddp(_: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(network())


def fsdp(_: dist.ProcessGroup) -> nn.Module:
    model = network()
    for layer in model:
        if [*layer.parameters()]:
            fully_shard(layer)
    fully_shard(model)
    return model


WAYS: dict[str, Callable[[dist.ProcessGroup], nn.Module]] = {"ddp": ddp, "fsdp": fsdp}


def led(rank: SiloRank, lead: Callable[[SiloClient], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What rank 0 finds as it leads, while the others follow."""
    if not rank.ranks.is_first:
        follow(rank)
        return {}
    silo = SiloClient(rank)
    silo.begin()
    try:
        return lead(silo)
    finally:
        silo.end("the test is over", failed=False)


def scratch() -> Path:
    return Path(mkdtemp())


def silo_of(app: Client, group: dist.ProcessGroup, folder: Path) -> SiloRank:
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]  # as `joined` keeps it
    ranks = Group(dist.get_rank(group), dist.get_world_size(group), torch.device("cpu"), group, _board=store)
    return SiloRank(app, ranks, folder)


def trained(group: dist.ProcessGroup) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for way, wrapped in WAYS.items():
        for name, plan in PLANS.items():
            app = client(wrapped(group), BatchPart(dist.get_rank(group), dist.get_world_size(group)))
            found |= {
                f"{way} {name} {key}": one for key, one in led(silo_of(app, group, scratch()), one_round(plan)).items()
            }
    return found


def one_round(plan: LocalPlan) -> Callable[[SiloClient], dict[str, Tensor]]:
    def lead(silo: SiloClient) -> dict[str, Tensor]:
        evaluation = silo.evaluate(silo.model)
        result = silo.train(silo.model, plan.bound_to(silo.model))
        assert evaluation is not None
        told = {
            "before": torch.tensor(
                [evaluation.sample_count, evaluation.metrics["loss"], evaluation.metrics["accuracy"]]
            ),
            "result": torch.tensor(
                [
                    result.sample_count,
                    result.steps_done,
                    result.steps_planned,
                    result.metrics["loss"],
                    result.samples_seen,
                ]
            ),
        }
        return {**silo.model.state_dict(), **told}

    return lead


@pytest.mark.parametrize("n_ranks", [2, *at_night(3)])
def test_ddp_and_fsdp_train_as_one_process(n_ranks: int, tmp_path: Path) -> None:
    found = in_ranks(f"{HERE}:trained", n_ranks, tmp_path)[0]
    for name, plan in PLANS.items():
        one, result, before = plain(plan)
        for way in WAYS:
            for key, value in one.model.state_dict().items():
                torch.testing.assert_close(found[f"{way} {name} {key}"], value, rtol=1e-5, atol=1e-6)
            expected = torch.tensor([21, before.metrics["loss"], before.metrics["accuracy"]])
            torch.testing.assert_close(found[f"{way} {name} before"], expected, rtol=1e-5, atol=1e-6)
            expected = torch.tensor([N, 15, 15, result.metrics["loss"], 3 * N])
            torch.testing.assert_close(found[f"{way} {name} result"], expected, rtol=1e-5, atol=1e-6)


def unmeasured(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """A round that asks for gamma, and another one after it."""

    def lead(silo: SiloClient) -> dict[str, Tensor]:
        shared, plan, missing = SharedState(silo), replace(PLAN, inexactness=True), MissingGamma()
        said = logging.handlers.BufferingHandler(100)
        logging.getLogger("umbel.client").addHandler(said)
        for _ in range(2):
            start = {name: one.clone() for name, one in shared.shared().items()}
            assert "gamma" not in train_from(silo, shared, start, plan, missing).result.metrics
        (line,) = [one.getMessage() for one in said.buffer if "gamma" in one.getMessage()]
        assert "a client of several ranks does not measure its inexactness. The log does not say so again" in line
        return {name: one.clone() for name, one in silo.model.state_dict().items()}

    app = client(ddp(group), BatchPart(dist.get_rank(group), dist.get_world_size(group)))
    return led(silo_of(app, group, scratch()), lead)


def test_a_silo_leaves_gamma_out_and_its_model_is_that_of_its_training(tmp_path: Path) -> None:
    found, (one, *_) = in_ranks(f"{HERE}:unmeasured", 2, tmp_path)[0], plain(PLAN)
    one.train(one.model, PLAN.bound_to(one.model))
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def piped(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """A pipeline with a stage on each rank, as a silo whose ranks all take the same batches."""

    def lead(silo: SiloClient) -> dict[str, Tensor]:
        assert silo.evaluate(silo.model) is None
        result = silo.train(silo.model, PIPED.bound_to(silo.model))
        assert (result.sample_count, result.steps_done) == (128, 16)
        return {**silo.model.state_dict(), "loss": torch.tensor(result.metrics["loss"])}

    torch.manual_seed(8)
    return led(silo_of(example.staged(), group, scratch()), lead)


PIPED = replace(PLAN, epochs=2, batch_size=16, proximal_mu=0.1, clip_norm=0.05)


def test_the_stages_of_a_pipeline_train_as_one_process(tmp_path: Path) -> None:
    found = in_ranks(f"{HERE}:piped", 2, tmp_path)[0]
    torch.manual_seed(8)
    one = example.plain()
    result = one.train(one.model, PIPED.bound_to(one.model))
    torch.testing.assert_close(found.pop("loss"), torch.tensor(result.metrics["loss"]), rtol=1e-5, atol=1e-6)
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


class Remembering(TorchClient):
    """Counts in `plan.state` how often it was prepared, and tells it on each rank."""

    def prepare(self, plan: LocalPlan) -> None:
        plan.state["count"] = plan.state.get("count", torch.zeros(())) + 1 + plan.part.index
        self.told = plan.state["count"]

    def training_loss(self, model: nn.Module) -> float | None:
        return float(self.told) if self.part.index else None


def remembered(group: dist.ProcessGroup) -> dict[str, Tensor]:
    part = BatchPart(dist.get_rank(group), dist.get_world_size(group))
    app = Remembering(fsdp(group), "classes", samples(N, 0), part=part)

    def lead(silo: SiloClient) -> dict[str, Tensor]:
        plan = replace(PLAN, state={})
        told = list[float | None]()
        for _ in range(2):
            silo.prepare(plan)
            told.append(silo.training_loss(silo.model))
        return {"kept": plan.state["count"], "told": torch.tensor(told)}

    return led(silo_of(app, group, scratch()), lead)


def test_all_ranks_begin_with_the_state_of_rank_0_and_its_changes_are_kept(tmp_path: Path) -> None:
    found = in_ranks(f"{HERE}:remembered", 2, tmp_path)[0]
    assert found["kept"] == 2
    assert found["told"].tolist() == [2, 3]  # rank 1 adds two to what rank 0 had


class FailsOnRank1(TorchClient):
    """In its first evaluation, which has no sum."""

    n_evaluations = 0

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        self.n_evaluations += 1
        if dist.get_rank() == 1 and self.n_evaluations == 1:
            raise ValueError("this sample is broken")
        return super().evaluate(model)


def failing_apart(group: dist.ProcessGroup) -> dict[str, Tensor]:
    part = BatchPart(dist.get_rank(group), dist.get_world_size(group))
    app = FailsOnRank1(ddp(group), "classes", samples(N, 0), samples(21, 1), part=part)

    def lead(silo: SiloClient) -> dict[str, Tensor]:
        with pytest.raises(
            TrainingFailed, match=r"failed on rank 1 with ValueError: this sample is broken \(test_silo.py, line \d+\)"
        ) as failed:
            silo.evaluate(silo.model)
        assert failed.value.public_reason == "the client's own code failed with ValueError; see the client's log"
        evaluation = silo.evaluate(silo.model)
        assert evaluation is not None
        return {"n": torch.tensor(evaluation.sample_count)}

    return led(silo_of(app, group, scratch()), lead)


def test_code_that_fails_on_one_rank_and_outside_sums_fails_this_order_alone(tmp_path: Path) -> None:
    assert in_ranks(f"{HERE}:failing_apart", 2, tmp_path)[0]["n"] == 21


def nested(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """A part of the model is in DDP."""
    model = network()
    model[0] = DistributedDataParallel(model[0])
    with pytest.raises(GroupError, match=r"does not find the tensor '0.module.weight' .* wrap the whole model in it"):
        silo_of(client(model), group, scratch())
    return {}


def test_ddp_inside_the_model_is_refused(tmp_path: Path) -> None:
    in_ranks(f"{HERE}:nested", 2, tmp_path)


def test_a_metric_that_is_not_finite_is_told_with_its_rank(caplog: pytest.LogCaptureFixture) -> None:
    results = [Evaluation(3, {"loss": 1.0, "accuracy": 0.5}), Evaluation(4, {"loss": math.nan, "accuracy": 0.5})]
    found = one_evaluation([BatchPart(0, 2), BatchPart(1, 2)], results)
    assert found is not None
    assert math.isnan(found.metrics["loss"])
    assert found.metrics["accuracy"] == 0.5
    assert caplog.messages == ["rank 1 has measured loss = nan"]


def refused(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Ranks whose models differ."""
    model = nn.Linear(3, 2 + dist.get_rank(group))
    with pytest.raises(
        GroupError, match=r"rank 1 has another 'weight' \(float32 of shape \(3, 3\), trained\) than rank 0"
    ):
        silo_of(client(model), group, scratch())
    return {}


def test_ranks_with_other_models_are_refused(tmp_path: Path) -> None:
    in_ranks(f"{HERE}:refused", 2, tmp_path)


def apart(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Each rank trains a plain model on its own parts."""
    app = client(network(), BatchPart(dist.get_rank(group), dist.get_world_size(group)))
    with pytest.raises(GroupError, match=r"rank 1 has trained its copy of '0.weight' to other values"):
        led(silo_of(app, group, scratch()), one_round(PLAN))
    return {}


def test_ranks_that_train_alone_are_found_out(tmp_path: Path) -> None:
    in_ranks(f"{HERE}:apart", 2, tmp_path)


@pytest.mark.parametrize(
    "parts", [(BatchPart(0, 2), BatchPart(0, 2)), (BatchPart(), BatchPart(1, 2)), (BatchPart(0, 3), BatchPart(2, 3))]
)
def test_parts_that_are_no_whole_are_refused(parts: tuple[BatchPart, ...]) -> None:
    with pytest.raises(GroupError, match="make no whole: rank 0 takes part 0 of"):
        require_parts(parts)


@pytest.mark.parametrize(
    "parts",
    [
        (BatchPart(), BatchPart()),
        (BatchPart(1, 2), BatchPart(0, 2)),
        (BatchPart(0, 2), BatchPart(0, 2), BatchPart(1, 2)),
    ],
)
def test_parts_that_are_a_whole_are_taken(parts: tuple[BatchPart, ...]) -> None:
    require_parts(parts)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch itself, as it is imported
@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper])
def test_what_wraps_a_layer_changes_no_name(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = network()
    names = [*model.state_dict()]
    model[0] = wrap(model[0])
    with joined() as alone:
        tensors = SiloTensors(model, alone)
        assert [*tensors.whole().state_dict()] == names
        assert all(one.requires_grad for one in tensors.whole().parameters())


def test_a_rank_that_must_leave_does_not_wait_for_a_lost_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silo_rank, "_ORDER_S", 0.01)
    monkeypatch.setattr(silo_rank, "_LEAVES_S", 0.05)
    with joined() as alone:
        rank = SiloRank(client(network()), alone)
        with pytest.raises(GroupError, match="must leave, and rank 0 has said nothing"):
            rank.next_order(lambda: 0.0)
        rank.give_last_order(Order(OrderKind.END, words="enough", failed=False))
        assert rank.next_order(lambda: 0.0).words == "enough"


def test_tied_weights_are_one_tensor_and_travel_once() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    with joined() as alone:
        tensors = SiloTensors(model, alone)
        whole = tensors.whole()
        tensors.collect(whole.state_dict())
        assert tensors.names == ["embedding.weight"]
        assert whole.get_parameter("head.weight") is whole.get_parameter("embedding.weight")
        assert torch.equal(whole.get_parameter("head.weight"), model.get_parameter("embedding.weight"))
        assert SharedState(whole).layout.digest == SharedState(model).layout.digest


def test_a_stage_without_tensors_holds_none() -> None:
    with joined() as alone:
        assert SiloTensors(nn.ReLU(), alone).names == []
