"""What simulated clients keep from one round to the next, on disk: their `plan.state` and their private tensors.

The files are those of a site (`client/state/site_state.py`), and the rule has the same outcome. A state is written
after the training from a model version, and kept if the report was accepted and the round has made a model. A training
begins with the newest state of an older version. Two versions stay, and more if the run may be resumed from an older
checkpoint.
"""

import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from umbel.aggregation.types import RunId
from umbel.client.state.model_files import read_tensors
from umbel.client.state.site_state import RUN_KEY, SiteState, newest_state, read_state, write_state

_CLIENTS_IN_FOLDER = 1000
_SUFFIX, _WAITING = ".safetensors", "waiting.safetensors"


class ClientStates:
    """The states of all clients of one run. `folder`: for them; None: a temporary one.

    `oldest_start`: the oldest version from which a training may still begin, which is that of the last checkpoint.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.is_temporary = folder is None  # then no run can be resumed with these states
        self.folder = Path(mkdtemp(prefix="umbel-states-")) if folder is None else folder
        self.oldest_start = 0
        self._has_new = False
        if self.is_temporary:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def before(self, number: int, version: int) -> SiteState:
        """The state with which this client trains from this model version."""
        found = self._newest(number, version)
        return SiteState() if found is None else found[1]

    def wait(self, number: int, run: RunId, version: int, left: SiteState) -> None:
        """Write the state after the training from this version. Raises `StateTooLarge` or `TypeError` for what cannot
        be kept.
        """
        waiting, names = self._of(number) / _WAITING, self._names(number)
        if left or set(names) - {_WAITING}:
            waiting.parent.mkdir(parents=True, exist_ok=True)
            write_state(waiting, left, run, version, is_durable=False)  # `sync` is for all of them together
        elif names:
            waiting.unlink()  # of an abandoned attempt

    def keep(self, number: int, version: int) -> None:
        """Keep the waiting state of the training from this version, because its round has made a model."""
        waiting = self._of(number) / _WAITING
        if not waiting.exists():
            return
        waiting.replace(self._path(number, version))
        self._has_new = True
        useful = [one for one in self._versions(number) if one < max(self.oldest_start, 1)]
        for older in useful[:-1]:
            self._path(number, older).unlink()

    def amend(self, number: int, version: int, change: Callable[[SiteState, SiteState], SiteState]) -> None:
        """Change the waiting state of the training from this version. `change`: of the state with which the training
        began, and of that which it has left, makes the one to keep.
        """
        waiting = self._of(number) / _WAITING
        if waiting.exists() and (left := read_state(waiting)) is not None:
            run = RunId(read_tensors(waiting)[0][RUN_KEY])
            write_state(waiting, change(self.before(number, version), left), run, version, is_durable=False)

    def lend(self, number: int, version: int) -> bytes | None:
        """The file of the state with which this client trains from this model version, for another machine; None: the
        client has kept nothing.
        """
        found = self._newest(number, version)
        return None if found is None else found[0].read_bytes()

    def borrow(self, number: int, file: bytes) -> None:
        """Take the file of a lent state. These must be the states of one attempt alone."""
        self._write(self._path(number, 0), file)

    def left(self, number: int) -> bytes | None:
        """The file that waits after the training of a borrowed state; None: the client has left nothing."""
        waiting = self._of(number) / _WAITING
        return waiting.read_bytes() if waiting.exists() else None

    def wait_for(self, number: int, file: bytes | None) -> None:
        """Let the file that another machine's training has left wait here, as `wait` does."""
        waiting = self._of(number) / _WAITING
        if file is not None:
            self._write(waiting, file)
        elif self._names(number):
            waiting.unlink(missing_ok=True)  # of an abandoned attempt

    def sync(self) -> None:
        """Have all kept states survive a loss of power, before a checkpoint counts on them."""
        if self._has_new and not self.is_temporary:
            os.sync()
        self._has_new = False

    def forget_from(self, version: int) -> None:
        """Remove the states of trainings from this version and later ones, which will be done again."""
        for path in self.folder.glob("*/*/*.safetensors"):
            if path.name == _WAITING or int(path.stem) >= version:
                path.unlink()

    def close(self) -> None:
        """Remove temporary files."""
        if self.is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _newest(self, number: int, version: int) -> tuple[Path, SiteState] | None:
        return newest_state(self._path(number, one) for one in self._versions(number) if one < version)

    def _write(self, path: Path, file: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file)

    def _of(self, number: int) -> Path:
        return self.folder / f"{number // _CLIENTS_IN_FOLDER:05}" / f"{number:07}"

    def _path(self, number: int, version: int) -> Path:
        return self._of(number) / f"{version}.safetensors"

    def _versions(self, number: int) -> list[int]:
        stems = (name.removesuffix(_SUFFIX) for name in self._names(number))
        return sorted(int(stem) for stem in stems if stem.isdigit())

    def _names(self, number: int) -> list[str]:
        """The files of a client. Most clients keep nothing, so this is quick where there are none."""
        try:
            return os.listdir(f"{self.folder}/{number // _CLIENTS_IN_FOLDER:05}/{number:07}")
        except FileNotFoundError:
            return []
