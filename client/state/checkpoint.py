"""A training in progress, kept on disk, so that a killed client resumes it while its round is open.

It is one safetensors file: the tensors, and in its metadata the rest as JSON (`packing.py`), with the assignment and
the model that it belongs to.

Saving may take the share `_SHARE` of the training's time. So the time that the last save took decides when the next one
is due. A failure to save is only logged.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from umbel.client.files import make_private
from umbel.client.local.checkpoint import Checkpoint
from umbel.client.state.model_files import read_tensors, write_tensors
from umbel.client.state.packing import Packing, unpack

_SHARE = 1 / 40
_FIRST_COPIES = 3  # for an estimate of the first save: the weights and Adam's two moments
_FIRST_BYTES_PER_S = 100e6  # on a spinning disk
_LEAST_S = 0.025  # of a save: two flushes to a spinning disk
_KEY = "umbel.checkpoint"
log = logging.getLogger("umbel.client")


class CheckpointDamaged(Exception):
    """A file is no checkpoint, or not a whole one."""


class DiskCheckpoint(Checkpoint):
    """The checkpoint of one training. `belongs`: what it is of. `model_bytes`: the model's size, for an estimate of the
    first save.
    """

    def __init__(
        self,
        path: Path,
        belongs: Mapping[str, str],
        model_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._aside, self._belongs = path, path.with_suffix(".tmp"), dict(belongs)
        self._clock = clock
        self._cost_s = _LEAST_S + _FIRST_COPIES * model_bytes / _FIRST_BYTES_PER_S
        self._since = clock()
        self._has_failed = False

    @property
    def belongs_to(self) -> dict[str, str]:
        return self._belongs

    @property
    def interval_s(self) -> float:
        """Seconds of training between two saves, as of now."""
        return self._cost_s / _SHARE

    def is_due(self) -> bool:
        return self._clock() - self._since >= self.interval_s

    def save(self, state: Mapping[str, object]) -> None:
        started = self._clock()
        try:
            self._write(state)
        except (OSError, SafetensorError, RuntimeError, TypeError, ValueError) as error:  # RuntimeError: unusual state
            self._give_up(error)
        ended = self._clock()
        self._cost_s, self._since = max(ended - started, _LEAST_S, 2 * self._cost_s * self._has_failed), ended

    def load(self) -> dict[str, Any] | None:
        """What was saved for this training. Its tensors are mapped from the file; changing one changes only memory.

        A checkpoint that is damaged, or of another training, is removed.
        """
        try:
            found = read_checkpoint(self._path)
        except CheckpointDamaged as error:
            log.warning(
                "the checkpoint of an earlier training is damaged (%s); training starts from the beginning", error
            )
        else:
            if found is None:
                return None
            belongs, state = found
            if belongs == self._belongs:
                return state
        self.forget()
        return None

    def forget(self) -> None:
        for path in (self._path, self._aside):
            remove_checkpoint(path)

    def _write(self, state: Mapping[str, object]) -> None:
        packing = Packing()
        packed = packing.pack(state)
        make_private(self._path.parent)
        write_tensors(self._path, packing.separate(), {_KEY: json.dumps({"belongs": self._belongs, "state": packed})})

    def _give_up(self, error: Exception) -> None:
        """Continue without a checkpoint. Each failure delays the next try; only the first is logged."""
        with contextlib.suppress(OSError):
            self._aside.unlink()
        if not self._has_failed:
            log.warning(
                "the training could not be saved (%s); it continues, but after a restart it would start from the "
                "beginning",
                error,
            )
        self._has_failed = True


def read_checkpoint(path: Path) -> tuple[dict[str, str], dict[str, Any]] | None:
    """What a checkpoint is of, and what was saved, with tensors that are mapped from the file; None without a file.
    Raises `CheckpointDamaged`.
    """
    try:
        if not path.is_file():  # another thing, such as a pipe, may keep its reader waiting
            path.lstat()  # raises FileNotFoundError if nothing is there
            raise CheckpointDamaged("it is no file")
        metadata, tensors = read_tensors(path)
        kept: dict[str, Any] = json.loads(metadata[_KEY])
        return dict(kept["belongs"]), unpack(kept["state"], tensors)
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(str(error)) from error


def remove_checkpoint(path: Path) -> None:
    """Remove it if it is there, or log why not."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s is in the place of a checkpoint and cannot be removed (%s): move it away", path, error)
