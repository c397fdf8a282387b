"""The residuals of error feedback, on disk: one safetensors file for each of the two newest model versions.

A residual is written beside its update, and kept before that is reported. It is taken if the coordinator then says that
the update counts. The residual of the version before stays too, because an attempt that is
repeated must begin as the abandoned one did.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.types import AssignmentId, RunId
from umbel.client.files import make_private, sync
from umbel.client.state.model_files import read_tensors, write_tensors

_ASSIGNMENT = "umbel.assignment"
log = logging.getLogger("umbel.client")


class FeedbackStore:
    """The residuals of one client. `waiting`: the residual of an update whose report was not answered yet."""

    def __init__(self, folder: Path, waiting: Path) -> None:
        self._folder = folder
        self.waiting = waiting

    def forget_uncounted(self, version: int, counts: Callable[[AssignmentId], bool]) -> None:
        """Remove the residual of the update that the attempt before made from the version before this one, unless it
        counts. `counts`: whether the run's newest model has the work of an assignment in it.
        """
        path = self._path(version - 1)
        if not path.exists():
            return
        try:
            assignment = read_tensors(path)[0].get(_ASSIGNMENT)  # earlier releases did not write it
        except (SafetensorError, OSError, KeyError) as error:
            _drop(path, error)
            return
        if assignment is not None and not counts(AssignmentId(assignment)):
            path.unlink()

    def before(self, run: RunId, round_number: int, version: int) -> Residual | None:
        """The residual of the round before, which made this version. None if that round's update did not count, if the
        residual is lost, or after a rollback.
        """
        path = self._path(version - 1)
        if not path.exists():
            return None
        try:
            metadata, tensors = read_tensors(path)
            if not _belongs(run, round_number - 1).items() <= metadata.items():
                return None
            found = Residual.from_tensors(tensors)
        except (SafetensorError, OSError, ValueError) as error:
            _drop(path, error)
            return None
        return found if found.version + 1 == version else None

    def wait(self, run: RunId, round_number: int, assignment: AssignmentId, left: Residual) -> None:
        """Write the residual of this assignment's update beside it."""
        write_tensors(self.waiting, left.to_tensors(), {**_belongs(run, round_number), _ASSIGNMENT: assignment})

    def keep(self) -> None:
        """Keep the waiting residual, because its update is about to be reported. All but the last two are removed."""
        if not self.waiting.exists():
            return
        try:
            version = int(read_tensors(self.waiting)[1]["version"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            _drop(self.waiting, error)
            return
        make_private(self._folder)
        self.waiting.replace(self._path(version))
        for path in self._folder.iterdir():
            if path not in (self._path(version), self._path(version - 1)):
                path.unlink()
        sync(self._folder)

    def _path(self, version: int) -> Path:
        return self._folder / f"{version}.safetensors"


def _drop(path: Path, error: Exception) -> None:
    """Remove a damaged residual; the values in it are lost."""
    log.warning("the residual of error feedback cannot be read, and is dropped: %s", error)
    path.unlink()


def _belongs(run: RunId, round_number: int) -> dict[str, str]:
    return {"umbel.run": run, "umbel.round": str(round_number)}
