"""The open runs of a coordinator, page by page."""

import logging

from umbel.aggregation.messages import OpenRun, OpenRuns
from umbel.client.wire.coordinator import CoordinatorClient

RUNS_MAX = 1000  # of one coordinator; the rest, by name, is not looked at
PAUSE_S = 1.0  # the shortest time between two requests, so that a coordinator which does not wait causes no flood
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
