"""What a person at the site has decided about runs, on disk: `umbel site allow` and `umbel site deny` write it.

```
<coordinator>/decisions/RUN.json
                       /secret     32 random bytes, for the hashes that people copy
```

A decision holds for one identity of a run (`OpenRun.identity`): its name, run file, first model, member list, and how
much it hides of this site's updates. If the coordinator lists another run under the same name, a person is asked again.
"""

import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from umbel.aggregation.messages import OpenRun
from umbel.aggregation.types import RunId
from umbel.client.agent.site_commands import SiteCommands
from umbel.client.errors import StateError
from umbel.client.files import JsonFile, locked_file, make_private, write_atomically

FORM = 2
_FORM_BEFORE = 1  # without the fewest clients of a sum and the noise
HASH_DIGITS = 12
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class SiteDecision:
    """`identity`: of the run; `at`: in Unix seconds; `form`: what the identity covers (old files have none)."""

    identity: str
    is_allowed: bool
    at: float
    form: int = _FORM_BEFORE

    @classmethod
    def about(cls, run: OpenRun, is_allowed: bool, at: float) -> "SiteDecision":
        """A decision about exactly this run."""
        return cls(run.identity, is_allowed, at, FORM)

    @property
    def is_outdated(self) -> bool:
        """Whether it was about less than a decision covers now."""
        return self.form < FORM


_DECISION = TypeAdapter(SiteDecision)


class DecisionStore:
    """The decisions about the runs of one coordinator. `home`: its directory in the state directory.

    Any process of the site's user may write one; the agent reads it within a second.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._folder = home / "decisions"

    def of(self, run: RunId) -> SiteDecision | None:
        """The last decision about a run of this name. Raises `StateError` for a damaged file."""
        return self._file(run).read()

    def decide(self, run: RunId, decision: SiteDecision) -> None:
        """Store a decision, durably, in place of an earlier one."""
        self._file(run).write(decision)

    def hash_of(self, run: OpenRun) -> str:
        """The first 12 hex digits of a hash of the run's identity, for people to copy. Raises `OSError`, `StateError`.

        The hash has a key that only this site knows. Without a key, 12 digits are too few: a coordinator could make
        many offers, find two with the same digits, show one, and swap it for the other before a person allows it.
        """
        return hmac.digest(self._secret(), run.identity.encode(), "sha256").hex()[:HASH_DIGITS]

    def _secret(self) -> bytes:
        """The key of the hashes, made at the first use."""
        path = make_private(self._folder) / "secret"
        with locked_file(path.with_name("secret.lock")):
            if not path.exists():
                write_atomically(path, secrets.token_bytes(_SECRET_BYTES))
            found = path.read_bytes()
        if len(found) != _SECRET_BYTES:
            look = SiteCommands.of(self._home.parent).text("runs")
            raise StateError(f"{path} is damaged; remove it, and look at the runs again ({look})")
        return found

    def _file(self, run: RunId) -> JsonFile[SiteDecision]:
        return JsonFile(self._folder / f"{run}.json", _DECISION, "remove it, and decide again (umbel site allow, deny)")
