"""What an agent asks of the process of one run: one line of JSON on its standard input.

The pipe stays open. `RETIRE` on it asks the process to leave before its next assignment; `LEAVE`, to leave now, as
SIGTERM does; `WITHDRAW`, to leave at once and send nothing more, also if it was asked to leave before. Its end is a
`LEAVE`, too. So no process outlives an agent that was killed.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from umbel.aggregation.types import RunId, require_slug
from umbel.client.policy.decided import DecidedTerms
from umbel.client.policy.policy import SitePolicy

RETIRE = b"retire\n"
LEAVE = b"leave\n"
WITHDRAW = b"withdraw\n"
EARLIER_AT_WORK = 75  # the exit status if an earlier process of the run is still at work; EX_TEMPFAIL of sysexits.h


@dataclass(frozen=True, slots=True)
class ChildOrder:
    """`app`: the site's code, `module:attribute`; `decided`: refuse rounds that hide less of this site's updates."""

    server: str
    state: Path
    run: RunId
    app: str
    policy: SitePolicy | None
    decided: DecidedTerms
    at_once: int  # how many runs of the site may train at the same time

    def __post_init__(self) -> None:
        require_slug(self.run, "run")

    def line(self) -> bytes:
        """The order as one line."""
        return CHILD_ORDER.dump_json(self) + b"\n"


CHILD_ORDER = TypeAdapter(ChildOrder)
