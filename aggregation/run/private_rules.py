"""What a run file may not ask for beside [privacy]: anything that would show more than sums with noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.privacy.section import PrivacySection

if TYPE_CHECKING:
    from umbel.aggregation.run.file import RunFile


def require_private(section: PrivacySection, file: RunFile) -> None:
    """Raise `ValueError`, with the reason and a remedy, for a run file that private rounds do not allow."""
    for reason in _reasons(section, file):
        raise ValueError(reason)


def _reasons(section: PrivacySection, file: RunFile) -> Iterator[str]:
    if not file.secure:
        yield "the noise that each client adds protects it only where updates are masked: add [secure_aggregation]"
        return
    section.clip(file.codec.clip_norm)
    if file.rounds.weighting is Weighting.PROPORTIONAL:
        yield (
            "a client that is drawn twice would count twice, and the noise hides only one share: set "
            'weighting = "samples" in [rounds]; in private rounds all clients count the same'
        )
    if file.training.evaluate or file.stop is not None or any(one.evaluate for one in file.override):
        yield (
            "metrics would be summed without noise: leave out [stop] and evaluate, and measure the models of a private "
            "run on data that is not the clients'"
        )
    if any(one.target or one.minimum or one.over_selection for one in file.override):
        yield (
            "the noise is planned for one size of cohort: leave out target, minimum and over_selection in the overrides"
        )
