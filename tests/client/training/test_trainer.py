"""The ready trainer: what it computes, how long it goes on, and what it reports."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from umbel.client import LocalPlan, TorchClient
from umbel.client.local.batches import shuffled_batches, split_sizes


def data(n: int = 40, seed: int = 0) -> TensorDataset:
    rng = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 4, generator=rng), torch.randint(3, (n,), generator=rng))


def network(*, dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


def ready(model: nn.Module, train: "TensorDataset | DataLoader[tuple[torch.Tensor, ...]] | None" = None) -> TorchClient:
    return TorchClient(model, nn.CrossEntropyLoss(), train or data(), holdout=data(10, seed=5), device="cpu")


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_the_proximal_gradient_is_autograds() -> None:
    model, mu = network(), 0.37
    plan = LocalPlan(proximal_mu=mu).bound_to(model)
    anchors = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    inputs, target = data().tensors
    loss = nn.functional.cross_entropy(model(inputs), target)
    pairs = zip(model.parameters(), anchors, strict=True)
    objective = loss + mu / 2 * torch.stack([(p - a).square().sum() for p, a in pairs]).sum()
    expected = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
    loss.backward()
    plan.adjust_gradients(model)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)


def test_frozen_parameters_feel_no_pull() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    LocalPlan(proximal_mu=1.0).adjust_gradients(model)
    assert model.bias.grad is None
    assert model.weight.grad is not None


def test_a_strong_proximal_term_keeps_the_model_close() -> None:
    def moved(mu: float) -> float:
        model = network()
        before = weights(model)
        ready(model).train(model, LocalPlan(epochs=5, learning_rate=0.05, proximal_mu=mu, seed=1))
        return float((weights(model) - before).norm())

    assert moved(10.0) < 0.5 * moved(0.0)


def test_one_epoch_of_plain_sgd_is_the_textbook_loop() -> None:
    model, oracle = network(), network()
    plan = LocalPlan(epochs=1, batch_size=16, learning_rate=0.1, seed=3)
    result = ready(model).train(model, plan)
    oracle.train()
    for inputs, target in shuffled_batches(data(), 16, 3, 0):
        oracle.zero_grad()
        nn.functional.cross_entropy(oracle(inputs), target).backward()
        with torch.no_grad():
            for p in oracle.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.1)
    torch.testing.assert_close(weights(model), weights(oracle))
    assert (result.steps_done, result.steps_planned, result.sample_count) == (3, 3, 40)
    assert set(result.metrics) == {"loss", "accuracy"}


@pytest.mark.parametrize("with_loader", [False, True])
def test_the_same_seed_trains_the_same_model_and_leaves_torchs_own_randomness_alone(with_loader: bool) -> None:
    def trained(seed: int) -> torch.Tensor:
        model = network(dropout=0.5)
        train = DataLoader(data(), batch_size=8, shuffle=True) if with_loader else data()
        torch.rand(seed % 7)  # whatever happened before in this process must not matter
        state = torch.get_rng_state()
        ready(model, train).train(model, LocalPlan(epochs=2, seed=seed))
        assert torch.equal(torch.get_rng_state(), state)
        return weights(model)

    assert torch.equal(trained(11), trained(11))
    assert not torch.equal(trained(11), trained(12))


def test_local_steps_go_round_the_data_as_often_as_needed() -> None:
    model = network()
    result = ready(model).train(model, LocalPlan(steps=7, batch_size=16))
    assert (result.steps_done, result.steps_planned) == (7, 7)


class ByName(Dataset[tuple[torch.Tensor, dict[str, torch.Tensor]]]):
    """Five samples whose targets have names."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.zeros(4), {"class": torch.tensor(0), "value": torch.tensor(1.0 + index)}


@pytest.mark.parametrize("in_a_list", [False, True])
def test_batches_whose_targets_have_names_count_by_their_samples(in_a_list: bool) -> None:
    """Batches of two, two and one: a mean over batches would be 3.17, one over samples is 3."""

    def named(target: Any) -> Any:
        return target["value"] if not in_a_list else target[0]["value"]

    def batch(samples: list[Any]) -> Any:
        inputs, targets = default_collate(samples)
        return inputs, [targets] if in_a_list else targets

    model = nn.Linear(4, 1)
    loader = DataLoader(ByName(), batch_size=2, collate_fn=batch)

    def loss(output: torch.Tensor, target: Any) -> torch.Tensor:
        value: torch.Tensor = named(target).mean() + output.sum() * 0
        return value

    result = TorchClient(model, loss, loader, device="cpu", metrics={}).train(model, LocalPlan(epochs=1))
    assert result.metrics["loss"] == pytest.approx(3.0)


def test_at_the_deadline_partial_work_is_returned() -> None:
    model, ticks = network(), itertools.count()
    plan = LocalPlan(steps=1000, batch_size=8, deadline=9.5, clock=lambda: float(next(ticks)))
    result = ready(model).train(model, plan)
    assert 1 <= result.steps_done < 10
    assert result.steps_planned == 1000


def test_at_least_one_step_is_done_even_past_the_deadline() -> None:
    model = network()
    result = ready(model).train(model, LocalPlan(epochs=1, batch_size=8, deadline=-1.0, clock=lambda: 0.0))
    assert result.steps_done == 1


def test_told_to_stop_it_stops_at_the_next_step() -> None:
    model, asked = network(), itertools.count(1)
    plan = LocalPlan(epochs=9, batch_size=8, told_to_stop=lambda: "the round closed" if next(asked) >= 4 else None)
    assert ready(model).train(model, plan).steps_done == 4


def test_evaluation_measures_the_holdout_and_changes_nothing() -> None:
    model = network(dropout=0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluation = ready(model).evaluate(model)
    assert evaluation is not None
    assert evaluation.sample_count == 10
    model.eval()
    inputs, target = data(10, seed=5).tensors
    assert evaluation.metrics["accuracy"] == pytest.approx((model(inputs).argmax(1) == target).float().mean().item())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_without_a_holdout_there_is_no_evaluation() -> None:
    model = network()
    assert TorchClient(model, nn.CrossEntropyLoss(), data(), device="cpu").evaluate(model) is None


def test_modes_are_restored() -> None:
    model = network().eval()
    client = ready(model)
    client.train(model, LocalPlan(steps=1))
    assert not model.training
    model.train()
    client.evaluate(model)
    assert model.training


def test_mixed_precision_trains_float32_weights() -> None:
    model = network()
    client = TorchClient(model, nn.CrossEntropyLoss(), data(), device="cpu", precision="bfloat16")
    before = weights(model)
    client.train(model, LocalPlan(epochs=1))
    assert weights(model).dtype == torch.float32
    assert not torch.equal(weights(model), before)


def test_a_regression_reports_its_loss_alone() -> None:
    model = nn.Linear(4, 1)
    train = TensorDataset(torch.randn(10, 4), torch.randn(10, 1))
    client = TorchClient(model, nn.MSELoss(), train, device="cpu")
    assert set(client.train(model, LocalPlan(epochs=1)).metrics) == {"loss"}


def test_empty_data_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        TorchClient(network(), nn.CrossEntropyLoss(), data(0))


def test_a_loader_that_yields_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="one batch"):
        TorchClient(network(), nn.CrossEntropyLoss(), DataLoader(data(3), batch_size=8, drop_last=True))


@pytest.mark.parametrize(
    ("n", "batch_size", "sizes"),
    [(0, 4, []), (1, 4, [1]), (5, 4, [5]), (8, 4, [4, 4]), (10, 4, [4, 4, 2]), (3, 1, [1, 1, 1]), (9, 4, [4, 5])],
)
def test_a_last_batch_of_one_joins_the_one_before(n: int, batch_size: int, sizes: list[int]) -> None:
    assert split_sizes(n, batch_size) == sizes


def test_a_pass_visits_every_sample_once_in_a_seeded_order() -> None:
    numbers = TensorDataset(torch.arange(23), torch.arange(23))

    def order(seed: int, number: int = 0, n_skipped: int = 0) -> list[int]:
        return [int(i) for batch, _ in shuffled_batches(numbers, 5, seed, number, n_skipped) for i in batch]

    assert sorted(order(1)) == list(range(23))
    assert order(1) == order(1) != order(2)
    assert order(1) != order(1, number=1)
    assert order(1, n_skipped=2) == order(1)[10:]


def test_training_stays_within_what_can_be_sent() -> None:
    model, start = network(), network()
    halves = {"0.weight": lambda gradient: gradient * MASK, "4.bias": torch.zeros_like}
    plan = LocalPlan(epochs=2, batch_size=8, learning_rate=0.1, proximal_mu=0.1, within=halves)
    ready(model).train(model, plan)
    moved = {n: (p - q).detach() for (n, p), q in zip(model.named_parameters(), start.parameters(), strict=True)}
    assert bool((moved["0.weight"][:4] != 0).all())
    assert not moved["0.weight"][4:].any()
    assert not moved["4.bias"].any()
    assert bool(moved["4.weight"].any())


MASK = (torch.arange(8) < 4).float().unsqueeze(1)


class Doubled(TensorDataset):
    """A site's own kind of data, which changes its samples as it gives them."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        given: tuple[torch.Tensor, ...] = super().__getitem__(index)  # type: ignore[no-untyped-call]  # torch's own
        return tuple(2 * one for one in given)


def test_samples_are_given_as_the_site_s_own_data_set_gives_them() -> None:
    numbers = Doubled(torch.arange(6))
    (batch,) = next(iter(shuffled_batches(numbers, 6, 0, 0)))
    assert sorted(batch.tolist()) == [0, 2, 4, 6, 8, 10]
