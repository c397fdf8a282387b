"""Whether an assignment is what it must be, checked before anything is fetched, trained or written.

The coordinator may be hostile: names become paths, sizes become files, seconds become waits.
"""

import math

from umbel.aggregation.codec.combinations import require_codec
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import Assignment, assignment_id
from umbel.aggregation.types import CHANGES_MAX, SAMPLE_COUNT_MAX, SHA256, ClientId, RunId
from umbel.client.errors import CoordinatorMisbehaved, WorkRefused

WINDOW_S_MAX = 366 * 86400.0
COUNT_MAX = 1 << 53


def model_bytes_max(layout: Layout) -> int:
    """The most bytes a model file of this layout can have: its values, its layout as metadata, a header of names."""
    values = sum(spec.n_bytes for spec in layout.owners())
    names = sum(len(spec.name) for spec in layout.tensors)
    # Each name and shape stands in the header and, escaped (up to 14 bytes a character), twice in the metadata.
    return values + 32 * names + 512 * len(layout.tensors) + 4096


def check_offer(offer: Assignment, run: RunId, client: ClientId, layout: Layout) -> None:
    """Raise `CoordinatorMisbehaved` for a malformed assignment or one that is not this client's."""
    if not (1 <= offer.round <= COUNT_MAX and 1 <= offer.attempt <= COUNT_MAX):  # before they stand in a name or a log
        raise CoordinatorMisbehaved("the assignment's round or attempt is out of range")
    if offer.run != run or offer.id != assignment_id(run, offer.round, offer.attempt, client, offer.task):
        raise CoordinatorMisbehaved(f"assignment {offer.id[:200]!r} is not for run {run!r} and client {client!r}")
    if not (math.isfinite(offer.window_s) and 0 <= offer.window_s <= WINDOW_S_MAX):
        raise CoordinatorMisbehaved(f"the assignment's window is {offer.window_s} s")
    if not (0 <= offer.seed < 1 << 63 and 1 <= offer.sample_count_max <= SAMPLE_COUNT_MAX):
        raise CoordinatorMisbehaved("the assignment's seed or sample_count_max is out of range")
    if not 0 <= offer.model.version <= COUNT_MAX:
        raise CoordinatorMisbehaved("the assignment's model has a version that is out of range")
    if not 0 <= offer.rank < 1 << 32:
        raise CoordinatorMisbehaved(f"the assignment's rank is {offer.rank}")
    if not 0 < offer.share <= 1:  # also refuses a NaN
        raise CoordinatorMisbehaved(f"the assignment asks for a share of {offer.share} of the work")
    if not SHA256.fullmatch(offer.model.sha256):
        raise CoordinatorMisbehaved("the assignment's model has no SHA-256 of 64 lower-case hex digits")
    if not SHA256.fullmatch(offer.model.layout_digest):
        raise CoordinatorMisbehaved("the assignment's layout has no SHA-256 of 64 lower-case hex digits")
    size, size_max = offer.model.size_bytes, model_bytes_max(layout)
    if offer.model.layout_digest == layout.digest and not 1 <= size <= size_max:
        raise CoordinatorMisbehaved(f"the assignment's model has {size} bytes, this client's at most {size_max}")
    try:
        require_codec(offer.codec)
    except ValueError as error:
        raise CoordinatorMisbehaved(f"the assignment's codec cannot be: {error}") from error
    _check_changes(offer)


def _check_changes(offer: Assignment) -> None:
    if len(offer.changes) > CHANGES_MAX:
        raise CoordinatorMisbehaved(f"the assignment names {len(offer.changes)} changes, at most {CHANGES_MAX} are")
    for change in offer.changes:
        if not (SHA256.fullmatch(change.sha256) and SHA256.fullmatch(change.from_sha256)):
            raise CoordinatorMisbehaved("the assignment names a change without a SHA-256 of 64 lower-case hex digits")
        if change.size_bytes < 1:
            raise CoordinatorMisbehaved(f"the assignment names a change of {change.size_bytes} bytes")
    if sum(change.size_bytes for change in offer.changes) >= offer.model.size_bytes:
        raise CoordinatorMisbehaved("the assignment names changes that are together as large as its model")


def check_layout(offer: Assignment, layout: Layout) -> None:
    """Raise `WorkRefused`, with the reason to give the coordinator, for a model that is not this client's."""
    if offer.model.layout_digest != layout.digest:
        raise WorkRefused(
            f"this client's model has layout {layout.digest[:12]}…, the run's {offer.model.layout_digest[:12]}…: "
            "both sides need the same version of the model's code"
        )


def check_able(offer: Assignment, sample_count: int, layout: Layout) -> None:
    """The same for any work that this client cannot do."""
    check_layout(offer, layout)
    if sample_count > offer.sample_count_max:
        raise WorkRefused(
            f"this client has {sample_count} samples, the run accepts at most {offer.sample_count_max} from one client"
        )
