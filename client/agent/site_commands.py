"""The commands that an agent tells the people at its site to type. They work as printed. Pure, but for `of`."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from umbel.client.state.state_dir import STATE_DEFAULT


@dataclass(frozen=True, slots=True)
class SiteCommands:
    """`where`: the flag that names the agent's state directory, for a shell; empty for the default directory."""

    where: str = ""

    @classmethod
    def of(cls, state_dir: Path) -> "SiteCommands":
        """The commands about the agent of this state directory."""
        if _absolute(state_dir) == _absolute(STATE_DEFAULT):
            return cls()
        return cls(shlex.join(("--state", str(_absolute(state_dir)))))

    def text(self, *words: str) -> str:
        """`umbel site` with these words."""
        return f"umbel site {shlex.join(words)} {self.where}".rstrip()


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))  # `Path.expanduser` raises for a user without a home
