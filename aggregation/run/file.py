"""What a run file says: the run as its owner wrote it, in TOML, checked and with defaults filled in.

```toml
name = "ward-triage"
seed = 7

[rounds]
count = 20              # committed rounds until the run is finished
target = 8              # reports a round needs to close early
minimum = 4             # reports a round needs at the window's end
over_selection = 1.25   # ask ceil(target * over_selection) clients
window_s = 600          # the one timeout
weighting = "samples"   # or "proportional"
self_tuning = false     # choose window and over-selection from measured report times; window_s is then the longest
attempts_max = 5        # give up after so many abandoned attempts at one round; without it, never

[coverage]              # what must be in before a round closes at its target
samples = 0.8           # share of the samples that the cohort announced
sites = ["north"]       # clients by name
tiers = ["hospital"]    # values of the label "tier", which clients' tokens bind
strict = false          # at the window's end: close without what is missing and say so; strict: abandon the round

[training]
local_epochs = 1        # or local_steps
batch_size = 32
learning_rate = 0.05
proximal_mu = 0.0       # FedProx
evaluate = false        # clients measure each model on their own held-out data

[aggregation]
server_learning_rate = 1.0
max_abs = 64.0          # bound of one coordinate of a weight change
sample_count_max = 1048576

[codec]                 # how clients write their updates; docs/reference/run-file.md has all names
name = "integer"        # or "auto", "float32" (the default), "topk", "eden", ...
step = 0.5              # of the integers, in units of an update's root mean square, as the round before measured it
first_norm = 1.0        # the L2 norm that an update of the first round is expected to have
clip_norm = 10.0        # the greatest L2 norm of an update; longer ones are shortened to it. By default there is none

[secure_aggregation]    # updates are masked: the coordinator learns their sum alone; docs/explanation/security.md
metrics = ["loss"]      # of training, and of held-out data below, added up under masks, too
evaluation = ["loss", "accuracy"]
expected_sample_count = 128  # of a usual client, for the first round's step
members_sha256 = "..."  # of the consortium's member list, if clients pin one, as `umbel members show` prints it
minimum_work = 1.0      # share of its planned steps that a client must have done, or its update is not sent

[privacy]               # noise in every sum; docs/explanation/differential-privacy.md. Needs [secure_aggregation]
epsilon = 4.0           # for all rounds together; or noise_multiplier
delta = 1e-6
clip_norm = 1.0         # the greatest L2 norm of an update
colluders = 1           # clients of the smallest cohort who may add no noise, or know their own

[downlink]              # what clients fetch of a new model
name = "change"         # the change since a version that they have; or "model", the default: all of it
step = 1.0              # of changes, in units of the root mean square of what changes

[evaluation]            # measure the model on clients that did not train it
every = 5               # after every fifth round
clients = 10            # reports at which such a round closes
window_s = 120          # by default, that of the round before it

[canary]                # before round 1, try it out on a few clients with a share of the work
clients = 3
minimum = 2             # that must pass; by default, more than half
share = 0.01            # of the local steps
window_s = 300          # by default, that of round 1
on_failure = "pause"    # "stop": the run fails; "widen": go on all the same

[stop]                  # end the run before its last round
metric = "evaluation.loss"  # or training.NAME
mode = "min"            # or "max"
patience = 5            # measurements without improvement
min_delta = 0.0
target = 0.1            # end as soon as it is reached
minimum = 3             # clients without whom a measurement does not count

[retention]
versions = 10           # newest model versions to keep, beside version 0 and the best; or "all"
updates = "none"        # clients' updates to keep for `umbel run replay`: "none", "5 rounds", "all"

[[override]]            # other values of [rounds] and [training] for some rounds; of several, the last one counts
first_round = 1
last_round = 3
window_s = 1200
learning_rate = 0.01
```

Plain dataclasses, so that the server, the operator's command line and the simulator read the same file with pydantic's
`TypeAdapter(RunFile)` and get the same errors.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace

from umbel.aggregation.codec.section import CodecSection, codec_key
from umbel.aggregation.codec.step import RoundShown
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.plans.round import CoverageFloor, RoundPlan, Task, TrainingPlan, Weighting
from umbel.aggregation.privacy.accounting import AccountantMissing
from umbel.aggregation.privacy.rounds import again, private_numbers
from umbel.aggregation.privacy.section import PrivacySection
from umbel.aggregation.run.private_rules import require_private
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
from umbel.aggregation.secagg.section import SecureAggregationSection, require_compatible
from umbel.aggregation.types import RunId, require_slug


@dataclass(frozen=True, slots=True)
class RunFile:
    """A whole run file. Its constructor refuses one from which any of its rounds could not be planned."""

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
        for number in self._rounds_of_change():
            self._check_round(number)
        if self.evaluation is not None:
            self.evaluation_plan(1)
        self._check_canary()
        self._check_stop()
        if self.secure_aggregation is not None:
            require_compatible(self.secure_aggregation, self)
        if self.privacy is not None:
            require_private(self.privacy, self)
            with suppress(AccountantMissing):  # the coordinator has it, and refuses a budget that cannot be kept
                self.first_plan(1)

    def rounds_of(self, number: int) -> RoundsSection:
        """The `rounds` section as it holds for one round."""
        changes = [override.of(RoundsSection) for override in self.override if override.covers(number)]
        return replace(self.rounds, **{key: value for change in changes for key, value in change.items()})

    def training_plan(self, number: int) -> TrainingPlan:
        """What clients are asked to do in one round."""
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
        """In which rounds the metric of early stopping is measured: of those who did not train, if there are any."""
        is_apart = self.evaluation is not None and self.stop is not None and self.stop.is_of_evaluation
        return Task.EVALUATION if is_apart else Task.TRAINING

    def evaluation_plan(self, number: int) -> RoundPlan:
        """The plan of the evaluation after one round. It has one attempt: without it the run goes on all the same."""
        section = self.evaluation
        assert section is not None, "only a file with [evaluation] plans one"
        rounds = self.rounds_of(number)
        return RoundPlan(
            run=RunId(self.name),
            number=number,
            attempt=1,
            target=section.clients,
            minimum=1,
            over_selection=rounds.over_selection,
            window_s=rounds.window_s if section.window_s is None else section.window_s,
            weighting=Weighting.SAMPLES,
            sample_count_max=self.aggregation.sample_count_max,
            max_abs=self.aggregation.max_abs,
            seed=self.seed,
            task=Task.EVALUATION,
        )

    def share_of(self, task: Task) -> float:
        """How much of a round's steps is asked of each client."""
        return self.canary.share if self.canary is not None and task.tries_clients else 1.0

    def first_plan(self, n_values: int) -> RoundPlan:
        """The plan with which the run begins: the canary's, if there is one. `n_values`: of the model."""
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
        """What it says of masked updates; None where they are not."""
        section = self.secure_aggregation
        return section if section is not None and section.enabled else None

    def numbered_after(
        self, following: RoundPlan, before: RoundPlan, shown: RoundShown, summed: SumShown | None = None
    ) -> RoundPlan:
        """The plan of the round after `before`, with how updates are written there: by what `before` has shown of its
        updates or, where they were masked, of their sum.
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
        """The plan of one attempt at the canary. Of the named sites, as many as it asks are in it."""
        section = self.canary
        assert section is not None, "only a file with [canary] plans one"
        window_s = self.rounds_of(1).window_s if section.window_s is None else section.window_s
        return RoundPlan(
            run=RunId(self.name),
            number=1,
            attempt=attempt,
            target=section.n_asked,
            minimum=section.n_least,
            over_selection=1.0,
            window_s=window_s,
            weighting=Weighting.SAMPLES,
            sample_count_max=self.aggregation.sample_count_max,
            max_abs=self.aggregation.max_abs,
            seed=self.seed,
            coverage=CoverageFloor(sites=self.coverage.sites[: section.n_asked]),
            task=Task.CANARY,
        )

    def _check_canary(self) -> None:
        """Fill in how many a canary asks.

        Raise `ValueError` for one that cannot be planned, or that waits for more clients than round 1 asks.
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
        """Raise `ValueError` for a metric that nobody would measure, or never enough clients."""
        if self.stop is None:
            return
        is_measured = self.evaluation or self.training.evaluate or any(one.evaluate for one in self.override)
        if self.stop.is_of_evaluation and not is_measured:
            raise ValueError(
                f"nothing measures {self.stop.metric}: set evaluate = true in [training], or add [evaluation]"
            )
        n_most = max(self.rounds_of(number).target for number in (1, *self._rounds_of_change()))
        if self.evaluation is not None and self.judges_in is Task.EVALUATION:
            n_most = self.evaluation.clients
        if n_most < self.stop.minimum:
            raise ValueError(
                f"{self.stop.metric} counts where {self.stop.minimum} clients measure it, and only {n_most} are asked: "
                f"ask more, or set minimum = {n_most} in [stop] if none of them would lie"
            )

    def _rounds_of_change(self) -> list[int]:
        """The first round of each stretch for which the same overrides hold, round 1 aside."""
        firsts = {override.first_round for override in self.override}
        nexts = {override.last_round + 1 for override in self.override if override.last_round is not None}
        return sorted(firsts | (nexts - {self.rounds.count + 1}))

    def _check_round(self, number: int) -> None:
        """Raise `ValueError` for overrides that lie beyond the run or add up to a round that cannot be planned."""
        if number > self.rounds.count:
            raise ValueError(f"an override reaches beyond the last round, {self.rounds.count}")
        try:
            self.round_plan(number, 1)
            self.training_plan(number)
        except ValueError as error:
            raise ValueError(f"with its overrides, round {number} cannot be planned: {error}") from error
