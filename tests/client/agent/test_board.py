"""What an agent shows is there while it runs and after, and says which of the two it is."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.client.agent.runs import ONE
from umbel.client.agent.board import ALIVE_S, BoardFile, RunsBoard, SiteRun, boards_in
from umbel.client.agent.decisions import DecisionStore, SiteDecision
from umbel.client.errors import StateError

BOARD = RunsBoard(
    "ward", "http://fl.example.org", 2, (SiteRun(ONE, "training", "allowed", app="heart:client", round=3),)
)


def test_a_board_comes_out_as_it_was_shown(tmp_path: Path) -> None:
    assert BoardFile(tmp_path).read() is None
    assert not BoardFile(tmp_path).is_alive()
    BoardFile(tmp_path).show(BOARD)
    assert BoardFile(tmp_path).read() == BOARD
    assert BoardFile(tmp_path).is_alive()


def test_it_is_written_when_it_changes_only(tmp_path: Path) -> None:
    file = BoardFile(tmp_path)
    file.show(BOARD)
    first = (tmp_path / "agent.json").stat().st_ino
    file.show(replace(BOARD))
    assert (tmp_path / "agent.json").stat().st_ino == first
    file.show(replace(BOARD, trouble="no policy"))
    assert (tmp_path / "agent.json").stat().st_ino != first


def test_an_agent_that_has_ended_or_was_killed_is_not_alive(tmp_path: Path) -> None:
    file = BoardFile(tmp_path)
    file.show(BOARD)
    file.hide()
    assert not file.is_alive()
    assert file.read() == BOARD
    old = time.time() - ALIVE_S - 1
    os.utime(tmp_path / "agent.json", (old, old))
    assert not BoardFile(tmp_path).is_alive()


def test_every_coordinator_has_its_own(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        BoardFile(tmp_path / name).show(BOARD)
    (tmp_path / "c").mkdir()
    assert [path.name for path in boards_in(tmp_path)] == ["a", "b"]


def test_a_decision_is_kept_and_replaced(tmp_path: Path) -> None:
    store = DecisionStore(tmp_path)
    assert store.of(ONE.name) is None
    for is_allowed in (True, False):
        store.decide(ONE.name, SiteDecision.about(ONE, is_allowed, 1e9))
        assert DecisionStore(tmp_path).of(ONE.name) == SiteDecision.about(ONE, is_allowed, 1e9)


def test_a_decision_of_before_is_known_to_cover_less(tmp_path: Path) -> None:
    (tmp_path / "decisions").mkdir()
    (tmp_path / "decisions" / "heart-1.json").write_text(f'{{"identity":"{"a" * 64}","is_allowed":true,"at":1e9}}')
    found = DecisionStore(tmp_path).of(ONE.name)
    assert found is not None
    assert found.is_outdated
    assert not SiteDecision.about(ONE, True, 1e9).is_outdated


@pytest.mark.parametrize("text", ["", "{}", '{"identity":"a","is_allowed":"perhaps","at":1}'])
def test_a_damaged_decision_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "decisions").mkdir()
    (tmp_path / "decisions" / "heart-1.json").write_text(text)
    with pytest.raises(StateError, match=r"heart-1\.json is damaged; remove it, and decide again"):
        DecisionStore(tmp_path).of(ONE.name)
