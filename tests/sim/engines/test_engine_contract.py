"""What every engine promises: each client of the cohort trained, as by hand, whatever the sizes, steps and options."""

from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.sim.engines.cohorts import (
    N_CLASSES,
    N_FEATURES,
    STRUCTURED,
    Optimizing,
    all_changes,
    recipe,
    start_of,
    work_of,
)
from umbel.aggregation.codec.vectors.codec import CodecContext
from umbel.aggregation.codec.vectors.registry import vector_codec
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.sample_order import sample_order
from umbel.sim.engines.choose import named_engine
from umbel.sim.engines.device import part_of
from umbel.sim.engines.model import ModelRecipe
from umbel.sim.engines.training import Losses, SequentialEngine
from umbel.sim.engines.work import CohortWork, Engine, EngineError
from umbel.sim.engines.workers.processes import ProcessesEngine
from umbel.sim.engines.workers.threads import ThreadsEngine

# Add an engine here, and it is held to all of this. Those of the second table give the bits of "sequential".
ENGINES: dict[str, Callable[[ModelRecipe], Engine]] = {
    "sequential": SequentialEngine,
    "threads": lambda made_by: ThreadsEngine(made_by, 3),
    "processes": lambda made_by: ProcessesEngine(made_by, 2),
    "batched": lambda made_by: named_engine("batched", made_by),
    "auto": lambda made_by: named_engine("auto", made_by),
}
SAME_BITS = ["threads", "processes"]
THAT_START_PROCESSES = ["processes"]

LOGISTIC = recipe("linear")
OPTIONS: dict[str, tuple[float, Optimizing]] = {
    "plain": (0.0, {}),
    "fedprox": (0.7, {}),
    "momentum": (0.0, {"momentum": 0.9}),
    "weight decay": (0.0, {"weight_decay": 0.1}),
    "clipping": (0.0, {"clip_norm": 0.2}),
    "all": (0.3, {"momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.5}),
}
WORKS: dict[str, tuple[list[int], list[int], int]] = {
    "ragged sizes": ([3, 11, 7, 16, 2], [4, 4, 4, 4, 4], 4),
    "unequal steps": ([8, 8, 8, 8, 8], [1, 9, 2, 30, 5], 4),
    "one sample": ([1, 1, 6], [3, 1, 2], 4),
    "short last batches": ([5, 6, 7, 9], [6, 6, 6, 6], 4),
    "batches larger than the data": ([3, 8, 5], [2, 3, 4], 64),
    "batches of one": ([3, 4], [7, 5], 1),
    "one client": ([9], [7], 4),
    "many clients": ([2 + i % 5 for i in range(60)], [1 + i * 7 % 11 for i in range(60)], 3),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in THAT_START_PROCESSES else []) for name in ENGINES],
)
def engine(request: pytest.FixtureRequest) -> Generator[Engine]:
    """For logistic regression; one for all tests, as one serves a whole experiment."""
    made = ENGINES[request.param](LOGISTIC)
    assert made.name == request.param
    yield made
    made.close()


def by_hand(start: Tensor, work: CohortWork) -> tuple[Tensor, Losses]:
    """Logistic regression with gradients worked out on paper, in float64; one client, one step after another."""
    changes, losses = list[Tensor](), list[list[float]]()
    for i in range(len(work.data)):
        change, loss = _one_by_hand(start.double(), work, i)
        changes.append(change)
        losses.append(loss)
    return torch.stack(changes), np.array(losses)


def _one_by_hand(start: Tensor, work: CohortWork, client: int) -> tuple[Tensor, list[float]]:
    own, plan = work.data.of(client), work.plan
    inputs, targets = own.inputs.double(), functional.one_hot(own.targets, N_CLASSES).double()
    weights, velocity, seen = start.clone(), torch.zeros_like(start), list[tuple[float, int]]()
    epoch, batches = 0, list[list[int]]()
    for _ in range(int(work.steps[client])):
        if not batches:
            batches = _batches_by_hand(sample_order(int(work.seeds[client]), epoch, len(own)).tolist(), plan.batch_size)
            epoch += 1
        batch = batches.pop(0)
        bias, matrix = weights[:N_CLASSES], weights[N_CLASSES:].view(N_CLASSES, N_FEATURES)
        shares = torch.softmax(inputs[batch] @ matrix.T + bias, 1)
        seen.append((-(shares.log() * targets[batch]).sum(1).mean().item(), len(batch)))
        error = (shares - targets[batch]) / len(batch)
        gradient = torch.cat([error.sum(0), (error.T @ inputs[batch]).reshape(-1)]) + plan.proximal_mu * (
            weights - start
        )
        if plan.clip_norm is not None:
            gradient = gradient * min(1.0, plan.clip_norm / (gradient.norm().item() + 1e-6))
        gradient = gradient + plan.weight_decay * weights
        velocity = plan.momentum * velocity + gradient
        weights = weights - plan.learning_rate * velocity
    mean = sum(loss * n for loss, n in seen) / sum(n for _, n in seen)
    return weights - start, [mean, seen[0][0], seen[-1][0]]


def _batches_by_hand(order: list[int], batch_size: int) -> list[list[int]]:
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    if len(batches) > 1 and batch_size > 1 and len(batches[-1]) == 1:
        batches[-2:] = [batches[-2] + batches[-1]]
    return batches


@pytest.mark.parametrize("what", WORKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_client_is_trained_as_by_hand(engine: Engine, what: str, options: str) -> None:
    (sizes, steps, batch_size), (proximal_mu, optimizer) = WORKS[what], OPTIONS[options]
    work = work_of(sizes, steps, batch_size=batch_size, proximal_mu=proximal_mu, optimizer=optimizer)
    start = start_of(LOGISTIC)
    values, losses = all_changes(engine, start, work)
    expected, expected_losses = by_hand(start, work)
    assert (values - expected).abs().max() < 1e-6
    assert np.abs(losses - expected_losses).max() < 1e-5
    assert (values != 0).any(1).all(), "everybody has moved"


@pytest.mark.parametrize("codec", STRUCTURED)
def test_clients_train_what_their_codec_can_carry_and_nothing_of_it_is_lost(engine: Engine, codec: str) -> None:
    work, start = work_of([9, 4, 13], [7, 2, 12], proximal_mu=0.3, codec=STRUCTURED[codec]), start_of(LOGISTIC)
    values, _ = all_changes(engine, start, work)
    expected, _ = all_changes(SequentialEngine(LOGISTIC), start, work)
    assert torch.equal(values, expected) if engine.name in SAME_BITS else torch.allclose(values, expected, atol=1e-6)
    layout = Layout.of_state(LOGISTIC.make().state_dict())
    carrying, context = vector_codec(work.codec.codec, work.codec.parameters), CodecContext(layout, work.codec.key)
    for change in values:
        arrived = torch.cat(list(carrying.decode(carrying.encode(change, context), context)))
        assert torch.allclose(arrived, change, atol=1e-6)
        assert change.abs().max() > 0.01


def of_same_bits() -> Iterator[Any]:
    """Each with each model. Processes start anew for every model: by day for the one with the most kinds of state."""
    for model in ("mlp", "with_dropout", "with_batch_norm", "convolutions", "tied", "replacing"):
        for name in SAME_BITS:
            when = pytest.mark.slow if model == "with_batch_norm" else pytest.mark.nightly
            yield pytest.param(name, model, id=f"{model}-{name}", marks=[when] if name in THAT_START_PROCESSES else [])


@pytest.mark.parametrize(("name", "model"), [*of_same_bits()])
def test_engines_of_one_client_at_a_time_agree_to_the_bit(name: str, model: str) -> None:
    if name == "threads" and model == "with_dropout":
        pytest.skip("threads refuse it: see below")
    made_by = recipe(model)
    sizes, steps = [2 * n for n in WORKS["many clients"][0]], WORKS["many clients"][1]
    work = work_of(sizes, steps, proximal_mu=0.1, optimizer=OPTIONS["all"][1])
    start = start_of(made_by)
    expected, expected_losses = all_changes(SequentialEngine(made_by), start, work)
    other = ENGINES[name](made_by)
    try:
        values, losses = all_changes(other, start, work)
    finally:
        other.close()
    assert torch.equal(values, expected)
    assert (losses == expected_losses).all()


def test_a_client_gets_the_same_whoever_else_is_in_the_cohort(engine: Engine) -> None:
    sizes, steps, batch_size = WORKS["many clients"]
    work = work_of(sizes, steps, batch_size=batch_size)
    start = start_of(LOGISTIC)
    values, _ = all_changes(engine, start, work)
    few = np.array([40, 3, 17])
    assert torch.equal(all_changes(engine, start, part_of(work, few))[0], values[torch.from_numpy(few)])


def test_the_same_cohort_twice_and_another_between_give_the_same(engine: Engine) -> None:
    work, other = work_of([9, 4, 6], [5, 6, 7]), work_of([5, 5], [3, 2], seed=2, learning_rate=0.5)
    start = start_of(LOGISTIC)
    first, _ = all_changes(engine, start, work)
    all_changes(engine, start + 1, other)
    assert torch.equal(all_changes(engine, start, work)[0], first)


def test_a_cohort_that_is_broken_off_leaves_the_next_one_whole(engine: Engine) -> None:
    sizes, steps, batch_size = WORKS["many clients"]
    work, start = work_of(sizes, steps, batch_size=batch_size), start_of(LOGISTIC)
    next(engine.train(start, work))
    assert torch.equal(all_changes(engine, start, work)[0], all_changes(engine, start, work)[0])


def test_impossible_work_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineError, match="no samples or no steps"):
        next(engine.train(start_of(LOGISTIC), work_of([4], [0])))
