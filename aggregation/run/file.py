"""The run file: what its owner wrote in TOML, checked, with defaults filled in (docs/reference/run-file.md).

Plain dataclasses, so that the server, the command line and the simulator read it with pydantic's `TypeAdapter(RunFile)`
and get the same errors.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace

from umbel.aggregation.codec.section import CodecSection, codec_key
from umbel.aggregation.codec.step import RoundShown
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.plans.round import CoverageFloor, RoundPlan, Task, TrainingPlan, Weighting
from umbel.aggregation.privacy.accounting import AccountantMissing
from umbel.aggregation.privacy.section import PrivacySection, again, private_numbers
from umbel.aggregation.run.rules import require_compatible, require_private
from umbel.aggregation.run.sections import (
    CANARY_CLIENTS,
    OVERRIDES_MAX,
    AggregationSection,
    CanarySection,
    DownlinkSection,
    EvaluationSection,
    Override,
    RetentionSection,
    RoundsSection,
)
from umbel.aggregation.run.stopping import StopRule
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.aggregation.types import RunId, require_slug


@dataclass(frozen=True, slots=True)
class RunFile:
    """A whole run file. Its constructor refuses a file with a round that cannot be planned."""

    name: str
    rounds: RoundsSection
    seed: int = 0
    training: TrainingPlan = field(default_factory=TrainingPlan)
    aggregation: AggregationSection = field(default_factory=AggregationSection)
    coverage: CoverageFloor = field(default_factory=CoverageFloor)
    override: tuple[Override, ...] = ()
    evaluation: EvaluationSection | None = None
    canary: CanarySection | None = None
    stop: StopRule | None = None
    retention: RetentionSection = field(default_factory=RetentionSection)
    codec: CodecSection = field(default_factory=CodecSection)
    downlink: DownlinkSection = field(default_factory=DownlinkSection)
    secure_aggregation: SecureAggregationSection | None = None
    privacy: PrivacySection | None = None
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        require_slug(self.name, "name")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must lie between 0 and 2^63 - 1, not {self.seed}")
        if len(self.override) > OVERRIDES_MAX:
            raise ValueError(f"at most {OVERRIDES_MAX} overrides, not {len(self.override)}")
        self.round_plan(1, 1)
        for number in self.rounds_of_change():
            self._check_round(number)
        if self.evaluation is not None:
            self.evaluation_plan(1)
        self._check_canary()
        self._check_stop()
        if self.secure_aggregation is not None:
            require_compatible(self.secure_aggregation, self)
        if self.privacy is not None:
            require_private(self.privacy, self)
            with suppress(AccountantMissing):  # the coordinator has the accountant, and refuses an impossible budget
                self.first_plan(1)

    def rounds_of(self, number: int) -> RoundsSection:
        """The section [rounds] for one round, with overrides applied."""
        changes = [override.of(RoundsSection) for override in self.override if override.covers(number)]
        return replace(self.rounds, **{key: value for change in changes for key, value in change.items()})

    def training_plan(self, number: int) -> TrainingPlan:
        """The training plan of one round, with overrides applied."""
        plan = self.training
        for change in (override.of(TrainingPlan) for override in self.override if override.covers(number)):
            if "local_steps" in change:
                change = {"local_epochs": None, **change}
            elif "local_epochs" in change:
                change = {"local_steps": None, **change}
            plan = replace(plan, **change)
        return plan

    def round_plan(self, number: int, attempt: int) -> RoundPlan:
        """The plan of one attempt at one round, both counted from 1."""
        rounds = self.rounds_of(number)
        return RoundPlan(
            run=RunId(self.name),
            number=number,
            attempt=attempt,
            target=rounds.target,
            minimum=rounds.minimum,
            over_selection=rounds.over_selection,
            window_s=rounds.window_s,
            weighting=rounds.weighting,
            sample_count_max=self.aggregation.sample_count_max,
            max_abs=self.aggregation.max_abs,
            seed=self.seed,
            coverage=self.coverage,
        )

    def evaluates_after(self, number: int) -> bool:
        """Whether clients that did not train measure the model after this round."""
        return self.evaluation is not None and number % self.evaluation.every == 0

    @property
    def judges_in(self) -> Task:
        """The kind of rounds that measure the metric of early stopping: evaluations, if the run has any."""
        is_apart = self.evaluation is not None and self.stop is not None and self.stop.is_of_evaluation
        return Task.EVALUATION if is_apart else Task.TRAINING

    def evaluation_plan(self, number: int) -> RoundPlan:
        """The plan of the evaluation after one round. It has one attempt, and the run goes on without it."""
        section = self.evaluation
        assert section is not None, "only a file with [evaluation] plans one"
        return replace(
            self.round_plan(number, 1),
            target=section.clients,
            minimum=1,
            window_s=self.rounds_of(number).window_s if section.window_s is None else section.window_s,
            weighting=Weighting.SAMPLES,
            coverage=CoverageFloor(),
            task=Task.EVALUATION,
        )

    def share_of(self, task: Task) -> float:
        """The share of a round's steps that each client does."""
        return self.canary.share if self.canary is not None and task.tries_clients else 1.0

    def first_plan(self, n_values: int) -> RoundPlan:
        """The run's first plan: the canary's, if there is one. `n_values`: of the model."""
        plan = self.round_plan(1, 1) if self.canary is None else self.canary_plan(1)
        key = codec_key(self.seed, 1)
        if self.secure and self.privacy:
            step, clip = self.codec.step_asked, self.codec.clip_norm
            codec, secure = private_numbers(self.privacy, step, clip, plan, n_values, self.rounds.count)
            secure = replace(secure, minimum_work=self.secure.work_floor(has_noise=True))
            return replace(plan, codec=replace(codec, key=key), secure=secure)
        if self.secure:
            codec, secure = self.secure.first(self.codec, plan, n_values, key)
            return replace(plan, codec=codec, secure=secure)
        return replace(plan, codec=self.codec.first(n_values, key))

    @property
    def secure(self) -> SecureAggregationSection | None:
        """The section on masked updates; None if they are not masked."""
        section = self.secure_aggregation
        return section if section is not None and section.enabled else None

    @property
    def members_sha256(self) -> str:
        """The hash of the member list that binds the run's rounds; empty without one."""
        return self.secure.members_sha256 if self.secure else ""

    def numbered_after(
        self, following: RoundPlan, before: RoundPlan, shown: RoundShown, summed: SumShown | None = None
    ) -> RoundPlan:
        """`following`, the plan of the round after `before`, with its codec and secure plans.

        They follow from what `before` has shown of its updates (`shown`) or, if they were masked, of their sum
        (`summed`).
        """
        number = before.number + 1
        key = codec_key(self.seed, number)
        if self.secure and before.secure and summed:
            numbers = (before.codec, before.secure)
            if self.privacy is not None:
                codec, secure = again(numbers, key)
            else:
                codec, secure = self.secure.after(self.codec, numbers, following, summed, key)
            return replace(following, codec=codec, secure=secure, n_released=before.n_released + 1)
        return replace(following, codec=self.codec.after(before.codec, number, shown, key))

    def canary_plan(self, attempt: int) -> RoundPlan:
        """The plan of one attempt at the canary, with as many of the named sites as it asks clients."""
        section = self.canary
        assert section is not None, "only a file with [canary] plans one"
        return replace(
            self.round_plan(1, attempt),
            target=section.n_asked,
            minimum=section.n_least,
            over_selection=1.0,
            window_s=self.rounds_of(1).window_s if section.window_s is None else section.window_s,
            weighting=Weighting.SAMPLES,
            coverage=CoverageFloor(sites=self.coverage.sites[: section.n_asked]),
            task=Task.CANARY,
        )

    def _check_canary(self) -> None:
        """Fill in the canary's number of clients.

        Raises `ValueError` for one that cannot be planned, or that asks more clients than round 1.
        """
        if self.canary is None:
            return
        n_asked = self.round_plan(1, 1).n_wanted
        if self.canary.clients is None:
            object.__setattr__(self, "canary", replace(self.canary, clients=min(CANARY_CLIENTS, n_asked)))
        elif self.canary.clients > n_asked:
            raise ValueError(f"the canary asks {self.canary.clients} clients, round 1 only {n_asked}; ask fewer")
        self.canary_plan(1)

    def _check_stop(self) -> None:
        """Raise `ValueError` for a metric that no client, or never enough clients, would measure."""
        if self.stop is None:
            return
        is_measured = self.evaluation or self.training.evaluate or any(one.evaluate for one in self.override)
        if self.stop.is_of_evaluation and not is_measured:
            raise ValueError(
                f"nothing measures {self.stop.metric}: set evaluate = true in [training], or add [evaluation]"
            )
        n_most = max(self.rounds_of(number).target for number in self.rounds_of_change())
        if self.evaluation is not None and self.judges_in is Task.EVALUATION:
            n_most = self.evaluation.clients
        if n_most < self.stop.minimum:
            raise ValueError(
                f"{self.stop.metric} counts where {self.stop.minimum} clients measure it, and only {n_most} are asked: "
                f"ask more, or set minimum = {n_most} in [stop] if none of them would lie"
            )

    def rounds_of_change(self) -> list[int]:
        """The first round of each stretch of rounds to which the same overrides apply."""
        firsts = {override.first_round for override in self.override}
        nexts = {override.last_round + 1 for override in self.override if override.last_round is not None}
        return sorted({1} | firsts | (nexts - {self.rounds.count + 1}))

    def _check_round(self, number: int) -> None:
        """Raise `ValueError` for overrides beyond the run, or overrides that make a round impossible to plan."""
        if number > self.rounds.count:
            raise ValueError(f"an override reaches beyond the last round, {self.rounds.count}")
        try:
            self.round_plan(number, 1)
            self.training_plan(number)
        except ValueError as error:
            raise ValueError(f"with its overrides, round {number} cannot be planned: {error}") from error
