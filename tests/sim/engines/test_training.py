"""Training on a resident model gives what the SDK's trainer gives, to the bit."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.federations.whole_states import state_change
from tests.sim.engines.cohorts import STRUCTURED, Optimizing, all_changes, recipe, start_of, work_of
from umbel.aggregation.codec.vector_update import GradientProjections
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import CodecPlan
from umbel.client.rounds.site_code import asked_of_site
from umbel.client.training.trainer import TorchClient
from umbel.sim.engines.device import one_thread
from umbel.sim.engines.model import ModelRecipe, start_vector
from umbel.sim.engines.training import Arithmetic, Draws, LocalTrainer, SequentialEngine, TrainingStopped
from umbel.sim.engines.work import CohortWork, EngineError

SIZES = [9, 1, 4, 5, 13, 3, 8, 2]  # one sample; a last batch of one, of three, and none; fewer than a batch
STEPS = [7, 3, 1, 4, 12, 2, 2, 5]  # a part of a pass, several passes, whole ones
PAIRS = [2 * size for size in SIZES]  # for batch normalization, which cannot train on a single sample
ALL = {"momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.3}


ADAMW = {"optimizer": "adamw", "weight_decay": 0.1, "clip_norm": 0.3}


def by_the_sdk(made_by: ModelRecipe, work: CohortWork) -> tuple[Tensor, list[list[float]]]:
    """What a device makes of each client's work: changes and losses, by position."""
    changes, losses = list[Tensor](), list[list[float]]()
    for i in range(len(work.data)):
        own, model = work.data.of(i), made_by.make()
        layout = Layout.of_state(model.state_dict())
        start = {name: value.clone() for name, value in model.state_dict().items()}
        client = TorchClient(model, made_by.mean_loss(), TensorDataset(own.inputs, own.targets), device="cpu")
        plan = asked_of_site(replace(work.plan, local_steps=int(work.steps[i]), local_epochs=None), int(work.seeds[i]))
        plan = replace(plan, within=GradientProjections(work.codec, layout))
        with one_thread():  # sums over many threads come in another order
            done = client.train(model, plan)
        changes.append(state_change(layout, model.state_dict(), start))
        losses.append([done.metrics["loss"], done.first_loss or 0.0, done.last_loss or 0.0])
    return torch.stack(changes), losses


def trained(made_by: ModelRecipe, work: CohortWork, arithmetic: Arithmetic = "sdk") -> tuple[Tensor, list[list[float]]]:
    values, losses = all_changes(SequentialEngine(made_by, arithmetic=arithmetic), start_of(made_by), work)
    return values, losses.tolist()


@pytest.mark.parametrize("name", ["linear", "mlp", "with_dropout", "tied", "replacing", "shaken"])
@pytest.mark.parametrize(
    ("proximal_mu", "optimizer"), [(0.0, {}), (0.5, {}), (0.1, ALL), (0.1, ADAMW), (0.0, {"optimizer": "adam"})]
)
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_a_client_trains_as_on_its_device_to_the_bit(
    name: str, proximal_mu: float, optimizer: Optimizing, batch_size: int
) -> None:
    work = work_of(SIZES, STEPS, batch_size=batch_size, proximal_mu=proximal_mu, optimizer=optimizer)
    values, losses = trained(recipe(name), work)
    expected, expected_losses = by_the_sdk(recipe(name), work)
    assert torch.equal(values, expected)
    assert losses == expected_losses


@pytest.mark.parametrize("name", ["mlp", "replacing"])
@pytest.mark.parametrize(
    "optimizer", [{"optimizer": "lars", "momentum": 0.9}, {"optimizer": "lamb"}, {"optimizer": "muon"}]
)
def test_an_optimizer_that_looks_at_whole_layers_steps_as_on_its_device(name: str, optimizer: Optimizing) -> None:
    work = work_of(SIZES, STEPS, batch_size=4, proximal_mu=0.1, optimizer={"weight_decay": 0.01, **optimizer})
    values, losses = trained(recipe(name), work)
    expected, expected_losses = by_the_sdk(recipe(name), work)
    assert torch.equal(values, expected)
    assert losses == expected_losses
    assert not torch.equal(values, trained(recipe(name), work_of(SIZES, STEPS, batch_size=4, proximal_mu=0.1))[0])


@pytest.mark.parametrize("name", ["with_batch_norm", "convolutions"])
@pytest.mark.parametrize("batch_size", [4, 100])
def test_running_statistics_start_from_the_global_ones_for_every_client(name: str, batch_size: int) -> None:
    work = work_of(PAIRS, STEPS, batch_size=batch_size, proximal_mu=0.1, optimizer=ALL)
    values, losses = trained(recipe(name), work)
    expected, expected_losses = by_the_sdk(recipe(name), work)
    assert torch.equal(values, expected)
    assert losses == expected_losses


@pytest.mark.parametrize("codec", STRUCTURED)
def test_a_client_trains_what_its_codec_can_carry_as_on_its_device_to_the_bit(codec: str) -> None:
    work = work_of(SIZES, STEPS, proximal_mu=0.1, optimizer=ALL, codec=STRUCTURED[codec])
    values, _ = trained(recipe("mlp"), work)
    assert torch.equal(values, by_the_sdk(recipe("mlp"), work)[0])
    assert not torch.equal(values, trained(recipe("mlp"), replace(work, codec=CodecPlan()))[0])


def test_what_a_client_does_depends_on_nobody_before_it() -> None:
    for name in ("with_dropout", "with_batch_norm", "replacing", "tied"):
        work = work_of(PAIRS, STEPS, optimizer=ALL)
        made_by = recipe(name)
        trainer, start = LocalTrainer(made_by), start_of(made_by)
        forward, backward = torch.empty(len(PAIRS), len(start)), torch.empty(len(PAIRS), len(start))
        with one_thread():
            trainer.begin(start, work)
            trainer.train(work, np.arange(len(PAIRS)), forward)
            trainer.train(work, np.arange(len(PAIRS))[::-1], backward)
        assert torch.equal(forward, backward.flip(0)), name


def test_convolutions_in_the_fast_order_give_the_same_up_to_rounding_and_are_chosen_by_themselves() -> None:
    work = work_of(PAIRS, STEPS, proximal_mu=0.1, optimizer=ALL)
    exact, _ = trained(recipe("convolutions"), work, "sdk")
    fast, _ = trained(recipe("convolutions"), work, "fast")
    chosen, _ = trained(recipe("convolutions"), work, "auto")
    assert torch.equal(chosen, fast)
    assert (fast - exact).abs().max() < 1e-6
    assert not torch.equal(fast, exact), "it is another arithmetic"


@pytest.mark.parametrize("name", ["mlp", "convolutions_with_dropout"])
def test_models_without_convolutions_or_with_dropout_keep_the_bits_of_the_sdk(name: str) -> None:
    work = work_of(SIZES, STEPS, optimizer=ALL)
    assert torch.equal(trained(recipe(name), work, "auto")[0], by_the_sdk(recipe(name), work)[0])


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("mlp", Draws.NOTHING),
        ("with_dropout", Draws.TORCH),
        ("shaken", Draws.OTHERS),
        ("with_batch_norm", Draws.NOTHING),
    ],
)
def test_it_is_found_out_from_which_generators_a_model_draws(name: str, draws: Draws) -> None:
    trainer = LocalTrainer(recipe(name))
    trainer.begin(start_of(recipe(name)), work_of(PAIRS, STEPS))
    assert trainer.draws is draws


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.mark.parametrize("name", ["mlp", "with_dropout", "shaken"])
def test_the_callers_generators_and_threads_are_left_as_they_were(name: str) -> None:
    seed_all(3)
    expected = torch.rand(3).tolist(), random.random(), np.random.random()
    threads = torch.get_num_threads()
    seed_all(3)
    for _ in SequentialEngine(recipe(name)).train(start_of(recipe(name)), work_of(SIZES, STEPS)):
        assert torch.get_num_threads() == threads
        assert torch.initial_seed() == 3
    assert (torch.rand(3).tolist(), random.random(), np.random.random()) == expected


def test_a_second_cohort_starts_from_its_own_model() -> None:
    made_by = recipe("with_batch_norm")
    engine, start, work = SequentialEngine(made_by), start_of(made_by), work_of(PAIRS, STEPS, proximal_mu=1.0)
    first, _ = all_changes(engine, start, work)
    moved = start + first.mean(0)
    again, _ = all_changes(engine, moved, work)
    assert torch.equal(again, all_changes(SequentialEngine(made_by), moved, work)[0])
    assert not torch.equal(first, again)


def test_stopped_training_ends_in_mid_client() -> None:
    made_by = recipe("mlp")
    trainer, work, start = LocalTrainer(made_by), work_of([8], [100]), start_of(made_by)
    trainer.begin(start, work)
    trainer.stop()
    with pytest.raises(TrainingStopped):
        trainer.train(work, np.arange(1), torch.empty(1, len(start)))


def test_integers_that_float32_cannot_carry_are_refused_with_their_name() -> None:
    state = {"counter": torch.tensor(1 << 25), "weight": torch.zeros(2)}
    with pytest.raises(EngineError, match="'counter' has a value beyond 2\\^24"):
        start_vector(Layout.of_state(state), state)


def test_a_counter_that_runs_too_far_is_refused_as_on_a_device() -> None:
    made_by = recipe("counting")
    with pytest.raises(LayoutError, match="changed by more than 2\\^24"):
        trained(made_by, work_of([8], [2]))


def test_work_that_contradicts_itself_is_refused() -> None:
    made_by = recipe("linear")
    engine, start, work = SequentialEngine(made_by), start_of(made_by), work_of([4, 4], [1, 0])
    with pytest.raises(EngineError, match="no samples or no steps"):
        next(engine.train(start, work))
    with pytest.raises(EngineError, match=r"needs 52 values of float32"):
        next(engine.train(start[:-1], work_of([4], [1])))
    with pytest.raises(EngineError, match="2 clients have 2 seeds and 1 numbers of steps"):
        next(engine.train(start, work_of([4, 4], [1])))


@pytest.mark.parametrize(
    ("made_by", "message"),
    [
        (ModelRecipe("mlp"), "must look like module:function"),
        (ModelRecipe("no_such_module:mlp"), "no module 'no_such_module'"),
        (recipe("no_such_model"), "has no function 'no_such_model'"),
        (ModelRecipe("builtins:dict"), "returned a dict"),
        (ModelRecipe("torch.nn:Identity"), "no parameter to train"),
        (ModelRecipe("torch.nn:Identity", loss="no-such-loss"), "the loss must look like"),
    ],
)
def test_a_recipe_that_makes_no_model_says_what_is_wrong(made_by: ModelRecipe, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        SequentialEngine(made_by)


def test_a_recipe_makes_the_same_model_every_time_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    assert torch.equal(start_of(recipe("mlp")), start_of(recipe("mlp")))
    assert torch.equal(torch.get_rng_state(), before)
    assert ModelRecipe.from_json(recipe("with_dropout", rate=0.1).to_json()) == recipe("with_dropout", rate=0.1)
    with pytest.raises(EngineError, match="cannot be sent to another process"):
        recipe("mlp", size=object()).to_json()
