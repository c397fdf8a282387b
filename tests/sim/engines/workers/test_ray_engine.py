"""The engine "ray", on a cluster of this machine, where Ray is installed."""

import importlib.util
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sim.engines.cohorts import all_changes, recipe, start_of, work_of
from umbel.sim.engines.model import ModelRecipe
from umbel.sim.engines.training import SequentialEngine
from umbel.sim.engines.work import EngineError
from umbel.sim.engines.workers import ray_cluster
from umbel.sim.engines.workers.ray_cluster import packed, unpacked
from umbel.sim.engines.workers.ray_engine import RayEngine

SIZES = [4 + 2 * (i % 5) for i in range(20)]
WORK = work_of(
    SIZES,
    [3 + i % 4 for i in range(20)],
    proximal_mu=0.1,
    optimizer={"momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.5},
)
Maker = Callable[[ModelRecipe], RayEngine]


@pytest.fixture
def make(ray: Any) -> Generator[Maker]:
    made = list[RayEngine]()

    def make(made_by: ModelRecipe) -> RayEngine:
        made.append(RayEngine(made_by, 2))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "with_dropout", "convolutions"])
def test_actors_give_the_bits_of_the_sequential_engine_round_after_round(make: Maker, name: str) -> None:
    made_by, sequential = recipe(name), SequentialEngine(recipe(name))
    engine, start = make(made_by), start_of(recipe(name))
    for _ in range(2):
        expected, expected_losses = all_changes(sequential, start, WORK)
        values, losses = all_changes(engine, start, WORK)
        assert torch.equal(values, expected)
        assert (losses == expected_losses).all()
        start = start + values.mean(0)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["feddyn", "scaffold"])
def test_actors_pull_each_client_as_the_sequential_engine_does(make: Maker, algorithm: str) -> None:
    made_by = recipe("mlp")
    start = start_of(made_by)
    drawn = torch.randn(len(SIZES), len(start), generator=torch.Generator().manual_seed(3)) * 0.1
    mu = 0.2 if algorithm == "feddyn" else 0.0
    terms = {"algorithm": algorithm, "total_samples": sum(SIZES)}
    given = replace(work_of(SIZES, [3] * len(SIZES), proximal_mu=mu, optimizer=terms), pulls=drawn)
    expected, _ = all_changes(SequentialEngine(made_by), start, given)
    values, _ = all_changes(make(made_by), start, given)
    assert torch.equal(values, expected)


@pytest.mark.slow
def test_an_actor_that_is_killed_is_restarted_and_its_clients_are_trained_again(make: Maker, tmp_path: Path) -> None:
    made_by = recipe("deadly", path=str(tmp_path / "now"), after=9)
    expected, _ = all_changes(SequentialEngine(made_by), start_of(made_by), WORK)
    (tmp_path / "now").touch()
    values, _ = all_changes(make(made_by), start_of(made_by), WORK)
    assert not (tmp_path / "now").exists(), "one has died"
    assert torch.equal(values, expected)


@pytest.mark.slow
def test_clients_that_kill_every_actor_end_the_round_with_a_reason(make: Maker, tmp_path: Path) -> None:
    (tmp_path / "now").touch()
    made_by = recipe("deadly", path=str(tmp_path / "now"), always=True)
    with pytest.raises(EngineError, match="died 3 times while it did the work of the same"):
        all_changes(make(made_by), start_of(made_by), WORK)


@pytest.mark.slow
def test_what_the_model_raises_is_told(make: Maker) -> None:
    with pytest.raises(EngineError, match="no such thing as 4 samples"):
        all_changes(make(recipe("broken")), start_of(recipe("broken")), WORK)


@pytest.mark.slow
def test_a_cluster_without_what_is_asked_for_is_refused(ray: Any) -> None:
    if ray.cluster_resources().get("GPU"):
        pytest.skip("there is a GPU")
    with pytest.raises(EngineError, match="Ray has 0 GPUs"):
        RayEngine(recipe("mlp"), device="cuda")


def test_without_ray_it_is_said_how_to_install_it() -> None:
    if importlib.util.find_spec("ray") is not None:
        pytest.skip("it is installed")
    with pytest.raises(EngineError, match=r"in a clone of umbel: pip install -c constraints.txt '\.\[sim,ray\]'$"):
        RayEngine(recipe("mlp"))


def test_a_gpu_by_its_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda _: object())  # as if Ray were installed
    with pytest.raises(EngineError, match=r'Ray assigns the GPUs .* use device = "cuda"$'):
        RayEngine(recipe("mlp"), device="cuda:1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(3,), (2, 5), (2, 1, 4)])
def test_tensors_of_every_type_travel_as_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    array = packed(tensor)
    array.flags.writeable = False
    again = unpacked(array, str(dtype).removeprefix("torch."))
    assert again.dtype == dtype
    assert torch.equal(again, tensor)
