"""The run file: what its owner wrote in TOML, checked, with defaults filled in (docs/reference/run-file.md).

Plain dataclasses, so that the server, the command line and the simulator read it with pydantic's `TypeAdapter(RunFile)`
and get the same errors. Below the file are the rules of what cannot go together in it: with an algorithm, with
secure aggregation, with [privacy], and with a member list.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from umbel.aggregation.canonical import later
from umbel.aggregation.codec.section import CodecSection, codec_key, why_not_summable
from umbel.aggregation.codec.step import RoundShown
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.codec import TOTAL_WEIGHT_MAX, Codec
from umbel.aggregation.plans.masks import MINIMUM_LEAST, SumShown
from umbel.aggregation.plans.proximal import LOSS
from umbel.aggregation.plans.round import CoverageFloor, RoundPlan, Task, Weighting
from umbel.aggregation.plans.tensors import ListedKind, TensorRules
from umbel.aggregation.plans.training import GAMMA, PERSONAL, TrainingPlan, TrainingSection
from umbel.aggregation.privacy.accounting import AccountantMissing
from umbel.aggregation.privacy.section import PrivacySection, again, private_numbers
from umbel.aggregation.run.derived_metrics import derived_names
from umbel.aggregation.run.sections import (
    CANARY_CLIENTS,
    OVER_SELECTION,
    OVERRIDES_MAX,
    WAIT_FOR_ALL_S,
    CanarySection,
    DownlinkSection,
    EvaluationSection,
    Override,
    RetentionSection,
    RoundsSection,
)
from umbel.aggregation.run.stopping import StopRule
from umbel.aggregation.secagg.numbers.metric_sums import NAME_BYTES_MAX, is_name_of_table
from umbel.aggregation.secagg.section import SecureAggregationSection, over_selection_max, survivors_needed
from umbel.aggregation.trust.members import MemberList, MembersRefused
from umbel.aggregation.trust.public_keys import short_groups
from umbel.aggregation.types import ALL, COHORT_MAX, RunId, require_slug


@dataclass(frozen=True, slots=True)
class RunFile:
    """A whole run file. Its constructor refuses a file with a round that cannot be planned."""

    name: str
    rounds: RoundsSection
    seed: int = 0
    training: TrainingSection = field(default_factory=TrainingSection)
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
    tensors: Mapping[ListedKind, tuple[str, ...]] = later(factory=dict[ListedKind, tuple[str, ...]])
    base_sha256: str = later("")
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        require_slug(self.name, "name")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must lie between 0 and 2^63 - 1, not {self.seed}")
        if len(self.override) > OVERRIDES_MAX:
            raise ValueError(f"a run file has at most {OVERRIDES_MAX} overrides, not {len(self.override)}")
        if self.codec.name is None:  # only the integer codec works with masks
            codec = replace(self.codec, name="integer" if self.secure else "float32")
            object.__setattr__(self, "codec", codec)
        if self.rounds.over_selection is None:
            asked = min(OVER_SELECTION, over_selection_max(self.rounds.target)) if self.secure else OVER_SELECTION
            object.__setattr__(self, "rounds", replace(self.rounds, over_selection=asked))
        _ = self.tensor_rules  # refuses malformed ones
        self.round_plan(1, 1)
        for number in self.rounds_of_change():
            self._check_round(number)
        if self.evaluation is not None:
            self.evaluation_plan(1)
        self._check_canary()
        self._check_stop()
        for reason in _reasons_of_algorithm(self):
            raise ValueError(reason)
        if self.secure:
            require_compatible(self.secure, self)
        if self.privacy is not None:
            require_private(self.privacy, self)
            with suppress(AccountantMissing):  # the coordinator has the accountant, and refuses an impossible budget
                self.first_plan(1)

    def rounds_of(self, number: int) -> RoundsSection:
        """The section [rounds] for one round, with overrides applied."""
        changes = [override.of(RoundsSection) for override in self.override if override.covers(number)]
        return replace(self.rounds, **{key: value for change in changes for key, value in change.items()})

    def clients_needed(self) -> Iterator[tuple[str, int]]:
        """How many clients any of its rounds needs, by the keys of [rounds] that say so."""
        for number in self.rounds_of_change():
            rounds = self.rounds_of(number)
            if rounds.weighting is Weighting.SAMPLES:  # else the target counts draws
                yield "target", rounds.target
            yield "minimum", rounds.minimum

    def training_plan(self, number: int) -> TrainingPlan:
        """The training plan of one round, with overrides and the schedule of the learning rate applied."""
        section = self.training
        for change in (override.of(TrainingPlan) for override in self.override if override.covers(number)):
            if "local_steps" in change:
                change = {"local_epochs": None, **change}
            elif "local_epochs" in change:
                change = {"local_steps": None, **change}
            section = replace(section, **change)
        return section.plan(number, self.rounds.count, self.rounds_of(number).target)

    def training_of(self, plan: RoundPlan) -> TrainingPlan:
        """The training plan of an attempt: that of its round, with the mu that the rounds before have led to."""
        return self.training_plan(plan.number).with_mu(plan.mu)

    def round_plan(self, number: int, attempt: int) -> RoundPlan:
        """The plan of one attempt at one round, both counted from 1."""
        rounds = self.rounds_of(number)
        return RoundPlan(
            run=RunId(self.name),
            number=number,
            attempt=attempt,
            target=rounds.target,
            minimum=rounds.minimum,
            over_selection=rounds.asked_share,
            window_s=rounds.window_s,
            weighting=rounds.weighting,
            sample_count_max=self.aggregation.sample_count_max,
            max_abs=self.aggregation.max_abs,
            seed=self.seed,
            coverage=self.coverage,
        )

    def evaluates_after(self, number: int) -> bool:
        """Whether an evaluation measures the model after this round."""
        if number == self.rounds.count and self.measures_last:
            return True
        return self.evaluation is not None and number % self.evaluation.every == 0

    @property
    def measures_last(self) -> bool:
        """Whether all clients measure the run's last model, which no training follows: in secure runs that measure the
        others. A private run never does, because metrics would be summed without noise.
        """
        if not self.secure or self.privacy is not None or not (self.secure.evaluation or self.secure.evaluation_counts):
            return False
        return self.evaluation is not None or self.training_plan(self.rounds.count).evaluate

    @property
    def judges_in(self) -> tuple[Task, ...]:
        """The kinds of rounds that measure the metric of early stopping: evaluations, if the run file asks for any."""
        if self.stop is None or not self.stop.is_of_evaluation:
            return (Task.TRAINING,)
        return (Task.EVALUATION,) if self.evaluation is not None else (Task.TRAINING, Task.EVALUATION)

    def evaluation_plan(self, number: int) -> RoundPlan:
        """The plan of the evaluation after one round. It has one attempt, and the run goes on without it."""
        section, rounds = self.evaluation, self.rounds_of(number)
        target = rounds.target if section is None else section.clients
        window_s = None if section is None else section.window_s
        most = over_selection_max(target) if self.secure else rounds.asked_share
        return replace(
            self.round_plan(number, 1),
            target=target,
            over_selection=min(rounds.asked_share, most),
            minimum=min(rounds.minimum, target) if self.secure else 1,  # a sum of few would show one site's metrics
            window_s=rounds.window_s if window_s is None else window_s,
            weighting=Weighting.SAMPLES,
            coverage=CoverageFloor(),
            task=Task.EVALUATION,
        )

    def share_of(self, task: Task) -> float:
        """The share of a round's steps that each client does."""
        return self.canary.share if self.canary is not None and task.tries_clients else 1.0

    def first_plan(self, n_values: int) -> RoundPlan:
        """The run's first plan: the canary's, if there is one. `n_values`: of an update."""
        plan = self.round_plan(1, 1) if self.canary is None else self.canary_plan(1)
        rule, key = self.training.mu_rule, codec_key(self.seed, 1)
        plan = replace(plan, mu=rule.first if rule else None)
        if self.secure and self.privacy:
            step, clip = self.codec.step_asked, self.codec.clip_norm
            codec, secure = private_numbers(self.privacy, step, clip, plan, n_values, self.rounds.count)
            secure = replace(secure, minimum_work=self.secure.work_floor(has_noise=True))
            return replace(plan, codec=replace(codec, key=key), secure=secure)
        if self.secure:
            codec, secure = self.secure.first(self.codec, plan, n_values, key)
            secure = replace(secure, is_normalised=self.training.is_normalised)
            return replace(plan, codec=codec, secure=secure)
        return replace(plan, codec=self.codec.first(n_values, key))

    def server_terms(self, number: int = 1) -> tuple[AggregationSection, TrainingPlan]:
        """What the server's step of round `number` follows from; its optimizer is that of every round."""
        return self.aggregation, self.training_plan(number)

    @property
    def coarsest_step(self) -> float:
        """The greatest step of the grids of its rounds."""
        return max(self.round_plan(number, 1).grid.step for number in self.rounds_of_change())

    @property
    def tensor_rules(self) -> TensorRules | None:
        """What of the model travels; None if the file does not say, so that each tensor's mean does."""
        return TensorRules(self.tensors, self.base_sha256) if self.tensors or self.base_sha256 else None

    @property
    def secure(self) -> SecureAggregationSection | None:
        """The section on masked updates; None if they are not masked."""
        section = self.secure_aggregation
        return section if section is not None and section.enabled else None

    @property
    def wait_for_all_s(self) -> float:
        """How long the first round waits for expected clients, in seconds, once enough clients wait."""
        asked_s = self.rounds.wait_for_all_s
        return (WAIT_FOR_ALL_S if self.secure else 0.0) if asked_s is None else asked_s

    @property
    def members_sha256(self) -> str:
        """The hash of the member list that binds the run's rounds; empty without one."""
        return self.secure.members_sha256 if self.secure else ""

    def numbered_after(
        self, following: RoundPlan, before: RoundPlan, shown: RoundShown, summed: SumShown | None = None
    ) -> RoundPlan:
        """`following`, the plan of the round after `before`, with its codec, its secure plan and its mu.

        They follow from what `before` has shown of its updates (`shown`) or, if they were masked, of their sum
        (`summed`).
        """
        number, rule = before.number + 1, self.training.mu_rule
        key = codec_key(self.seed, number)
        following = replace(following, mu=rule.after(before.mu, shown.loss) if rule and before.mu else None)
        if following.task.follows_its_round and self.secure:  # it hands the training after it the numbers that it needs
            training = self.numbered_after(self.round_plan(number, 1), before, shown, summed)
            return following.numbered_as(training)
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
            raise ValueError(
                f"the canary asks {self.canary.clients} clients, but round 1 asks only {n_asked}; lower canary.clients"
            )
        self.canary_plan(1)

    def _check_stop(self) -> None:
        """Raise `ValueError` for a metric that no client, or never enough clients, would measure."""
        if self.stop is None:
            return
        measures = self.training.evaluate or self.training.evaluate_after
        is_measured = self.evaluation or measures or any(one.evaluate for one in self.override)
        if self.stop.is_of_evaluation and not is_measured:
            raise ValueError(
                f"{self.stop.metric} is never measured: set evaluate = true in [training], or add [evaluation]"
            )
        n_most = max(self.rounds_of(number).target for number in self.rounds_of_change())
        if self.evaluation is not None and self.judges_in == (Task.EVALUATION,):
            n_most = self.evaluation.clients
        if n_most < self.stop.minimum:
            raise ValueError(
                f"{self.stop.metric} counts only if at least {self.stop.minimum} clients measure it, but at most "
                f"{n_most} are asked: ask more, or set minimum = {n_most} in [stop] if you trust each of them"
            )

    def rounds_of_change(self) -> list[int]:
        """The first round of each stretch of rounds to which the same overrides apply."""
        firsts = {override.first_round for override in self.override}
        nexts = {override.last_round + 1 for override in self.override if override.last_round is not None}
        return sorted({1} | firsts | (nexts - {self.rounds.count + 1}))

    def _check_round(self, number: int) -> None:
        """Raise `ValueError` for overrides beyond the run, or overrides that make a round impossible to plan."""
        if number > self.rounds.count:
            raise ValueError(
                f"an override names a round after the last one, which is {self.rounds.count}: change the override, or "
                "rounds.count"
            )
        try:
            self.round_plan(number, 1)
            self.training_plan(number)
        except ValueError as error:
            raise ValueError(f"with its overrides, round {number} cannot be planned: {error}") from error


# --- what cannot go together ------------------------------------------------------------------------------------------


class AnotherList(MembersRefused):
    """A list that is not the run's; `str(error)` has the line that the run file needs for it."""


def require_named(file: RunFile, members: MemberList) -> None:
    """Raise `AnotherList` unless this is the list that the run file names."""
    if (named := file.members_sha256) == members.sha256:
        return
    given, line = members.words, f'members_sha256 = "{members.sha256}"'
    if not file.secure:
        raise AnotherList(
            f"a member list needs secure aggregation, which this run file does not use: to use {given}, write "
            f"{line} into a section [secure_aggregation]; otherwise give no list"
        )
    if not named:
        raise AnotherList(
            f"the run file names no member list; to use {given}, write {line} into its section [secure_aggregation]"
        )
    raise AnotherList(
        f"the run file names another member list ({short_groups(named)}), not {given}: give the list that it names, or "
        f"write {line} into its section [secure_aggregation]"
    )


def _reasons_of_algorithm(file: RunFile) -> Iterator[str]:
    training, has_fixed_mu = file.training, any(one.proximal_mu is not None for one in file.override)
    if file.secure and not file.privacy:
        floor = file.secure.work_floor(has_noise=False)
        whys = (file.training_plan(number).why_not_masked(floor) for number in file.rounds_of_change())
        yield from filter(None, whys)
    if training.has_control and file.codec.first(1, 0).parameters.get("mode") == "structured":
        yield (
            'algorithm = "scaffold" makes control variates of whole gradients, but a codec with mode = "structured" '
            'trains only a part of each: set mode = "sketched", or take another codec'
        )
    if training.adaptive_mu and has_fixed_mu:
        yield (
            "an override sets proximal_mu, but adaptive_mu = true computes it from the training loss: leave one of "
            "them out"
        )
    if training.remembers_drift and has_fixed_mu:
        yield (
            'an override sets proximal_mu, but what clients keep under algorithm = "feddyn" belongs to one mu: leave '
            "proximal_mu out of the override"
        )
    if training.q and any(file.rounds_of(number).minimum < 3 for number in file.rounds_of_change()):
        yield (
            'with algorithm = "qfedavg" the length of a step follows from what clients claim, and the median of '
            "fewer than three claims bounds nothing: set minimum = 3 or more in [rounds]"
        )
    if file.rounds.weighting is Weighting.PROPORTIONAL and training.total_samples is not None:
        yield (
            'with weighting = "proportional" a client counts by how often it is drawn, but under algorithm = '
            f'"{training.algorithm}" its work must count alike in every round: set weighting = "samples"'
        )
    section = file.aggregation
    if training.remembers_drift and not (section.optimizer == "sgd" and section.is_plain):
        yield (
            'algorithm = "feddyn" has a server step of its own: leave optimizer, server_learning_rate and schedule '
            "out of [aggregation]"
        )


def require_compatible(section: SecureAggregationSection, file: RunFile) -> None:
    """Raise `ValueError`, with the reason and a remedy, for a run file that masked updates do not allow."""
    _require_codec(file.codec)
    for reason in _secure_reasons(section, file):
        raise ValueError(reason)
    for number in file.rounds_of_change():
        for reason in _reasons_of_round(file, number):
            raise ValueError(reason if number == 1 else f"with its overrides, round {number}: {reason}")


def _require_codec(section: CodecSection) -> None:
    plan = section.first(1, 0)
    if plan.codec is Codec.INTEGER:
        if section.name == "auto":
            raise ValueError(
                'name = "auto" chooses its step from the compressed size of updates, but masked updates cannot be '
                'compressed: for secure aggregation, set name = "integer" and a step in [codec]'
            )
        return
    if why := why_not_summable(plan):
        raise ValueError(
            f"{section.name} does not work with secure aggregation: {why}; in [codec] set "
            'name = "integer", or leave name out'
        )
    raise ValueError(
        f"secure aggregation adds up only updates of the integer codec, not of {section.name}: "
        'set name = "integer" in [codec], or leave name out'
    )


def _secure_reasons(section: SecureAggregationSection, file: RunFile) -> Iterator[str]:
    if file.canary is not None:
        yield "a canary looks at single updates, and secure aggregation hides them: leave [canary] out"
    if file.rounds.weighting is Weighting.PROPORTIONAL:
        yield (
            "with proportional weighting, the coordinator tells how often each client was drawn. In a secure round, "
            "clients cannot check this number, so the coordinator could give one client all the weight: "
            'set weighting = "samples" in [rounds] for secure aggregation'
        )
    if file.training.evaluate_after and not section.has_room_for_personal:
        yield (
            "evaluate_after = true has no effect, because a masked sum has room only for listed metrics: "
            f'add "{PERSONAL}loss", for example, to evaluation in [secure_aggregation], or a name to evaluation_counts'
        )
    if file.training.inexactness and file.privacy is None and section.metrics != ALL and GAMMA not in section.metrics:
        yield (
            "inexactness = true has no effect, because a masked sum has room only for listed metrics: "
            f'add "{GAMMA}" to `metrics` in [secure_aggregation]'
        )
    if file.training.adaptive_mu and file.privacy is None and section.metrics != ALL and LOSS not in section.metrics:
        yield (
            "adaptive_mu = true compares the training loss of rounds, but the masked sum does not have it: add "
            f'"{LOSS}" to `metrics` in [secure_aggregation], or leave adaptive_mu out'
        )
    if file.training.fair_terms is not None:
        yield (
            'algorithm = "qfedavg" weighs each client by the loss that it reports, and masks hide each client\'s '
            "report: choose another algorithm in [training], or leave [secure_aggregation] out"
        )
    if file.retention.updates != "none":
        yield (
            "a masked update is useless after its round, so it is not kept: set updates = "
            '"none" in [retention] for secure aggregation'
        )
    if file.retention.per_site_metrics:
        yield (
            "secure aggregation hides each client's metrics, so records cannot keep them: leave per_site_metrics out "
            "of [retention]"
        )
    if file.coverage.samples:
        yield (
            "`samples` in [coverage] needs each client's sample count, but secure aggregation hides it: leave "
            "`samples` out of [coverage], and name sites or tiers instead"
        )
    if file.rounds.self_tuning:
        yield (
            "self-tuning asks up to three times as many clients as the target. But secure aggregation needs reports "
            "from more than two thirds of the asked clients, which can be more than the target: set self_tuning = false"
        )
    if section.expected_sample_count > file.aggregation.sample_count_max:
        yield (
            f"expected_sample_count = {section.expected_sample_count} is above sample_count_max = "
            f"{file.aggregation.sample_count_max}: lower expected_sample_count in [secure_aggregation], or raise "
            "sample_count_max in [aggregation]"
        )
    yield from _reasons_of_stop(section, file)
    yield from _reasons_of_evaluation(section, file)


def _reasons_of_stop(section: SecureAggregationSection, file: RunFile) -> Iterator[str]:
    if file.stop is None:
        return
    name = file.stop.metric.partition(".")[2]
    where, names, counts = "metrics", section.metrics, section.counts
    if file.stop.is_of_evaluation:
        where, names, counts = "evaluation", section.evaluation, section.evaluation_counts
    if names == ALL and name not in derived_names(counts) and not is_name_of_table(name):
        yield (
            f'secure aggregation does not add up {file.stop.metric}: with {where} = "all", a name must be 1 to '
            f"{NAME_BYTES_MAX} letters, digits, '_', '.', '/' or '-'. Shorten the name in the sites' code, or list it "
            f"in `{where}` of [secure_aggregation]"
        )
    elif names != ALL and name not in names and name not in derived_names(counts):
        yield (
            f"secure aggregation does not add up {file.stop.metric}: add {name!r} to `{where}` in [secure_aggregation]"
            ", or the counts that it follows from (docs/how-to/measure-sensitivity-and-auc.md)"
        )
    if file.stop.minimum >= MINIMUM_LEAST:
        yield (
            f"minimum = {file.stop.minimum} in [stop] protects {file.stop.metric} against a false value of one client. "
            "This protection needs each client's value, but secure aggregation hides it: leave [stop] out, or set "
            "minimum = 1 in [stop] if you trust each client not to end the run"
        )


def _reasons_of_evaluation(section: SecureAggregationSection, file: RunFile) -> Iterator[str]:
    if file.evaluation is None:
        return
    if not (section.evaluation or section.evaluation_counts):
        yield (
            "an evaluation under masks adds up only listed metrics, and the run file lists none: name them in "
            "`evaluation` or `evaluation_counts` of [secure_aggregation], or leave [evaluation] out"
        )
    if file.evaluation.clients < MINIMUM_LEAST:
        yield (
            f"a sum over {counted(file.evaluation.clients, 'client')} hides no client's metrics: set clients = "
            f"{MINIMUM_LEAST} or more in [evaluation] for secure aggregation"
        )
    for number in file.rounds_of_change():
        plan = file.evaluation_plan(number)
        masked = replace(plan, minimum=min(file.rounds_of(number).minimum, plan.target))
        for reason in _reasons_of_plan(masked):
            yield f"[evaluation]: {reason}"


def _reasons_of_round(file: RunFile, number: int) -> Iterator[str]:
    yield from _reasons_of_plan(file.round_plan(number, 1))


def _reasons_of_plan(plan: RoundPlan) -> Iterator[str]:
    if plan.minimum < MINIMUM_LEAST:
        yield (
            f"a sum over {counted(plan.minimum, 'client')} hides no update: set minimum = "
            f"{MINIMUM_LEAST} or more in [rounds] for secure aggregation"
        )
    if plan.n_wanted > COHORT_MAX:
        yield f"a secure round asks at most {COHORT_MAX} clients, not {plan.n_wanted}: lower target or over_selection"
    if (needed := survivors_needed(plan.n_wanted)) > plan.target:
        yield (
            f"secure aggregation needs {needed} of the {plan.n_wanted} clients that are asked, more than the target of "
            f"{plan.target}: set over_selection = {over_selection_max(plan.target):g} or less"
        )
    if plan.n_wanted * plan.sample_count_max > TOTAL_WEIGHT_MAX:
        yield (
            f"{plan.n_wanted} clients with up to {plan.sample_count_max} samples each could have more than 2^38 "
            "samples together, which is the most that a masked sum can hold: lower sample_count_max or target"
        )


def require_private(section: PrivacySection, file: RunFile) -> None:
    """Raise `ValueError`, with the reason and a remedy, for a run file that private rounds do not allow."""
    for reason in _private_reasons(section, file):
        raise ValueError(reason)


def _private_reasons(section: PrivacySection, file: RunFile) -> Iterator[str]:
    if not file.secure:
        yield (
            "[privacy] needs masked updates, because noise protects a client only in a masked sum: "
            "add [secure_aggregation]"
        )
        return
    section.clip(file.codec.clip_norm)
    if file.training.is_normalised:
        yield (
            'algorithm = "fednova" adds up how many steps each client has done, which a private run does not say: '
            "choose another algorithm in [training]"
        )
    if file.training.has_control:
        yield (
            'algorithm = "scaffold" sends a second vector, whose noise would move every later step of each client: '
            "choose another algorithm in [training]"
        )
    if file.training.adaptive_mu:
        yield (
            "adaptive_mu = true compares the training loss of rounds, which a private run does not say: set "
            "proximal_mu, and leave adaptive_mu out"
        )
    if ALL in (file.secure.metrics, file.secure.evaluation):
        yield (
            "metrics would be summed without noise: leave `metrics` and `evaluation` out of [secure_aggregation], and "
            "measure the models of a private run on data that no client holds"
        )
    if file.secure.counts or file.secure.evaluation_counts:
        yield (
            "counts would be summed without noise: leave `counts` and `evaluation_counts` out of [secure_aggregation], "
            "and measure the models of a private run on data that no client holds"
        )
    measures = file.training.evaluate or file.training.evaluate_after or any(one.evaluate for one in file.override)
    if measures or file.stop is not None or file.evaluation is not None:
        yield (
            "metrics would be summed without noise: leave out [stop], [evaluation], `evaluate` and `evaluate_after`, "
            "and measure the models of a private run on data that no client holds"
        )
    if file.training.inexactness:
        yield "metrics would be summed without noise: leave `inexactness` out of [training]"
    if any(one.target or one.minimum or one.over_selection for one in file.override):
        yield (
            "the noise is planned for one cohort size: leave `target`, `minimum` and `over_selection` out of the "
            "overrides"
        )
