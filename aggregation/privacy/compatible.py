"""What else of a run file, or of a model, cannot go with [privacy]: whatever would show more than sums with noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.privacy.section import PrivacySection

if TYPE_CHECKING:
    from umbel.aggregation.model.layout import Layout
    from umbel.aggregation.run.file import RunFile


def require_private(section: PrivacySection, file: RunFile) -> None:
    """Raise `ValueError`, with why and what to do, for a run file in which something cannot go with private rounds."""
    for reason in _reasons(section, file):
        raise ValueError(reason)


def require_private_model(layout: Layout) -> None:
    """Raise `ValueError` for a model with values that travel exactly, without noise."""
    if exact := [spec.name for spec in layout.owners() if not spec.is_coded]:
        raise ValueError(
            f"the model has tensors that travel exactly ({', '.join(exact[:3])}), which would have no noise: for "
            "[privacy] build it without counters and running statistics, with GroupNorm or LayerNorm, not BatchNorm"
        )


def _reasons(section: PrivacySection, file: RunFile) -> Iterator[str]:
    if not file.secure:
        yield "noise that each client adds protects it only where updates are masked: add [secure_aggregation]"
        return
    section.clip(file.codec.clip_norm)
    if file.rounds.weighting is Weighting.PROPORTIONAL:
        yield (
            "a client that is drawn twice would count twice, and have twice the share that the noise is for: set "
            'weighting = "samples" in [rounds]; in private rounds all clients count the same'
        )
    if file.training.evaluate or file.stop is not None or any(one.evaluate for one in file.override):
        yield (
            "metrics would be summed without noise: leave [stop] and evaluate out, and measure the models that a "
            "private run makes on data that is not the clients'"
        )
    if any(one.target or one.minimum or one.over_selection for one in file.override):
        yield (
            "the noise is planned for one size of cohort: leave target, minimum and over_selection out of the overrides"
        )
