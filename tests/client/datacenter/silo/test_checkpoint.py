"""A silo's training goes on after a kill, also on another number of ranks."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.aggregation.collective.ranks import in_ranks
from tests.client.datacenter.silo.test_silo import PLAN, WAYS, N, led, plain, samples, silo_of
from tests.suite.nights import at_night
from umbel.client import TorchClient
from umbel.client.datacenter.ranks.names import RANKS
from umbel.client.datacenter.silo.checkpoint import RankCheckpoint
from umbel.client.datacenter.silo.client import SiloClient
from umbel.client.files import make_private
from umbel.client.local.batches import BatchPart
from umbel.client.local.plan import LocalPlan
from umbel.client.state.checkpoint import DiskCheckpoint
from umbel.client.state.model_files import read_metadata
from umbel.client.training.trainer import StepLoss

pytestmark = pytest.mark.slow
HERE = "tests.client.datacenter.silo.test_checkpoint"
FOLDER, STEPS = "SAVES_OF_RANKS", "STEPS_BEFORE_DEATH"  # environment of the ranks
BELONGS = {"assignment": "silos.1.1.ward", "model_sha256": "0" * 64}
PLANS = {"momentum": PLAN, "adamw": replace(PLAN, optimizer="adamw", proximal_mu=0.3)}


class Killed(Exception):
    """Stands for kill -9 of all ranks."""


class Dies(TorchClient):
    """Dies on all ranks after so many steps of a training; its saves stay."""

    left = 0

    def training_step(self, model: nn.Module, batch: Any) -> StepLoss:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().training_step(model, batch)  # type: ignore[return-value]


def gone_on(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Each training until it dies or is whole: the model, and what was measured."""
    saves_always()
    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    found = dict[str, Tensor]()
    for way, wrapped in WAYS.items():
        for name, plan in PLANS.items():
            app = Dies(wrapped(group), "classes", samples(N, 0), part=BatchPart(rank, n_ranks))
            app.left = int(os.environ[STEPS])
            folder = Path(os.environ[FOLDER]) / f"{way} {name}"
            told = led(silo_of(app, group, folder), one_training(replace(plan, checkpoint=checkpoint(folder))))
            found |= {f"{way} {name} {key}": one for key, one in told.items()}
    return found


def saves_always() -> None:
    """In this process, which ends with the test."""
    DiskCheckpoint.is_due = lambda self: True  # type: ignore[method-assign]


def checkpoint(folder: Path) -> DiskCheckpoint:
    """As the client's loop gives it. Ranks keep their own beside it."""
    return DiskCheckpoint(folder / "of no rank", BELONGS)


def one_training(plan: LocalPlan) -> Callable[[SiloClient], dict[str, Tensor]]:
    def lead(silo: SiloClient) -> dict[str, Tensor]:
        try:
            result = silo.train(silo.model, plan.bound_to(silo.model))
        except Killed:
            return {}
        assert result.first_loss is not None
        numbers = [result.steps_done, result.samples_seen, result.metrics["loss"], result.metrics["accuracy"]]
        return {**silo.model.state_dict(), "result": torch.tensor([*numbers, result.first_loss])}

    return lead


@pytest.mark.parametrize("sizes", [(2, 3), *at_night(((3, 1, 2),), ((4, 2, 4),))])
def test_other_numbers_of_ranks_go_on_and_end_as_one_process(
    sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of ranks dies after five of fifteen steps, and the last one ends them."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "saves"))
    found = dict[str, Tensor]()
    for number, n_ranks in enumerate(sizes):
        is_last = number == len(sizes) - 1
        monkeypatch.setenv(STEPS, "100" if is_last else "5")
        ranks = tmp_path / str(number)
        ranks.mkdir()
        found = in_ranks(f"{HERE}:gone_on", n_ranks, ranks)[0]
        saves = sorted(one.parent.name for one in tmp_path.rglob("*.checkpoint.safetensors"))
        assert bool(saves) is not is_last
    for name, plan in PLANS.items():
        one, result, _ = plain(plan)
        for way in WAYS:
            for key, value in one.model.state_dict().items():
                torch.testing.assert_close(found[f"{way} {name} {key}"], value, rtol=1e-5, atol=1e-6)
            expected = torch.tensor([15, 3 * N, result.metrics["loss"], result.metrics["accuracy"]])
            *numbers, first_loss = found[f"{way} {name} result"]
            torch.testing.assert_close(torch.stack(numbers), expected, rtol=1e-5, atol=1e-6)
            assert first_loss == pytest.approx(result.first_loss, rel=0.02)  # a mean over ranks with unequal parts


# --- saves that cannot be used ---


class OneOf:
    """One rank of a group that gives what all others give."""

    names = RANKS

    def __init__(self, rank: int = 0, size: int = 1, others: Sequence[object] = ()) -> None:
        self.rank, self.size, self.is_first, self._others = rank, size, rank == 0, others

    def gather(self, data: bytes) -> list[bytes]:
        return [data, *(json.dumps(one).encode() for one in self._others)]


def of_rank(folder: Path, rank: OneOf, *, is_staged: bool = False) -> RankCheckpoint:
    make_private(folder / str(rank.rank))
    ranks: Any = rank
    part = BatchPart(rank.rank, rank.size)
    return RankCheckpoint(folder, BELONGS, nn.Linear(1, 1), ranks, part, 0, is_staged=is_staged)


def saved(folder: Path, n_ranks: int) -> None:
    measured: dict[str, object] = {"sums": {}, "counts": {}, "first": {}, "own": []}
    for rank in range(n_ranks):
        of_rank(folder, OneOf(rank, n_ranks)).save({"steps_done": 7, "means": measured})


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def nest_deeply(path: Path) -> None:
    save_file({}, path, {"umbel.checkpoint": "[" * 100_000})


def claim_many_ranks(path: Path) -> None:
    (text,) = (json.loads(one) for one in read_metadata(path).values())
    text["belongs"]["ranks"] = "1000000000000"
    save_file({}, path, {"umbel.checkpoint": json.dumps(text)})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("spoil", [cut, make_directory, make_pipe, nest_deeply, claim_many_ranks])
def test_what_is_no_save_is_told_and_the_training_begins_anew(
    spoil: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1)
    spoil(tmp_path / "0" / "0.checkpoint.safetensors")
    checkpoint = of_rank(tmp_path, OneOf())
    assert checkpoint.load() is None
    assert "is damaged" in caplog.text or "the saves cannot be used" in caplog.text
    checkpoint.save({"steps_done": 8})
    checkpoint.save({"steps_done": 9})
    found = of_rank(tmp_path, OneOf()).load()
    assert found is not None
    assert found["steps_done"] == 9
    checkpoint.forget()


@pytest.mark.parametrize(
    ("rank", "lost", "is_staged", "why"),
    [
        (OneOf(0, 3, [[], [[7, 2]]]), "1", False, "rank 0, rank 1 cannot read all that this takes"),
        (OneOf(0, 2, [[]]), "1", False, "rank 1 cannot read all that this takes"),
        (OneOf(0, 2, [[[5, 2]]]), "", False, "the ranks have none of the same step"),
        (OneOf(0, 3, [[], []]), "", True, "a pipeline goes on only with as many ranks as before"),
    ],
)
def test_the_log_says_why_saves_cannot_be_used(
    rank: OneOf, lost: str, is_staged: bool, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 2)
    if lost:
        shutil.rmtree(tmp_path / lost)
    assert of_rank(tmp_path, rank, is_staged=is_staged).load() is None
    assert why in caplog.text


def test_without_any_save_the_log_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert of_rank(tmp_path, OneOf(0, 2, [[]])).load() is None
    assert not caplog.text


def test_what_another_training_has_saved_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 3)
    belongs = {**BELONGS, "assignment": "silos.2.1.ward"}
    for number in range(2):
        rank: Any = OneOf(number, 2, [[]])
        assert RankCheckpoint(tmp_path, belongs, nn.Linear(1, 1), rank, BatchPart(number, 2), 0).load() is None
    assert not [*tmp_path.rglob("*.safetensors")]
    assert not caplog.text
