"""At most so many runs train at once, and a place is free again however its holder ended."""

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from umbel.client.agent.notes import Doing, Notebook, last_note
from umbel.client.agent.room import Room, SharedTurn
from umbel.client.errors import AttemptRefused
from umbel.client.rounds.shutdown import Interrupted

HOLDS = """
import sys, time
from contextlib import ExitStack
from pathlib import Path
from umbel.client.agent.room import Room
with ExitStack() as stack:
    print(Room(Path(sys.argv[1]), 1).enter(stack), flush=True)
    time.sleep(600)
"""


def offer(window_s: float = 100.0, number: int = 3) -> Any:
    return SimpleNamespace(window_s=window_s, round=number)


def no_pause(seconds: float) -> None:
    pytest.fail(f"a pause of {seconds} s")


@pytest.fixture
def notebook(tmp_path: Path) -> Notebook:
    return Notebook(tmp_path / "work")


def turn(tmp_path: Path, notebook: Notebook, n_places: int = 1, told: str | None = None) -> SharedTurn:
    return SharedTurn(Room(tmp_path, n_places), notebook, lambda: told)


def test_a_room_has_so_many_places(tmp_path: Path) -> None:
    with ExitStack() as held:
        assert [Room(tmp_path, 2).enter(held) for _ in range(3)] == [True, True, False]
        assert not Room(tmp_path, 2).is_free()
        assert Room(tmp_path, 3).is_free(), "it was made larger"
    assert Room(tmp_path, 2).is_free()


@pytest.mark.slow
def test_the_place_of_a_killed_process_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert not Room(tmp_path, 1).is_free()
        process.kill()
    assert Room(tmp_path, 1).is_free()


def test_a_training_has_a_place_and_notes_its_round(tmp_path: Path, notebook: Notebook) -> None:
    with turn(tmp_path, notebook).training(offer(), no_pause):
        assert not Room(tmp_path, 1).is_free()
        note = last_note(tmp_path / "work")
        assert note is not None
        assert (note.doing, note.round) == (Doing.TRAINING, 3)
    assert Room(tmp_path, 1).is_free()


def test_an_assignment_that_finds_no_place_is_declined_after_a_tenth_of_its_window(
    tmp_path: Path, notebook: Notebook
) -> None:
    pauses = list[float]()
    with ExitStack() as held:
        assert Room(tmp_path, 1).enter(held)
        started = time.monotonic()
        with (
            pytest.raises(AttemptRefused, match="--at-once") as refused,
            turn(tmp_path, notebook).training(offer(0.2), pauses.append),
        ):
            pytest.fail("there is no place")
    assert time.monotonic() - started >= 0.02
    assert pauses
    assert refused.value.public_reason == "this site trains in other runs now"


def test_a_client_that_could_not_train_does_not_check_in(tmp_path: Path, notebook: Notebook) -> None:
    held, pauses = ExitStack(), list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        note = last_note(tmp_path / "work")
        assert note is not None
        assert note.doing is Doing.HELD_UP
        if len(pauses) == 3:
            held.close()

    assert Room(tmp_path, 1).enter(held)
    turn(tmp_path, notebook).wait(pause)
    assert len(pauses) == 3


def test_one_that_was_told_to_leave_begins_nothing(tmp_path: Path, notebook: Notebook) -> None:
    leaving = turn(tmp_path, notebook, told="the policy has changed")
    with pytest.raises(Interrupted, match="the policy has changed"):
        leaving.wait(no_pause)
    with pytest.raises(Interrupted, match="the policy has changed"):
        leaving.check()
