"""What a private run may not ask for beside its sums with noise."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import TrainingPlan, Weighting
from umbel.aggregation.privacy.section import PrivacySection, require_private_model
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import Override, RoundsSection
from umbel.aggregation.run.stopping import StopRule
from umbel.aggregation.secagg.section import SecureAggregationSection

SAMPLES = RoundsSection(2, target=8, minimum=6, weighting=Weighting.SAMPLES)
PRIVATE = RunFile(
    "demo",
    SAMPLES,
    codec=CodecSection("integer", step=0.01, clip_norm=1.0),
    secure_aggregation=SecureAggregationSection(),
    privacy=PrivacySection(noise_multiplier=1.0),
)


def test_what_is_summed_with_noise_is_allowed() -> None:
    changed = Override(1, 1, window_s=30.0, learning_rate=0.5)
    assert replace(PRIVATE, override=(changed,)).override == (changed,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"secure_aggregation": None}, r"add \[secure_aggregation\]"),
        ({"rounds": replace(SAMPLES, weighting=Weighting.PROPORTIONAL)}, 'set weighting = "samples"'),
        ({"training": TrainingPlan(evaluate=True)}, "metrics would be summed without noise"),
        ({"stop": StopRule("training.loss", patience=3, minimum=1)}, "metrics would be summed without noise"),
        ({"override": (Override(2, 2, evaluate=True),)}, "metrics would be summed without noise"),
        ({"override": (Override(2, 2, target=7),)}, "one size of cohort"),
        ({"override": (Override(2, 2, minimum=7),)}, "one size of cohort"),
        ({"override": (Override(2, 2, over_selection=1.1),)}, "one size of cohort"),
        ({"codec": CodecSection("integer", step=0.01)}, "has no bound"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_would_show_more_than_sums_with_noise_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(PRIVATE, **changes)


def test_a_model_with_values_that_travel_exactly_has_no_private_rounds() -> None:
    require_private_model(Layout.of_state({"w": torch.zeros(3)}))
    with pytest.raises(ValueError, match=r"travel exactly \(n\), which would have no noise"):
        require_private_model(Layout.of_state({"w": torch.zeros(3), "n": torch.tensor(0)}))
