"""The run file's section [secure_aggregation], checked, and the plans of secure rounds that follow from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from umbel.aggregation.canonical import later
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.codec.step import RoundShown
from umbel.aggregation.counts import CountsByName, require_lengths
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.masks import SecurePlan, SumShown
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.plans.training import PERSONAL
from umbel.aggregation.secagg.numbers.plan import FIRST_RMS, first_plans, require_floor, secure_plan_after, usual_floor
from umbel.aggregation.secagg.parameters import COMPLETE_MAX, DEFAULT_RULE, threshold_complete
from umbel.aggregation.trust.public_keys import members_sha256_of
from umbel.aggregation.types import ALL, SAMPLE_COUNT_MAX, MetricNames, require_metric_names, require_within

DEFAULT_METRICS = ("loss", "accuracy")  # what the ready trainer measures


@dataclass(frozen=True, slots=True)
class SecureAggregationSection:
    """Whether updates are masked. Then the coordinator learns only sums of updates, and of the numbers with them."""

    enabled: bool = True
    metrics: MetricNames = DEFAULT_METRICS  # of training; a client that lacks one leaves it out
    evaluation: MetricNames = DEFAULT_METRICS  # of held-out data, likewise
    expected_sample_count: int = 128  # of a usual client, for the first round's step; may be off by a factor of ten
    members_sha256: str = ""  # of the member list that the clients pin, in groups or not; empty without one
    minimum_work: float | None = None  # share of the planned steps of an update that is sent; None: see `work_floor`
    counts: Mapping[str, int] = later(factory=dict[str, int])  # of training, that are added up: each name's length
    evaluation_counts: Mapping[str, int] = later(factory=dict[str, int])  # of held-out data, likewise
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        for names in (self.metrics, self.evaluation):
            require_metric_names(names)
        for lengths in (self.counts, self.evaluation_counts):
            require_lengths(lengths)
        require_within(self.expected_sample_count, "expected_sample_count", 1, SAMPLE_COUNT_MAX)
        if self.members_sha256:
            object.__setattr__(self, "members_sha256", members_sha256_of(self.members_sha256))
        if self.minimum_work is not None:
            require_floor(self.minimum_work, "minimum_work")

    def work_floor(self, *, has_noise: bool) -> float:
        """The least share of the planned steps that a client must do. `has_noise`: whether the run is private."""
        return usual_floor(has_noise=has_noise) if self.minimum_work is None else self.minimum_work

    @property
    def has_room_for_personal(self) -> bool:
        """Whether a masked sum has room for a metric, or counts, of the model that a site keeps for itself."""
        names = (*self.evaluation_counts, *(() if self.evaluation == ALL else self.evaluation))
        return self.evaluation == ALL or any(name.startswith(PERSONAL) for name in names)

    def require_lengths_of(self, counts: CountsByName, evaluation_counts: CountsByName) -> None:
        """Raise `ValueError` for a client's counts of a name that this section has with another length."""
        for where, found, lengths in (
            ("counts", counts, self.counts),
            ("evaluation_counts", evaluation_counts, self.evaluation_counts),
        ):
            for name in sorted(found.keys() & lengths.keys()):
                if (length := len(found[name])) != lengths[name]:
                    raise ValueError(
                        f"the report has {length} numbers of {where} {name!r}, and the run file asks for "
                        f"{lengths[name]} ([secure_aggregation])"
                    )

    def first(self, codec: CodecSection, plan: RoundPlan, n_values: int, key: int) -> tuple[CodecPlan, SecurePlan]:
        """The codec and secure plans of a run's first round. `n_values`: of an update."""
        return first_plans(
            replace(codec, step=1.0).first(n_values, key),
            weight_unit=self.expected_sample_count,
            clients_max=plan.n_wanted,
            minimum=plan.minimum,
            metrics=self.metrics,
            evaluation=self.evaluation,
            minimum_work=self.work_floor(has_noise=False),
            counts=self.counts,
            evaluation_counts=self.evaluation_counts,
        )

    def after(
        self,
        codec: CodecSection,
        before: tuple[CodecPlan, SecurePlan],
        plan: RoundPlan,
        shown: SumShown,
        key: int,
    ) -> tuple[CodecPlan, SecurePlan]:
        """The codec and secure plans of the round with this plan.

        `before`: the plans of the round of training before it. `shown`: what the sum of that round has shown. The new
        step is at most four times the last one. The first round's step is finer on purpose. So after the first round,
        the new step is at most four times the step that suits the expected update.
        """
        last = before[0]
        if plan.number == 2 and shown.update_rms:
            last = last.at_step(_step_of(codec) * FIRST_RMS / last.inverse_step)
        following = codec.after(last, plan.number, RoundShown(plan.window_s, 0, shown.update_rms), key)
        secure = secure_plan_after(before[1], following, shown, clients_max=plan.n_wanted, minimum=plan.minimum)
        return following, secure


def survivors_needed(n_clients: int) -> int:
    """The fewest of these clients that must send masked vectors for a sum to be unmasked; see `parameters.py`."""
    return threshold_complete(n_clients) if n_clients <= COMPLETE_MAX else DEFAULT_RULE.survivors_min(n_clients)


def over_selection_max(target: int) -> float:
    """The largest over-selection, rounded down to hundredths, at which `target` clients suffice to unmask a sum."""
    n_clients = target
    while survivors_needed(n_clients + 1) <= target:
        n_clients += 1
    return math.floor(100 * n_clients / target) / 100


def _step_of(codec: CodecSection) -> float:
    """The integer codec's step, in root mean squares of an update."""
    return 1 / replace(codec, first_norm=1.0, clip_norm=None).first(1, 0).inverse_step
