"""Room to train: at most so many runs of a site train at the same time, each in its own process.

```
<coordinator>/room/0.lock ...   one file a place, locked by the process that trains
```

The system frees a place when its process ends, however it ends. A client that could not train now does not check in, so
that no round waits for it.
"""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.assignment import Assignment
from umbel.client.agent.notes import Doing, Notebook
from umbel.client.errors import AttemptRefused
from umbel.client.files import locked_file, make_private
from umbel.client.rounds.shutdown import Interrupted
from umbel.client.rounds.turn import Turn

_LOOK_S = 0.2
_WAIT_SHARE = 10  # an assignment waits for room at most a tenth of its window
log = logging.getLogger("umbel.client")


class Room:
    """The places of one site and coordinator."""

    def __init__(self, home: Path, n_places: int) -> None:
        folder = make_private(home / "room")
        self._places = [folder / f"{i}.lock" for i in range(n_places)]

    @property
    def n_places(self) -> int:
        return len(self._places)

    def is_free(self) -> bool:
        """Whether there is a place now."""
        with ExitStack() as stack:
            return self.enter(stack)

    def enter(self, stack: ExitStack) -> bool:
        """Take a place until the stack ends, if there is one."""
        for place in self._places:
            try:
                stack.enter_context(locked_file(place, waits=False))
            except BlockingIOError:
                continue
            return True
        return False


class SharedTurn(Turn):
    """The turn of one of an agent's runs. `told_to_leave`: why to leave before the next assignment; None to stay."""

    hold_s = 10.0  # so that a client whose place was taken meanwhile is soon off the coordinator's list

    def __init__(self, room: Room, notebook: Notebook, told_to_leave: Callable[[], str | None]) -> None:
        self._room = room
        self._notebook = notebook
        self._told_to_leave = told_to_leave

    def wait(self, _pause: Callable[[float], None]) -> None:
        while not self._room.is_free():
            self.check()
            self._notebook.note(Doing.HELD_UP, f"{self._others} of this site train now; --at-once allows no more")
            _pause(_LOOK_S)
        self.check()

    def check(self) -> None:
        if (reason := self._told_to_leave()) is not None:
            raise Interrupted(reason)

    @contextmanager
    def training(self, _offer: Assignment, _pause: Callable[[float], None]) -> Generator[None]:
        until = time.monotonic() + _offer.window_s / _WAIT_SHARE
        with ExitStack() as stack:
            while not self._room.enter(stack):
                if time.monotonic() > until:
                    raise AttemptRefused(
                        f"{self._others} of this site train now; --at-once allows no more",
                        "this site trains in other runs now",
                    )
                _pause(_LOOK_S)
            self._notebook.note(Doing.TRAINING, round_=_offer.round)
            yield

    def waits(self, _reason: str) -> None:
        self._notebook.note(Doing.WAITING, _reason)

    def reported(self, _n_reports: int) -> None:
        self._notebook.reported(_n_reports)

    @property
    def _others(self) -> str:
        return counted(self._room.n_places, "other run")
