"""Stacked training is the same training: of each client alone to the bit, of `nn.Module` and autograd to rounding."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.sample_order import sample_order
from umbel.client.local.batches import split_sizes
from umbel.client.local.optimizers import optimizer_of
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.model import start_vector
from umbel.sim.engines.stacked.lockstep import batches_in_pass, sample_orders
from umbel.sim.engines.stacked.stacked import StackedEngine
from umbel.sim.engines.work import CohortWork, EngineError

N_IN, N_CLASSES = 6, 4


class TwoTowers(nn.Module):
    """No chain: what is not dense goes the way of the recording."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.top = nn.Linear(N_IN, 5), nn.Linear(N_IN, 5), nn.Linear(5, N_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.top(torch.tanh(self.left(inputs)) * torch.sigmoid(self.right(inputs)))
        return outputs


MODELS: dict[str, Callable[[], nn.Module]] = {
    "logistic": lambda: nn.Linear(N_IN, N_CLASSES),
    "relu": lambda: nn.Sequential(nn.Linear(N_IN, 7), nn.ReLU(), nn.Linear(7, N_CLASSES)),
    "no bias": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(N_IN, 7, bias=False), nn.Tanh(), nn.Linear(7, 5), nn.Sigmoid(), nn.Linear(5, N_CLASSES)
    ),
    "towers": TwoTowers,
    "normed": lambda: nn.Sequential(nn.Linear(N_IN, 8), nn.GroupNorm(2, 8), nn.GELU(), nn.Linear(8, N_CLASSES)),
    "smooth": lambda: nn.Sequential(
        nn.Linear(N_IN, 7),
        nn.SiLU(),
        nn.Linear(7, 7),
        nn.ELU(),
        nn.Linear(7, 7),
        nn.Softplus(),
        nn.Linear(7, N_CLASSES),
    ),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, N_IN)), nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, N_CLASSES)
    ),
}
OPTIMIZERS: dict[str, tuple[float, dict[str, Any]]] = {
    "plain": (0.0, {}),
    "proximal": (0.5, {}),
    "all": (0.1, {"momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.3}),
    "adam": (0.0, {"optimizer": "adam", "weight_decay": 0.01}),
    "adamw": (0.1, {"optimizer": "adamw", "weight_decay": 0.01, "clip_norm": 0.3}),
}


def made(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return MODELS[name]()


@lru_cache
def stacked(name: str) -> tuple[nn.Module, StackedEngine]:
    """Made once: what is recorded of a model takes a second."""
    model = made(name)
    return model, StackedEngine(model)


def work_of(
    sizes: list[int], *, batch_size: int = 4, steps: list[int] | None = None, epochs: int = 2, how: str = "plain"
) -> CohortWork:
    draw = torch.Generator().manual_seed(1)
    n = sum(sizes)
    samples = SampleSet(torch.randn(n, N_IN, generator=draw), torch.randint(N_CLASSES, (n,), generator=draw))
    shards = np.split(np.random.default_rng(2).permutation(n), np.cumsum(sizes)[:-1])
    data = ShardedPopulation(samples, shards, samples).data_of(np.arange(len(sizes)))
    mu, optimizer = OPTIMIZERS[how]
    plan = TrainingPlan(local_epochs=epochs, batch_size=batch_size, learning_rate=0.2, proximal_mu=mu, **optimizer)
    n_steps = epochs * batches_in_pass(data.sizes, batch_size) if steps is None else np.array(steps)
    seeds = np.arange(100, 100 + len(sizes), dtype=np.uint64)
    return CohortWork(data, seeds, n_steps, plan)


def flat(model: nn.Module) -> Tensor:
    """In layout order, which is not that of `parameters()`."""
    state = model.state_dict()
    return start_vector(Layout.of_state(state), state)


def trained(engine: StackedEngine, start: Tensor, work: CohortWork) -> tuple[Tensor, Tensor]:
    """Changes, and losses (mean, first, last), by client."""
    values, losses = torch.full((len(work.seeds), len(start)), torch.nan), torch.full((len(work.seeds), 3), torch.nan)
    for changes in engine.train(start, work):
        values[changes.positions] = changes.values
        told = np.stack([changes.loss, changes.first_loss, changes.last_loss], axis=1)
        losses[changes.positions] = torch.from_numpy(told).float()
    return values, losses


def textbook(model: nn.Module, work: CohortWork) -> tuple[Tensor, Tensor]:
    """One client after another: autograd, torch's own optimizers, the mean loss of each batch."""
    start, values, told = flat(model), list[Tensor](), list[Tensor]()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    for client in range(len(work.seeds)):
        model.load_state_dict(first)
        own, losses = work.data.of(client), list[tuple[float, int]]()
        optimizer = optimizer_of(work.plan, model)
        epoch = 0
        while len(losses) < work.steps[client]:
            order = torch.from_numpy(sample_order(int(work.seeds[client]), epoch, len(own)))
            for rows in order.split(split_sizes(len(own), work.plan.batch_size))[: work.steps[client] - len(losses)]:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(own.inputs[rows]), own.targets[rows])
                pull = sum((p - first[name]).square().sum() for name, p in model.named_parameters())
                (loss + work.plan.proximal_mu / 2 * pull).backward()
                if work.plan.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), work.plan.clip_norm)
                optimizer.step()
                losses.append((loss.item(), len(rows)))
            epoch += 1
        values.append(flat(model) - start)
        mean = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
        told.append(torch.tensor([mean, losses[0][0], losses[-1][0]]))
    model.load_state_dict(first)
    return torch.stack(values), torch.stack(told)


@pytest.mark.parametrize("how", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_autograd_and_sgd_give_one_client_after_another(name: str, how: str) -> None:
    (model, engine), work = stacked(name), work_of([1, 3, 5, 8, 9, 17], how=how)
    values, losses = trained(engine, flat(model), work)
    wanted, wanted_losses = textbook(model, work)
    # Adam divides a gradient by its size, so a rounding error of a gradient near zero is a thousandth of a step.
    torch.testing.assert_close(values, wanted, rtol=0, atol=2e-6 if "adam" not in how else 1e-3)
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("how", ["plain", "all", "adamw"])
@pytest.mark.parametrize("name", MODELS)
def test_each_client_gives_the_same_bits_whoever_is_stacked_with_it(name: str, how: str, group_size: int) -> None:
    (model, engine), work = stacked(name), work_of([1, 3, 5, 8, 9, 17], how=how)
    engine.group_size = 100
    together, losses = trained(engine, flat(model), work)
    engine.group_size = group_size
    apart, losses_apart = trained(engine, flat(model), work)
    assert torch.equal(together, apart)
    assert torch.equal(losses, losses_apart)


@pytest.mark.parametrize("name", ["relu", "towers"])
def test_cohorts_of_other_sizes_follow_each_other(name: str) -> None:
    """The widest batch of a cohort is one of its samples' numbers, and what is recorded is for one width."""
    model, engine = stacked(name)
    for sizes in ([3, 2], [8, 4], [9, 5, 1], [3]):
        work = work_of(sizes)
        values, _ = trained(engine, flat(model), work)
        torch.testing.assert_close(values, textbook(model, work)[0], rtol=0, atol=2e-6)


@torch.library.custom_op("umbel_tests::half", mutates_args=())
def half() -> Tensor:
    return torch.tensor(0.5)


@half.register_fake
def _() -> Tensor:
    return torch.empty(())


def test_an_operation_of_the_users_own_needs_no_arguments() -> None:
    class Halved(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            outputs: Tensor = super().forward(input) * half()
            return outputs

    model, work = Halved(N_IN, N_CLASSES), work_of([3, 8])
    values, _ = trained(StackedEngine(model), flat(model), work)
    torch.testing.assert_close(values, textbook(model, work)[0], rtol=0, atol=2e-6)


@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(1, 6),
)
@settings(max_examples=40, deadline=None)
def test_any_sizes_steps_and_batches_are_the_textbook_loop(clients: list[tuple[int, int]], batch_size: int) -> None:
    model = made("relu")
    work = work_of([n for n, _ in clients], batch_size=batch_size, steps=[steps for _, steps in clients])
    values, losses = trained(StackedEngine(model), flat(model), work)
    wanted, wanted_losses = textbook(model, work)
    torch.testing.assert_close(values, wanted, rtol=0, atol=2e-6)
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-5, atol=1e-5)


@given(st.lists(st.tuples(st.integers(0, 1 << 62), st.integers(0, 50), st.integers(1, 400)), min_size=1, max_size=90))
def test_orders_of_many_clients_are_those_of_each(passes: list[tuple[int, int, int]]) -> None:
    seeds, epochs, sizes = (np.array(values) for values in zip(*passes, strict=True))
    drawn = sample_orders(seeds.astype(np.uint64), epochs, sizes)
    assert drawn.tolist() == [i for one in passes for i in sample_order(*one)]


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(8), "has the buffer '1.running_mean'"),
        (nn.BatchNorm1d(8, track_running_stats=False), "affect each other's"),
        (nn.Dropout(0.5), "random"),
    ],
    ids=["batch norm", "batch norm without statistics", "dropout"],
)
def test_what_cannot_be_stacked_is_refused_with_the_reason(layer: nn.Module, words: str) -> None:
    model = nn.Sequential(nn.Linear(N_IN, 8), layer, nn.Linear(8, N_CLASSES))
    with pytest.raises(EngineError, match=words):
        trained(StackedEngine(model), flat(model), work_of([5, 9]))


def test_an_lstm_that_torch_loops_over_is_refused_not_slow() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.top = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, N_CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.top(self.lstm(inputs.unsqueeze(2))[0][:, -1])
            return outputs

    model = Reader()
    with pytest.raises(EngineError, match=r"Reader cannot be stacked: torch cannot compute .*(rnn|lstm)"):
        trained(StackedEngine(model), flat(model), work_of([5, 9]))
