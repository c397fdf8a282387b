"""The step of a server optimizer over a whole model: which tensors it moves, what it remembers, and where that lies."""

import math
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from umbel.aggregation.errors import LayoutError, ModelOverflow
from umbel.aggregation.model.kinds import require_steppable
from umbel.aggregation.model.layout import INTEGER_UNIT, PIECE_VALUES, Layout
from umbel.aggregation.model.next_model import (
    STEPS,
    ServerStep,
    empty_master,
    first_master_copy,
    slot_name,
    write_next,
)
from umbel.aggregation.model.state import InMemory, State, empty_state, torch_dtype
from umbel.aggregation.optimizers.section import AggregationSection, ServerOptimizerName
from umbel.aggregation.plans.tensors import TensorKind
from umbel.aggregation.plans.training import TrainingPlan

REMEMBERING: list[ServerOptimizerName] = [name for name in get_args(ServerOptimizerName) if name != "sgd"]
KINDS: dict[str, TensorKind] = {"frozen.weight": "global", "seen": "count"}


@dataclass
class Mean:
    """A round whose mean change is known."""

    values: Tensor

    def mean_slice(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop].clone()


def stepped(layout: Layout, master: State, mean: Mean, step: ServerStep) -> tuple[State, State]:
    """The next master copy and the next published model."""
    public, after = empty_state(layout, torch_dtype), empty_master(layout, step.optimizer)
    write_next(layout, InMemory(master), mean, step, InMemory(public), InMemory(after))
    return after, public


def mixed_state() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {
        "a.weight": torch.randn(9, 5, generator=draw),
        "b.half": torch.randn(7, generator=draw).bfloat16(),
        "c.double": torch.randn(3, generator=draw).double(),
        "d.empty": torch.zeros(0, 4),
        "frozen.weight": torch.randn(4, generator=draw),
        "norm.running_mean": torch.randn(6, generator=draw),
        "norm.running_var": torch.rand(6, generator=draw),
        "norm.num_batches_tracked": torch.tensor(5),
        "mask": torch.tensor([True, False, True]),
        "seen": torch.tensor([3, 4]),
    }


MOVED = {"a.weight", "b.half", "c.double"}
STAYS = {"frozen.weight", "d.empty"}


@pytest.mark.parametrize("name", REMEMBERING)
def test_an_optimizer_moves_weights_and_all_else_takes_its_mean_change(name: ServerOptimizerName) -> None:
    """Statistics, counters, bools and counts are as with plain SGD at the rate 1, whatever the optimizer's rate is."""
    state = mixed_state()
    layout = Layout.of_state(state, lambda tensor: KINDS.get(tensor, "mean"))
    draw = torch.Generator().manual_seed(3)
    change = torch.randn(layout.update.n_values, generator=draw, dtype=torch.float64) / 8
    for spec in layout.update.owners():
        if spec.dtype in ("int64", "bool"):
            change[spec.place] = (change[spec.place] * 20).round() * INTEGER_UNIT
    steps = {
        "ours": ServerStep.of((AggregationSection(0.125, optimizer=name), TrainingPlan()), 1, 1, 1),
        "plain": ServerStep(),
    }
    owned = {spec.name: state[spec.name] for spec in layout.owners()}
    masters: dict[str, State] = {of: first_master_copy(layout, one.optimizer, owned) for of, one in steps.items()}
    for n in (1, 2):
        after = {of: stepped(layout, masters[of], Mean(change), one) for of, one in steps.items()}
        for tensor in state:
            ours, plain = after["ours"][0][tensor], after["plain"][0][tensor]
            assert torch.equal(ours, plain) == (tensor not in MOVED), tensor
            assert torch.equal(ours, state[tensor].to(ours.dtype)) == (tensor in STAYS), tensor
        masters = {of: master for of, (master, _) in after.items()}
        assert masters["ours"][STEPS].item() == n
    named = {slot_name(slot, tensor) for slot in steps["ours"].optimizer.first for tensor in MOVED | {"d.empty"}}
    assert masters["ours"].keys() == {*state, *named, STEPS}
    assert all(masters["ours"][one].dtype is torch.float32 for one in named)
    assert masters["plain"].keys() == state.keys()


@pytest.mark.parametrize("n_values", [1, PIECE_VALUES, 2 * PIECE_VALUES + 5])
def test_the_norms_of_lars_and_lamb_are_those_of_the_whole_tensor(n_values: int) -> None:
    draw = np.random.default_rng(4)
    x, d = draw.normal(0, 1, n_values).astype(np.float32), draw.normal(0, 0.1, n_values)
    layout = Layout.of_state({"weight": torch.from_numpy(x)})
    length, direction = float(np.linalg.norm(x)), d / (np.abs(d) + 0.5)
    expected = {
        "lars": x + 0.3 * 0.02 * length / np.linalg.norm(d) * d,
        "lamb": x + 0.3 * length / np.linalg.norm(direction) * direction,
    }
    for section in (
        AggregationSection(0.3, optimizer="lars", trust=0.02),
        AggregationSection(0.3, optimizer="lamb", tau=0.5),
    ):
        step = ServerStep.of((section, TrainingPlan()), 1, 1, 1)
        master = first_master_copy(layout, step.optimizer, {"weight": torch.from_numpy(x)})
        after, _ = stepped(layout, master, Mean(torch.from_numpy(d)), step)
        assert np.abs(after["weight"].numpy() - expected[section.optimizer]).max() < 1e-6


def test_a_second_moment_begins_with_the_square_of_tau_in_every_piece() -> None:
    layout = Layout.of_state({"weight": torch.zeros(PIECE_VALUES + 3), "norm.running_mean": torch.zeros(2)})
    step = ServerStep.of((AggregationSection(optimizer="yogi", tau=0.5), TrainingPlan()), 1, 1, 1)
    master = first_master_copy(layout, step.optimizer, {name: torch.zeros(n) for name, n in _lengths(layout)})
    assert master[slot_name("second_moment", "weight")].unique().tolist() == [0.25]
    assert master[slot_name("first_moment", "weight")].unique().tolist() == [0.0]
    assert master[STEPS].item() == 0


def _lengths(layout: Layout) -> list[tuple[str, int]]:
    return [(spec.name, spec.n_values) for spec in layout.owners()]


def test_what_an_optimizer_cannot_remember_ends_the_run_with_a_remedy() -> None:
    """The square of a change may be beyond float32, where the change and the model are not."""
    layout, step = (
        Layout.of_state({"w": torch.zeros(1)}),
        ServerStep.of((AggregationSection(optimizer="adam"), TrainingPlan()), 1, 1, 1),
    )
    master = first_master_copy(layout, step.optimizer, {"w": torch.zeros(1)})
    with pytest.raises(ModelOverflow, match="the run has diverged: lower max_abs or a learning rate"):
        stepped(layout, master, Mean(torch.tensor([1e30], dtype=torch.float64)), step)


@pytest.mark.parametrize("n_steps", [-1, 1_000_000, 1 << 62])
def test_a_number_of_steps_that_no_run_has_is_refused_at_once(n_steps: int) -> None:
    """An auditor reads it from a file that is another's, and a power of that exponent would take for ever."""
    layout, step = (
        Layout.of_state({"w": torch.zeros(1)}),
        ServerStep.of((AggregationSection(optimizer="lamb"), TrainingPlan()), 1, 1, 1),
    )
    master = first_master_copy(layout, step.optimizer, {"w": torch.zeros(1)})
    master[STEPS].fill_(n_steps)
    with pytest.raises(ValueError, match=r"steps were made, and a run has 0 to 1000000"):
        stepped(layout, master, Mean(torch.zeros(1, dtype=torch.float64)), step)


@pytest.mark.parametrize("name", get_args(ServerOptimizerName))
def test_a_step_of_a_constant_change_is_what_the_formula_says(name: ServerOptimizerName) -> None:
    """A change of 1/4 at the rate 1/2, in two rounds, by hand."""
    section = AggregationSection(0.5, optimizer=name)
    m, tau = (0.25 * 0.1, 0.25 * 0.1 * 1.9), 1e-3
    v = (tau**2 * 0.99 + 0.25**2 * 0.01, tau**2 * 0.99**2 + 0.25**2 * 0.01 * 1.99)
    moves = {
        "sgd": (0.125, 0.125),
        "momentum": (0.125, 0.125 * 1.9),
        "nesterov": (0.125 * 1.9, 0.125 * (1 + 0.9 * 1.9)),
        "adagrad": tuple(0.5 * 0.25 / (math.sqrt(tau**2 + n * 0.25**2) + tau) for n in (1, 2)),
        "adam": tuple(0.5 * one / (math.sqrt(other) + tau) for one, other in zip(m, v, strict=True)),
        "yogi": tuple(
            0.5 * one / (math.sqrt(tau**2 + n * 0.25**2 * 0.01) + tau) for n, one in zip((1, 2), m, strict=True)
        ),
        "lars": (0.5 * 1e-3 * 1.0, 0.5 * 1e-3 * (0.9 + 1.0 + 0.5e-3)),
        "lamb": (0.5 * 1.0, 0.5 * 1.5),
    }[name]
    layout, step = Layout.of_state({"w": torch.ones(1)}), ServerStep.of((section, TrainingPlan()), 1, 1, 1)
    master: State = first_master_copy(layout, step.optimizer, {"w": torch.ones(1)})
    x = 1.0
    for move in moves:
        master, _ = stepped(layout, master, Mean(torch.tensor([0.25], dtype=torch.float64)), step)
        x += move
        assert float(master["w"]) == pytest.approx(x, abs=2e-6), name


def test_a_tensor_with_a_name_of_what_an_optimizer_remembers_is_refused() -> None:
    layout = Layout.of_state({"umbel.steps": torch.zeros(1), "weight": torch.zeros(2)})
    require_steppable(AggregationSection(), TrainingPlan(), layout)
    with pytest.raises(LayoutError, match=r"'umbel.steps' has a name that begins with \"umbel.\".*rename the tensor"):
        require_steppable(AggregationSection(optimizer="adam"), TrainingPlan(), layout)


def test_an_optimizer_with_nothing_to_move_is_refused() -> None:
    layout = Layout.of_state({"norm.running_mean": torch.zeros(3), "seen": torch.tensor([1, 2]), "w": torch.zeros(0)})
    require_steppable(AggregationSection(), TrainingPlan(), layout)
    with pytest.raises(LayoutError, match=r"\"momentum\" has nothing to move.*Set optimizer = \"sgd\""):
        require_steppable(AggregationSection(optimizer="momentum"), TrainingPlan(), layout)
