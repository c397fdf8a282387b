"""The open runs of a coordinator, page by page; and a pause that ends early if a run is no longer open."""

import logging
import time
from collections.abc import Callable

from umbel.aggregation.messages import WAIT_S_MAX, OpenRun, OpenRuns
from umbel.aggregation.types import RunId
from umbel.client.errors import ClientError
from umbel.client.wire.coordinator import CoordinatorClient

RUNS_MAX = 1000  # of one coordinator; the rest, by name, is not looked at
PAUSE_S = 1.0  # the shortest time between two requests, so that a coordinator which does not wait causes no flood
_SHORT_S = 5.0  # a pause that costs no request
log = logging.getLogger("umbel.client")


def all_open_runs(coordinator: CoordinatorClient, first: OpenRuns) -> list[OpenRun]:
    """The runs of the first page and of those that follow. Raises `ClientError`."""
    runs, page = [*first.runs], first
    while page.next and page.runs and len(runs) < RUNS_MAX:
        page = coordinator.open_runs(after=page.next)
        runs += page.runs
    if page.next:
        log.warning("the coordinator lists more than %d open runs; this client looks at the first ones", RUNS_MAX)
    return runs[:RUNS_MAX]


def pause_while_open(
    coordinator: CoordinatorClient, run: RunId, seconds: float, wait: Callable[[float], object]
) -> None:
    """Wait for so many seconds, or until the coordinator no longer lists the run, because it is over.

    `wait`: for a number of seconds; it may raise, which ends the pause. Without a list, as of an older coordinator, or
    if the run was never in it, the whole time passes.
    """
    ends_at = time.monotonic() + seconds
    try:
        mark = _mark_if_open(coordinator, run) if seconds > _SHORT_S else None
        while mark is not None and (left_s := ends_at - time.monotonic()) > _SHORT_S:
            wait(PAUSE_S)
            mark = _mark_if_open(coordinator, run, mark, min(left_s - PAUSE_S, WAIT_S_MAX))
            if mark is None:
                return
    except ClientError as error:
        log.debug("cannot see the open runs: %s", error)
    wait(max(0.0, ends_at - time.monotonic()))


def _mark_if_open(coordinator: CoordinatorClient, run: RunId, mark: str = "", wait_s: float = 0.0) -> str | None:
    """The mark of the newest list; None if the run is not in it. Held open for so long while the list has `mark`."""
    first = coordinator.open_runs(mark=mark, wait_s=wait_s)
    if first.mark == mark or any(one.name == run for one in all_open_runs(coordinator, first)):
        return first.mark
    return None
