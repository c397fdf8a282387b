"""The ready trainer's hooks and arguments: what a hospital changes without writing a loop of its own."""

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from umbel.client import LocalPlan, TorchClient
from umbel.client.local.large_batch import Lamb, Lars
from umbel.client.training.counts import confusion_counts
from umbel.client.training.trainer import Configured, StepLoss

PLAN = LocalPlan(epochs=2, batch_size=8, seed=3, learning_rate=0.1)
N = 40


def tensors() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(N, 4, generator=rng)
    return inputs, (inputs.sum(1) > 0).to(torch.int64)


def pairs() -> TensorDataset:
    return TensorDataset(*tensors())


def linear(n_out: int = 2) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Linear(4, n_out)


def trained(client: TorchClient, plan: LocalPlan = PLAN) -> Tensor:
    client.train(client.model, plan)
    return nn.utils.parameters_to_vector(client.model.parameters()).detach()


def plain(**more: Any) -> TorchClient:
    return TorchClient(linear(), "classes", pairs(), device="cpu", **more)


class Dicts(Dataset[dict[str, Tensor]]):
    """Samples as Hugging Face's data sets have them."""

    def __init__(self, target: str = "labels") -> None:
        self._target = target

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, targets = tensors()
        return {"x": inputs[index], self._target: targets[index]}


class Named(nn.Module):
    """Takes its inputs by name and, given labels, computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(x)
        if labels is None:
            return logits
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


@pytest.mark.parametrize("target", ["labels", "label", "target"])
def test_a_batch_may_be_a_mapping_with_a_target(target: str) -> None:
    assert torch.equal(trained(TorchClient(Named(), "classes", Dicts(target), device="cpu")), trained(plain()))


def test_a_model_may_bring_its_loss() -> None:
    client = TorchClient(Named(), None, Dicts(), holdout=Dicts(), device="cpu")
    assert torch.equal(trained(client), trained(plain()))
    evaluation = client.evaluate(client.model)
    assert evaluation is not None
    assert evaluation.sample_count == N
    assert set(evaluation.metrics) == {"loss"}


def test_a_batch_may_have_several_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            found: Tensor = self.inner(a + b)
            return found

    inputs, targets = tensors()
    data = TensorDataset(inputs - 1, torch.ones_like(inputs), targets)
    torch.testing.assert_close(trained(TorchClient(Sum(), "classes", data, device="cpu")), trained(plain()))


def test_a_batch_without_a_target_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"has the keys diagnosis, x, and no target.*override training_step"):
        trained(TorchClient(Named(), "classes", Dicts("diagnosis"), device="cpu"))
    with pytest.raises(ValueError, match="the model returned a Tensor without a loss"):
        trained(TorchClient(linear(), None, [tensors()[0]], device="cpu", sample_count=N))


def test_collate_makes_the_batches() -> None:
    def halved(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs, targets = zip(*samples, strict=True)
        return torch.stack(inputs) / 2, torch.stack(targets)

    inputs, targets = tensors()
    expected = TorchClient(linear(), "classes", TensorDataset(inputs / 2, targets), device="cpu")
    assert torch.equal(trained(plain(collate=halved)), trained(expected))


@pytest.mark.parametrize("n_parts", [2, 3])
def test_accumulated_gradients_are_those_of_the_whole_batch(n_parts: int) -> None:
    clipped = LocalPlan(epochs=2, batch_size=8, seed=3, learning_rate=0.1, clip_norm=0.2, proximal_mu=0.3)
    whole, parts = plain(), plain(accumulate=n_parts)
    expected, found = whole.train(whole.model, clipped), parts.train(parts.model, clipped)
    torch.testing.assert_close(parts.model.weight, whole.model.weight)
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-5)
    assert (found.steps_done, found.steps_planned) == (expected.steps_done, expected.steps_planned) == (10, 10)


class Scheduled(TorchClient):
    def configure(self, model: nn.Module, plan: LocalPlan) -> Configured:
        optimizer = torch.optim.SGD(model.parameters(), plan.learning_rate)
        return optimizer, StepLR(optimizer, 3)


def test_a_schedule_advances_with_every_step() -> None:
    oracle = linear()
    optimizer = torch.optim.SGD(oracle.parameters(), PLAN.learning_rate)
    schedule = StepLR(optimizer, 3)
    for inputs, targets in PLAN.drive(pairs()):
        optimizer.zero_grad()
        nn.functional.cross_entropy(oracle(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    found = trained(Scheduled(linear(), "classes", pairs(), device="cpu"))
    assert torch.equal(found, nn.utils.parameters_to_vector(oracle.parameters()))


class Split(TorchClient):
    """An optimizer for each parameter, with rates of their own."""

    def configure(self, model: nn.Module, plan: LocalPlan) -> Configured:
        return [torch.optim.SGD([p], plan.learning_rate * 2**i) for i, p in enumerate(model.parameters())]


def test_several_optimizers_take_the_step_together() -> None:
    oracle = linear()
    groups = [{"params": [p], "lr": PLAN.learning_rate * 2**i} for i, p in enumerate(oracle.parameters())]
    grouped = TorchClient(oracle, "classes", pairs(), device="cpu", optimizer=lambda _p, _r: torch.optim.SGD(groups))
    assert torch.equal(trained(Split(linear(), "classes", pairs(), device="cpu")), trained(grouped))


class Gan(TorchClient):
    """A generator and a critic that take turns: the generator's loss is computed after the critic's step."""

    def configure(self, model: nn.Module, plan: LocalPlan) -> Configured:
        parts = model.get_submodule("critic"), model.get_submodule("generator")
        return [torch.optim.SGD(part.parameters(), plan.learning_rate) for part in parts]

    def training_step(self, model: nn.Module, batch: Any) -> Iterator[StepLoss]:
        critic, generator = model.get_submodule("critic"), model.get_submodule("generator")
        real, _ = batch
        fake = generator(torch.randn_like(real))
        yield critic(fake.detach()).mean() - critic(real).mean(), {"critic": critic(real).detach().mean()}
        yield -critic(fake).mean()


def pair_of_nets() -> nn.ModuleDict:
    return nn.ModuleDict({"critic": linear(1), "generator": copy.deepcopy(linear(4))})


def test_optimizers_may_take_turns_with_losses_of_their_own() -> None:
    client = Gan(pair_of_nets(), None, pairs(), device="cpu")
    before = copy.deepcopy(client.model.state_dict())
    result = client.train(client.model, PLAN)
    assert all(
        not torch.equal(before[name], now) for name, now in client.model.state_dict().items() if "weight" in name
    )
    assert set(result.metrics) == {"loss", "critic"}
    oracle = pair_of_nets()
    critic, generator = oracle["critic"], oracle["generator"]
    turns = [torch.optim.SGD(part.parameters(), PLAN.learning_rate) for part in (critic, generator)]
    for real, _ in PLAN.drive(pairs()):
        fake = generator(torch.randn_like(real))
        oracle.zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        turns[0].step()
        oracle.zero_grad()
        (-critic(fake).mean()).backward()
        turns[1].step()
    same = zip(client.model.parameters(), oracle.parameters(), strict=True)
    assert all(itertools.starmap(torch.equal, same))


def test_the_schedules_of_optimizers_that_take_turns_advance_once_in_a_step() -> None:
    schedules = list[StepLR]()

    class WithSchedules(Gan):
        def configure(self, model: nn.Module, plan: LocalPlan) -> Configured:
            optimizers = [torch.optim.SGD(part.parameters(), plan.learning_rate) for part in model.children()]
            schedules.extend(StepLR(one, 3) for one in optimizers)
            return optimizers, schedules

    client = WithSchedules(pair_of_nets(), None, pairs(), device="cpu")
    result = client.train(client.model, PLAN)
    assert [one.last_epoch for one in schedules] == [result.steps_done, result.steps_done]


def test_more_losses_than_optimizers_are_refused() -> None:
    class Wrong(Gan):
        def configure(self, model: nn.Module, plan: LocalPlan) -> Configured:
            return torch.optim.SGD(model.parameters(), plan.learning_rate)

    with pytest.raises(ValueError, match=r"yields more losses than configure returns optimizers \(1\)"):
        trained(Wrong(pair_of_nets(), None, pairs(), device="cpu"))
    with pytest.raises(ValueError, match="cannot accumulate gradients"):
        trained(Gan(pair_of_nets(), None, pairs(), device="cpu", accumulate=2))


@pytest.mark.parametrize("configured", [None, [], ("x", "y"), (torch.optim.SGD([nn.Parameter(torch.ones(1))]), 3)])
def test_what_configure_may_return_is_said(configured: Any) -> None:
    class Wrong(TorchClient):
        def configure(self, model: nn.Module, plan: LocalPlan) -> Configured:
            return configured  # type: ignore[no-any-return]

    with pytest.raises(TypeError):
        trained(Wrong(linear(), "classes", pairs(), device="cpu"))


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"optimizer": "adamw", "weight_decay": 0.1}, torch.optim.AdamW),
        ({"optimizer": "adam"}, torch.optim.Adam),
        ({"momentum": 0.9, "weight_decay": 0.01}, torch.optim.SGD),
        ({"optimizer": "lars", "momentum": 0.8, "weight_decay": 0.01}, Lars),
        ({"optimizer": "lamb", "weight_decay": 0.01}, Lamb),
    ],
)
def test_the_run_files_optimizer_is_the_one_of_that_name(
    keys: dict[str, Any], kind: type[torch.optim.Optimizer]
) -> None:
    plan = LocalPlan(epochs=2, batch_size=8, seed=3, learning_rate=0.05, **keys)
    given = {key: value for key, value in keys.items() if key != "optimizer"}
    by_hand = plain(optimizer=lambda parameters, rate: kind(parameters, lr=rate, **given))  # type: ignore[call-arg]
    assert torch.equal(trained(plain(), plan), trained(by_hand, plan))


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*tensors(), strict=True)


def test_a_stream_needs_a_sample_count_and_steps() -> None:
    with pytest.raises(TypeError, match="set sample_count"):
        TorchClient(linear(), "classes", Stream(), device="cpu")
    client = TorchClient(linear(), "classes", Stream(), holdout=Stream(), device="cpu", sample_count=N)
    result = client.train(client.model, LocalPlan(steps=7, batch_size=8))
    assert (result.sample_count, result.steps_done) == (N, 7)
    evaluation = client.evaluate(client.model)
    assert evaluation is not None
    assert evaluation.sample_count == N


def test_counts_add_up_over_batches_and_a_step_of_ones_own_may_count_too() -> None:
    class Counting(TorchClient):
        def training_step(self, model: nn.Module, batch: Any) -> StepLoss:
            inputs, target = batch
            loss = nn.functional.cross_entropy(model(inputs), target)
            return loss, {"positives": target.sum().reshape(1), "mean": inputs.mean()}

        def evaluation_step(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
            inputs, target = batch
            logits = model(inputs)
            return {"confusion": confusion_counts(logits[:, 1] - logits[:, 0], target)}

    client = Counting(linear(), None, pairs(), holdout=pairs(), device="cpu", evaluation_batch_size=7)
    result = client.train(client.model, LocalPlan(epochs=1, batch_size=8))
    inputs, target = tensors()
    assert result.counts == {"positives": (int(target.sum()),)}
    assert result.metrics["mean"] == pytest.approx(float(inputs.mean()), abs=1e-6)
    evaluation = client.evaluate(client.model)
    assert evaluation is not None
    (tn, fp), (fn, tp) = confusion_matrix(target, client.model(inputs).argmax(1)).tolist()
    assert evaluation.counts == {"confusion": (tp, fp, fn, tn)}


def test_counts_may_be_functions_of_output_and_target() -> None:
    def counted(output: Tensor, target: Tensor) -> Tensor:
        return confusion_counts(output[:, 1] - output[:, 0], target)

    client = plain(holdout=pairs(), counts={"confusion": counted})
    assert sum(client.train(client.model, PLAN).counts["confusion"]) == 2 * N
    evaluation = client.evaluate(client.model)
    assert evaluation is not None
    assert sum(evaluation.counts["confusion"]) == N
    assert set(evaluation.metrics) == {"loss", "accuracy"}


def test_the_evaluation_batch_size_bounds_what_is_measured_at_once() -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.sizes = linear(), list[int]()

        def forward(self, inputs: Tensor) -> Tensor:
            self.sizes.append(len(inputs))
            found: Tensor = self.inner(inputs)
            return found

    model = Seen()
    TorchClient(model, "classes", pairs(), holdout=pairs(), device="cpu", evaluation_batch_size=16).evaluate(model)
    assert model.sizes == [16, 16, 8]


def test_the_precision_is_whole_float32_unless_asked() -> None:
    assert plain().precision is torch.float32
    assert plain(precision="bfloat16").precision is torch.bfloat16


def test_a_killed_training_with_a_schedule_and_two_optimizers_resumes_to_the_same_bits() -> None:
    from tests.client.local.test_steps import InMemory

    class Both(TorchClient):
        def configure(self, model: nn.Module, plan: LocalPlan) -> Configured:
            optimizers = [torch.optim.Adam([p], plan.learning_rate) for p in model.parameters()]
            return optimizers, [StepLR(one, 2) for one in optimizers]

    def made() -> Both:
        return Both(linear(), "classes", pairs(), device="cpu")

    checkpoint, expected = InMemory(dies_at=5), trained(made())
    killed = LocalPlan(epochs=2, batch_size=8, seed=3, learning_rate=0.1, checkpoint=checkpoint)
    with pytest.raises(KeyboardInterrupt):
        trained(made(), killed)
    assert torch.equal(trained(made(), killed), expected)
