"""What an agent shows of its runs: a file in the state directory, which `umbel site runs` reads whether it runs or not.

```
<coordinator>/agent.json     rewritten when something changes; touched every few seconds while the agent runs
```
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from umbel.aggregation.messages import OpenRun
from umbel.client.agent.informing import InformingFile
from umbel.client.files import JsonFile

BOARD_FILE = "agent.json"
ALIVE_S = 15.0  # an agent whose file is older has ended
TOUCH_S = 2.0


@dataclass(frozen=True, slots=True)
class SiteRun:
    """One run as the site sees it. `state`: in words; `reason`: why, and what to do; empty if there is nothing to say.

    `stand`: of the site's decision (`verdict.Stand`); `reports`: sent since the agent started.
    """

    run: OpenRun
    state: str
    stand: str
    reason: str = ""
    app: str = ""
    round: int = 0
    reports: int = 0


@dataclass(frozen=True, slots=True)
class RunsBoard:
    """`client`: the name that the site is enrolled under; `at_once`: how many runs may train at the same time."""

    client: str
    server: str
    at_once: int
    runs: tuple[SiteRun, ...] = ()
    trouble: str = ""  # why nothing is allowed, or no run is known


_BOARD = TypeAdapter(RunsBoard)


class BoardFile:
    """The board of one coordinator. `home`: its directory in the state directory."""

    def __init__(self, home: Path) -> None:
        self._file = JsonFile(home / BOARD_FILE, _BOARD, "remove it; a running agent writes it again")
        self._informing = InformingFile(f"what umbel site runs shows ({self._file.path})")
        self._shown: RunsBoard | None = None
        self._touched_at = float("-inf")

    def show(self, board: RunsBoard) -> None:
        """Write the board if it has changed, and show that the agent is alive. Only the agent may call it.

        On a full disk the last board stays. It soon looks like that of an agent that has ended, as it is out of date.
        """
        now = time.monotonic()
        if board == self._shown and now - self._touched_at < TOUCH_S:
            return
        if self._informing.attempt(self._touch if board == self._shown else lambda: self._file.write(board)):
            self._shown, self._touched_at = board, now

    def hide(self) -> None:
        """Show that the agent has ended."""
        if self._file.path.exists():
            self._informing.attempt(lambda: os.utime(self._file.path, (0, 0)))

    def _touch(self) -> None:
        try:
            os.utime(self._file.path)
        except FileNotFoundError:  # somebody has removed it, as a message about a damaged board advises
            if self._shown is not None:
                self._file.write(self._shown)

    def read(self) -> RunsBoard | None:
        """The newest board; None if no agent has run here. Raises `StateError` for a damaged file."""
        return self._file.read()

    def is_alive(self) -> bool:
        """Whether an agent has shown itself within `ALIVE_S`."""
        try:
            return time.time() - self._file.path.stat().st_mtime < ALIVE_S
        except FileNotFoundError:
            return False


def boards_in(state_dir: Path) -> list[Path]:
    """The directories of the coordinators whose agents have run with this state directory."""
    return sorted(path.parent for path in state_dir.glob(f"*/{BOARD_FILE}"))
