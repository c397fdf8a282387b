"""What the coordinator hears of what a client will not do; of a secure round that is not as it should be, what kind of
thing that is, and nothing else.

The site's own log has the whole sentence. Whoever asks may be the one who lies, so it learns no number and no name.
"""

import logging

from umbel.aggregation.secagg.errors import BadKey, Disagreement, ForgedMessage, SecAggError, TooFew
from umbel.aggregation.types import AssignmentId
from umbel.client.errors import Alarm, ClientError
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.transport import Patience, patiently

_TOLD: tuple[tuple[type[SecAggError], str], ...] = (
    (Disagreement, "the coordinator contradicts itself or states something impossible"),
    (ForgedMessage, "a message of this round is not signed by its stated sender"),
    (BadKey, "a key in this round is invalid or used twice"),
    (TooFew, "too few clients for this client to take part"),
)
_OTHERWISE = "a message of this round breaks the protocol"
_SILENT = "This client sends nothing more in this attempt"
log = logging.getLogger("umbel.client")


def alarm_of(error: SecAggError) -> Alarm:
    """The alarm that an error of the protocol is."""
    told = next((words for kind, words in _TOLD if isinstance(error, kind)), _OTHERWISE)
    return Alarm(f"{told}: {error}. {_SILENT}", f"{told}. {_SILENT}")


def decline(coordinator: CoordinatorClient, assignment: AssignmentId, reason: str, patience: Patience) -> None:
    """Tell the coordinator not to wait for a report, or for a signature. If even that fails, its own time ends it."""
    try:
        patiently(lambda: coordinator.decline(assignment, reason), patience)
    except ClientError as error:
        log.debug("could not decline %s: %s", assignment, error)
