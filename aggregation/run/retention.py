"""Which model versions of a run are kept. Pure: it says what may go; files are removed by the coordinator's sweep."""

from collections.abc import Sequence

from umbel.aggregation.run.records import VersionRecord
from umbel.aggregation.run.stopping import StopRule, judge


def expired(versions: Sequence[VersionRecord], n_kept: int | None, rule: StopRule | None) -> tuple[int, ...]:
    """The versions that are to be deleted now, where `n_kept` of the newest are kept; None keeps all.

    Version 0 is always kept, and the best by the metric of early stopping, if the run has one.
    """
    if n_kept is None:
        return ()
    here = [one.version for one in versions if one.deleted_at is None]
    kept = {0, *here[len(here) - n_kept :]} if n_kept < len(here) else set(here)
    if rule is not None and (best := judge(rule, versions).best) is not None:
        kept.add(best.version)
    return tuple(version for version in here if version not in kept)
