"""Saves of a silo that begins with another number of ranks."""

from pathlib import Path

import pytest

from umbel.client.datacenter.silo.checkpoint import forget_others

SAVE = "0.checkpoint.safetensors"


def saved_by(n_ranks: int, folder: Path) -> None:
    for rank in range(n_ranks):
        (folder / str(rank)).mkdir()
        forget_others(folder, rank, n_ranks)
        (folder / str(rank) / SAVE).touch()


def saves(folder: Path) -> list[str]:
    return sorted(str(one.parent.name) for one in folder.rglob(SAVE))


def test_the_same_number_of_ranks_keeps_its_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_by(3, tmp_path)
    for rank in range(3):
        forget_others(tmp_path, rank, 3)
    assert saves(tmp_path) == ["0", "1", "2"]
    assert not caplog.messages


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_another_number_of_ranks_forgets_them_and_says_so(
    n_ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_by(3, tmp_path)
    for rank in range(n_ranks):
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        forget_others(tmp_path, rank, n_ranks)
    assert saves(tmp_path) == []
    assert caplog.messages == [
        f"rank {rank} has saves of a silo of 3 ranks, and this one has {n_ranks}: if its round is still open, the "
        "training begins anew"
        for rank in range(min(n_ranks, 3))
    ]
