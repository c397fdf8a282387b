"""`plan.drive` and `plan.adjust_gradients`: a loop of one's own does what the ready trainer does, and loses nothing."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from umbel.client import Checkpoint, Client, LocalPlan, TorchClient, TrainResult
from umbel.client.errors import WorkRefused
from umbel.client.local.batches import Data
from umbel.client.local.gradients import Projection


def data(n: int = 40) -> TensorDataset:
    rng = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 4, generator=rng), torch.randint(3, (n,), generator=rng))


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


class Own(Client):
    """The loop of `LocalPlan`'s documentation."""

    def __init__(self, train: Data | None = None) -> None:
        self.model, self.data, self.sample_count = network(), data() if train is None else train, 40

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        optimizer = plan.make_optimizer(model.train())
        steps = plan.drive(self.data, keep={"model": model, "optimizer": optimizer})
        for inputs, target in steps:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), target)
            loss.backward()
            plan.adjust_gradients(model)
            optimizer.step()
            steps.note(loss=loss)
        return steps.result(self.sample_count)


def halved(gradient: Tensor) -> Tensor:
    return gradient / 2


WITHIN: dict[str, Projection] = {"0.weight": halved}
PLANS = {
    "plain": LocalPlan(epochs=2, batch_size=8, seed=3),
    "a part of an epoch": LocalPlan(steps=3, batch_size=8, seed=3),
    "everything": LocalPlan(
        steps=9,
        batch_size=8,
        seed=4,
        proximal_mu=0.5,
        within=WITHIN,
        clip_norm=0.1,
        optimizer="adamw",
        weight_decay=0.1,
    ),
    "momentum": LocalPlan(steps=9, seed=5, momentum=0.9, weight_decay=0.01, learning_rate=0.1),
}


@pytest.mark.parametrize("what", PLANS)
def test_an_own_loop_trains_the_model_of_the_ready_trainer_to_the_bit(what: str) -> None:
    own, ready = Own(), TorchClient(network(), nn.CrossEntropyLoss(), data(), device="cpu", metrics={})
    found, expected = own.train(own.model, PLANS[what]), ready.train(ready.model, PLANS[what])
    assert found == expected
    pairs = zip(own.model.state_dict().values(), ready.model.state_dict().values(), strict=True)
    assert all(itertools.starmap(torch.equal, pairs))


class InMemory(Checkpoint):
    """Keeps the training at every step, and kills the client at one of them."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.kept: dict[str, Any] | None = None
        self.n_saves, self._dies_at = 0, dies_at

    def is_due(self) -> bool:
        return True

    def save(self, state: Any) -> None:
        self.kept = copy.deepcopy(state)
        self.n_saves += 1
        if self.n_saves == self._dies_at:
            raise KeyboardInterrupt

    def load(self) -> dict[str, Any] | None:
        return self.kept


def plan_with(checkpoint: Checkpoint, **more: Any) -> LocalPlan:
    return LocalPlan(epochs=2, batch_size=8, seed=3, proximal_mu=0.5, checkpoint=checkpoint, **more)


@pytest.mark.parametrize("dies_at", [1, 4, 7])
@pytest.mark.parametrize("kind", ["data set", "loader", "list"])
def test_a_killed_loop_of_ones_own_resumes_to_the_same_bits(kind: str, dies_at: int) -> None:
    def made() -> Own:
        batches = [data()[i : i + 8] for i in range(0, 40, 8)]
        drawn = DataLoader(data(), batch_size=8, shuffle=True)
        kinds: dict[str, Data] = {"data set": data(), "loader": drawn, "list": batches}
        return Own(kinds[kind])

    undisturbed, killed, resumed = made(), made(), made()
    expected = undisturbed.train(undisturbed.model, plan_with(Checkpoint()))
    checkpoint = InMemory(dies_at)
    with pytest.raises(KeyboardInterrupt):
        killed.train(killed.model, plan_with(checkpoint))
    # The loop binds the rules to the global weights, before the resumed ones replace them.
    found = resumed.train(resumed.model, plan_with(checkpoint).bound_to(resumed.model))
    assert found == expected
    pairs = zip(undisturbed.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    assert all(itertools.starmap(torch.equal, pairs))


def test_the_state_across_rounds_resumes_with_the_training() -> None:
    checkpoint, state = InMemory(2), dict[str, Any]()
    plan = plan_with(checkpoint, state=state)
    steps = enumerate(plan.drive(data(), keep={"model": network()}))
    with pytest.raises(KeyboardInterrupt):
        plan.state.update(("seen", number) for number, _ in steps)
    again = plan_with(checkpoint)
    next(iter(again.drive(data(), keep={"model": network()})))
    assert again.state == {"seen": 1}


def test_a_checkpoint_of_another_training_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = InMemory(2)
    with pytest.raises(KeyboardInterrupt):
        Own().train(network(), plan_with(checkpoint))
    for other in (plan_with(checkpoint, learning_rate=0.5), plan_with(checkpoint, options={"stage": "head"})):
        steps = other.drive(data(), keep={"model": network(), "optimizer": other.make_optimizer(network())})
        next(iter(steps))
        assert steps.steps_done == 0
    assert "does not fit (its settings differ)" in caplog.text


def test_without_anything_to_keep_a_training_begins_anew() -> None:
    steps = plan_with(InMemory()).drive(data())
    assert [steps.steps_done for _ in steps] == list(range(10))
    assert (steps.steps_done, steps.steps_planned) == (10, 10)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples without end."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.full((4,), float(i)), torch.tensor(i % 3)) for i in itertools.count())


def test_a_stream_is_driven_by_steps_and_refused_by_epochs() -> None:
    first = [int(inputs[0, 0]) for inputs, _ in LocalPlan(steps=3, batch_size=8).drive(Stream())]
    assert first == [0, 8, 16]
    with pytest.raises(ValueError, match="ask the operator for local_steps"):
        LocalPlan(epochs=1).drive(Stream())


def test_data_that_cannot_be_iterated_again_are_refused_when_they_end() -> None:
    once = (batch for batch in [data()[:8], data()[8:16]])
    steps = LocalPlan(steps=5).drive(once)
    with pytest.raises(ValueError, match="pass 2 over the data gave no batch"):
        list(steps)
    assert steps.steps_done == 2


@pytest.mark.parametrize("n_parts", [2, 3, 5])
def test_parts_of_a_batch_together_are_the_batch(n_parts: int) -> None:
    plan = LocalPlan(epochs=1, batch_size=8, seed=2)
    whole = list(plan.drive(data()))
    parts = list(plan.drive(data(), accumulate=n_parts))
    assert [len(step) for step in parts] == [n_parts] * 5
    joined = [[torch.cat(tensors) for tensors in zip(*step, strict=True)] for step in parts]
    assert all(
        torch.equal(a, b) for found, batch in zip(joined, whole, strict=True) for a, b in zip(found, batch, strict=True)
    )


def test_batches_of_a_loader_are_joined_to_steps() -> None:
    loader = DataLoader(data(), batch_size=8)
    steps = LocalPlan(epochs=2).drive(loader, accumulate=2)
    assert [len(step) for step in steps] == [2, 2, 1, 2, 2, 1]
    assert steps.steps_planned == 6


def test_what_was_noted_is_a_mean_over_samples_and_counts_add_up() -> None:
    steps = LocalPlan(epochs=1, batch_size=16).drive(data())
    for inputs, _ in steps:
        steps.note(loss=float(len(inputs)), size=torch.tensor(1.0))
        steps.count(seen=torch.tensor([len(inputs), 1]))
    result = steps.result(40, {"extra": 7})
    assert result.metrics == {"loss": (16 * 16 + 16 * 16 + 8 * 8) / 40, "size": 1.0, "extra": 7.0}
    assert result.counts == {"seen": (40, 3)}
    assert (result.first_loss, result.last_loss) == (16.0, 8.0)


def test_counts_that_do_not_add_up_are_refused() -> None:
    steps = LocalPlan().drive(data())
    with pytest.raises(ValueError, match=r"the counts 'a' must be integers, not torch\.float32"):
        steps.count(a=torch.ones(2))
    steps.count(a=torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"the counts 'a' have shape \(3,\), but \(2,\) in an earlier batch"):
        steps.count(a=torch.ones(3, dtype=torch.int32))


def test_what_has_no_state_cannot_be_kept() -> None:
    with pytest.raises(TypeError, match="kept as 'model' is a str, without state_dict and load_state_dict"):
        LocalPlan().drive(data(), keep={"model": "x"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="cannot have the name 'place'"):
        LocalPlan().drive(data(), keep={"place": network()})


# --- gradients --------------------------------------------------------------------------------------------------------


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
            p.grad = torch.full_like(p, 0.25)


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_wrapper_and_a_copy_of_the_model_are_adjusted_by_name() -> None:
    for wrap in (Wrapped, copy.deepcopy, lambda model: model):
        plan = LocalPlan(proximal_mu=2.0, within=WITHIN)
        model = network()
        plan = plan.bound_to(model)
        other = wrap(model)
        moved(other)
        plan.adjust_gradients(other)
        found = list(gradients_of(other).values())
        assert torch.equal(found[0], torch.full_like(found[0], 1.125))  # (0.25 + 2 * 1) / 2
        assert all(torch.equal(one, torch.full_like(one, 2.25)) for one in found[1:])


def test_another_model_is_refused() -> None:
    plan = LocalPlan(proximal_mu=1.0).bound_to(network())
    with pytest.raises(ValueError, match="without any parameter of the client's own model"):
        plan.adjust_gradients(nn.Linear(2, 2))


def test_gradients_are_clipped_with_the_proximal_term_in_them() -> None:
    model = network()
    plan = LocalPlan(proximal_mu=3.0, clip_norm=0.5).bound_to(model)
    moved(model)
    plan.adjust_gradients(model)
    assert nn.utils.get_total_norm(gradients_of(model).values()) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("plan", "ignored"),
    [
        (LocalPlan(), ()),
        (LocalPlan(proximal_mu=0.1), ("proximal_mu",)),
        (LocalPlan(within=WITHIN, clip_norm=1.0), ("codec", "clip_norm")),
        (LocalPlan(proximal_mu=0.1, algorithm="feddyn"), ("proximal_mu", "feddyn")),
    ],
)
def test_a_plan_knows_what_nobody_has_applied(plan: LocalPlan, ignored: tuple[str, ...]) -> None:
    assert plan.ignored == ignored
    if ignored:
        plan.applied_by_site(ignored[0])
        assert plan.ignored == ignored[1:]
        with pytest.raises(ValueError, match="not 'lr'"):
            plan.applied_by_site("lr")
    plan.adjust_gradients(network())
    assert plan.ignored == ()


@pytest.mark.parametrize(
    ("given", "is_possible"),
    [
        (data(), True),
        (DataLoader(data(), batch_size=40), True),
        (DataLoader(data(), batch_size=8), False),
        (Stream(), False),
    ],
    ids=["samples", "a loader of one batch", "a loader of five batches", "without a length"],
)
def test_one_step_over_all_samples_needs_them_in_one_batch(given: Data, *, is_possible: bool) -> None:
    """SCAFFOLD's option I took the gradient of a loader's first batch for that of all samples."""
    plan, site = LocalPlan(steps=1, batch_size=40, is_whole=True), Own(given)
    if is_possible:
        assert site.train(site.model, plan).steps_done == 1
        return
    with pytest.raises(WorkRefused, match="needs them in one batch"):
        site.train(site.model, plan)
