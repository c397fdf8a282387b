"""Without room on the disk an agent and the processes of its runs go on, say so once, and write again later."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.client.agent.runs import ONE, full_disk
from umbel.client.agent import board as board_module
from umbel.client.agent.board import BoardFile, RunsBoard, SiteRun
from umbel.client.agent.notes import Doing, Notebook, last_note

BOARD = RunsBoard("ward", "http://fl.example.org", 2, (SiteRun(ONE, "training", "allowed"),))
LATER = replace(BOARD, trouble="no policy")


@pytest.fixture(autouse=True)
def every_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def said(records: Iterable[logging.LogRecord]) -> list[str]:
    return [record.levelname for record in records]


def test_a_board_that_cannot_be_written_is_said_once_and_written_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = BoardFile(tmp_path)
    file.show(BOARD)
    with full_disk():
        for _ in range(5):
            file.show(LATER)
    assert file.read() == BOARD, "the old one is whole"
    assert said(caplog.records) == ["ERROR"]
    for words in (str(tmp_path / "agent.json"), "File too large", "Free some space", "The work continues"):
        assert words in caplog.text
    for _ in range(2):
        file.show(LATER)
    assert file.read() == LATER
    assert said(caplog.records) == ["ERROR", "INFO"]
    with full_disk():
        file.show(BOARD)
    assert said(caplog.records) == ["ERROR", "INFO", "ERROR"], "a second time is news"


def test_the_first_board_and_the_last_may_fail_too(tmp_path: Path) -> None:
    file = BoardFile(tmp_path)
    with full_disk():
        file.show(BOARD)
        file.hide()
    assert file.read() is None
    file.show(BOARD)
    assert file.is_alive()


def test_a_board_that_somebody_has_removed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(board_module, "TOUCH_S", 0.0)
    file = BoardFile(tmp_path)
    file.show(BOARD)
    (tmp_path / "agent.json").unlink()
    file.show(BOARD)
    assert file.read() == BOARD
    assert not caplog.records


@pytest.mark.parametrize(
    "call",
    [
        lambda notebook: notebook.note(Doing.WAITING, "no work yet"),
        lambda notebook: notebook.reported(0),
    ],
    ids=["what it does", "its reports"],
)
def test_a_note_that_cannot_be_written_is_said_once_and_written_with_the_next_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: Callable[[Notebook], None]
) -> None:
    with full_disk():
        notebook = Notebook(tmp_path)
        for _ in range(5):
            notebook.note(Doing.WAITING, "no work yet")
    assert last_note(tmp_path) is None
    assert said(caplog.records) == ["ERROR"]
    call(notebook)
    found = last_note(tmp_path)
    assert found is not None
    assert (found.doing, found.reason) == (Doing.WAITING, "no work yet"), "though the call has no news"
    written = (tmp_path / "note.json").stat().st_ino
    call(notebook)
    assert (tmp_path / "note.json").stat().st_ino == written
    assert said(caplog.records) == ["ERROR", "INFO"]
