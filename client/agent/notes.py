"""What the process of one run notes for its agent, in the run's directory. Only the newest note is kept."""

import time
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from umbel.client.agent.informing import InformingFile
from umbel.client.errors import StateError
from umbel.client.files import JsonFile

NOTE_FILE = "note.json"
_REASON_CHARS_MAX = 1000


class Doing(StrEnum):
    """What the process of a run does."""

    STARTING = "starting"
    WAITING = "waiting for work"
    HELD_UP = "waiting for its turn"
    TRAINING = "training"
    LEFT = "left"
    OVER = "over"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Note:
    """`round`: of the last assignment, 0 before the first; `reports`: sent by this process."""

    doing: Doing
    at: float  # Unix seconds
    round: int = 0
    reports: int = 0
    reason: str = ""

    @property
    def has_ended(self) -> bool:
        return self.doing in (Doing.LEFT, Doing.OVER, Doing.FAILED)


_NOTE = TypeAdapter(Note)


def _file(work: Path) -> JsonFile[Note]:
    return JsonFile(work / NOTE_FILE, _NOTE)


def last_note(work: Path) -> Note | None:
    """The newest note in a run's directory; None if there is none, or a damaged one."""
    try:
        return _file(work).read()
    except StateError:
        return None


def forget_note(work: Path) -> None:
    """Remove the newest note in a run's directory, if there is one."""
    (work / NOTE_FILE).unlink(missing_ok=True)


class Notebook:
    """Writes the notes of one process. Only the holder of the run's lock may have one.

    A note that cannot be written is written with the next call, even if that has no news.
    """

    def __init__(self, work: Path) -> None:
        self._file = _file(work)
        self._informing = InformingFile(f"what this run does ({self._file.path})")
        self._write(Note(Doing.STARTING, 0.0))

    def note(self, doing: Doing, reason: str = "", round_: int | None = None) -> None:
        """Write what the process does now, if that is news."""
        number = self._note.round if round_ is None else round_
        following = replace(self._note, doing=doing, reason=reason[:_REASON_CHARS_MAX], round=number)
        if following != self._note or not self._informing.is_current:
            self._write(following)

    def reported(self, n_reports: int) -> None:
        if n_reports != self._note.reports or not self._informing.is_current:
            self._write(replace(self._note, reports=n_reports))

    def _write(self, note: Note) -> None:
        self._note = written = replace(note, at=time.time())
        self._informing.attempt(lambda: self._file.write(written))
