"""What a site allows, whatever its coordinator asks: its own policy, a TOML file that no server can change.

The limits here are floors and ceilings of this site. What a coordinator asks is held against them, never the other way
round; what goes beyond is refused before anything is trained or sent (`policy_file.py` reads the file).

```toml
secure_aggregation = "required"
members = "pilot.json"                 # beside this file
members_sha256 = "7F3A 91C2 ..."       # of the list that officers have confirmed
minimum_cohort = 5
```
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from umbel.aggregation.phrases import agreeing, counted
from umbel.aggregation.plans.noise import NoisePlan
from umbel.aggregation.privacy.section import DELTA_MAX, DELTA_MIN
from umbel.aggregation.secagg.numbers.work_floor import require_floor, usual_floor
from umbel.aggregation.trust.fingerprint import members_sha256_of
from umbel.aggregation.trust.members import COHORT_MIN, MemberList
from umbel.aggregation.types import SAMPLE_COUNT_MAX, TARGET_MAX, require_slug, require_within
from umbel.client.errors import AttemptRefused, BudgetSpent, WorkRefused
from umbel.client.wire.destinations import LinkHost, LinkLevel, LinkRules

_ANOTHER_MODEL = (
    "a run from another starting model (umbel model init gives the same model each time; pass another --seed)"
)
EPOCH_MAX = 1 << 53
PARAMETERS_MAX = 1 << 53
EPSILON_MAX = 1e6
RUNS_MAX = 1000
LINK_HOSTS_MAX = 100
_TERMS_MAY_TELL = (
    "terms (the [training], clip_norm, max_abs, sample_count_max, expected_sample_count or minimum_work), so "
    "subtracting the two sums could reveal one site's update"
)
_NAMED_MAX = 3  # a sentence that names more clients has no room for what to do
_DENOMINATOR_MAX = 1000  # 0.6667 means two thirds


@dataclass(frozen=True, slots=True)
class SecureTerms:
    """What a coordinator asks of a round with secure aggregation, as far as a policy minds it.

    `cohort`: who is invited; `minimum`: the fewest clients whose sum is opened; `threshold`: how many of the
    `n_holders` of a client's shares open them (all clients of the cohort, in a complete graph); `n_parameters`: values
    of the model. `epsilon`: what the run has spent of this site's privacy, this round included; `epsilon_total`: what
    all runs have; each None without noise, or where the policy does not ask for it.
    `colluders`: how many of the clients its noise counts on as adding none; None without noise.
    """

    cohort: Collection[str]
    minimum: int
    threshold: int
    n_holders: int
    n_parameters: int
    epsilon: float | None = None
    colluders: int | None = None
    epsilon_total: float | None = None


@dataclass(frozen=True, slots=True)
class SitePolicy:
    """A site's own limits. Without a file, these defaults hold. Raises `ValueError` for what makes no sense.

    `secure_aggregation`: "required" refuses every round without it; "allowed" takes both kinds; None is the first where
    `members` names a list, else the second. `members`, `members_sha256`, `members_epoch`: the file with the
    consortium's member list, the hash of the list that this site trusts to begin with, and the oldest epoch that it
    takes. `minimum_cohort`: the fewest clients whose sum may be opened. `threshold_share`: more than this share of the
    holders must be needed to open anything: t >= floor(share * n) + 1; two thirds stand against a coordinator that lies
    and colludes with fewer than a third of the clients (Bonawitz et al. 2017, section 6.2). The threshold is worked out
    from the number of clients, about two thirds of them, so a higher share refuses cohorts of most sizes.
    `max_parameters`: values of the largest model. `retrain_after_release`: whether a second update, which is always
    trained anew, may be given for a round, or a model, of which shares were revealed already. `epsilon`: how much of
    its privacy this site spends on one run, at `delta`; `epsilon_total`: on all runs of all coordinators that this
    state directory is for. With either, a run without noise is refused. `colluders`: how many clients the noise of a
    private round must count on, at least, as adding none. `allowed_runs`: by name; empty for all. `share_sample_count`:
    whether the coordinator may be told in clear how many samples there are here. `cohort_change`: what to do about two
    rounds of one run whose clients differ by fewer than `minimum_cohort`; None is "refuse" where `members` names a
    list, but for private rounds whose cost is counted, else "warn". Over one and the same model more than that is
    asked, and less refused always (`check_same_model`). `terms_change`: the same of two rounds of one run whose clients
    differ by as few, or by none, under different terms (`sum_terms.py`). `links`: to which hosts that are not in
    `link_hosts` the coordinator may send this site for a model (`destinations.py`). `minimum_work`: the least share of
    the planned steps of an update that is sent in a secure round, where the run's own is not greater; None for all of
    them, or one step where the site relies on noise (`relies_on`). `weight_max`: how many samples this site counts at
    most in a masked sum, which a site with many more than the others would be nearly all of. `share_metrics`: whether
    what this site measures may be in a masked sum, or told in clear.
    """

    secure_aggregation: Literal["required", "allowed"] | None = None
    members: Path | None = None
    members_sha256: str = ""
    members_epoch: int = 1
    minimum_cohort: int = COHORT_MIN
    threshold_share: float = 2 / 3
    max_parameters: int | None = None
    retrain_after_release: bool = True
    epsilon: float | None = None
    epsilon_total: float | None = None
    delta: float = 1e-6
    colluders: int = 1
    allowed_runs: tuple[str, ...] = ()
    share_sample_count: bool = True
    cohort_change: Literal["warn", "refuse"] | None = None
    links: LinkLevel = "public"
    link_hosts: tuple[str, ...] = ()
    minimum_work: float | None = None
    weight_max: int | None = None
    terms_change: Literal["warn", "refuse"] | None = None
    share_metrics: bool = True
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a limit that would not hold

    def __post_init__(self) -> None:
        require_within(self.members_epoch, "members_epoch", 1, EPOCH_MAX)
        require_within(self.minimum_cohort, "minimum_cohort", COHORT_MIN, TARGET_MAX)
        if not 0.5 <= self.threshold_share < 1:  # also refuses a NaN
            raise ValueError(f"threshold_share must be at least 0.5 and below 1, not {self.threshold_share!r:.40}")
        if self.max_parameters is not None:
            require_within(self.max_parameters, "max_parameters", 1, PARAMETERS_MAX)
        for name in ("epsilon", "epsilon_total"):
            if (budget := getattr(self, name)) is not None:
                require_within(budget, name, 1e-6, EPSILON_MAX)
        require_within(self.delta, "delta", DELTA_MIN, DELTA_MAX)
        require_within(self.colluders, "colluders", 0, TARGET_MAX)
        if self.minimum_work is not None:
            require_floor(self.minimum_work, "minimum_work")
        if self.weight_max is not None:
            require_within(self.weight_max, "weight_max", 1, SAMPLE_COUNT_MAX)
        if len(self.allowed_runs) > RUNS_MAX:
            raise ValueError(f"allowed_runs names {len(self.allowed_runs)} runs, at most {RUNS_MAX} can be named")
        for run in self.allowed_runs:
            require_slug(run, "a run of allowed_runs")
        if len(self.link_hosts) > LINK_HOSTS_MAX:
            raise ValueError(f"link_hosts names {len(self.link_hosts)} hosts, at most {LINK_HOSTS_MAX} can be named")
        _ = self.link_rules  # raises for what is no host
        self._check_members()

    def _check_members(self) -> None:
        if self.members == Path():
            raise ValueError('members must name a file, such as members = "pilot.json"')
        if self.members_sha256:
            object.__setattr__(self, "members_sha256", members_sha256_of(self.members_sha256))
        if self.members is None and (self.members_sha256 or self.members_epoch > 1):
            raise ValueError('members_sha256 and members_epoch need a member list: set members = "FILE"')
        if self.members is None and self.secure_aggregation == "required":
            raise ValueError('secure_aggregation = "required" needs the member list: members = "FILE"')

    def relies_on(self, noise: NoisePlan | None) -> bool:
        """Whether this noise covers what the site sends: there is some, and a budget of the site bounds what its rounds
        cost. The coordinator chooses how much noise there is; without a budget that may be next to none.
        """
        return bool(noise) and (self.epsilon, self.epsilon_total) != (None, None)

    @property
    def requires_secure_rounds(self) -> bool:
        """Whoever pins a member list wants no round without it, unless the policy says "allowed" in so many words."""
        return (self.secure_aggregation or ("allowed" if self.members is None else "required")) == "required"

    @property
    def link_rules(self) -> LinkRules:
        """Where the coordinator may send this site for a model."""
        return LinkRules(self.links, frozenset(map(LinkHost.parse, self.link_hosts)))

    @property
    def tells_count(self) -> bool:
        """Whether the coordinator may be told in clear how much data there is: not where rounds must be secure."""
        return self.share_sample_count and not self.requires_secure_rounds

    def work_floor(self, of_run: float, noise: NoisePlan | None) -> float:
        """The least share of its planned steps that this site must have done to send a masked update: the run's floor
        or its own, whichever is greater. `noise`: of the round.
        """
        own = usual_floor(has_noise=self.relies_on(noise)) if self.minimum_work is None else self.minimum_work
        return max(of_run, own)

    def samples_that_count(self, n_samples: int) -> int:
        """How many of so many samples count in a masked sum."""
        return n_samples if self.weight_max is None else min(n_samples, self.weight_max)

    @property
    def refuses_cohort_change(self) -> bool:
        """Whoever pins a member list lets no site's update be had by subtraction, unless the policy says "warn"."""
        return (self.cohort_change or ("warn" if self.members is None else "refuse")) == "refuse"

    @property
    def refuses_terms_change(self) -> bool:
        """As `refuses_cohort_change`, of the terms."""
        return (self.terms_change or ("warn" if self.members is None else "refuse")) == "refuse"

    def threshold_least(self, n_holders: int) -> int:
        """The least threshold that this site takes part under: floor(share * n) + 1, exact for two thirds of any n."""
        return math.floor(Fraction(self.threshold_share).limit_denominator(_DENOMINATOR_MAX) * n_holders) + 1

    def check_run(self, run: str) -> None:
        """Raise `WorkRefused` for a run that is not allowed here."""
        if self.allowed_runs and run not in self.allowed_runs:
            raise WorkRefused(f"this site's policy does not allow run {run[:63]!r}; add it to allowed_runs")

    def check_members(self, members: MemberList) -> None:
        """Raise `WorkRefused` for a list that is older than this site takes."""
        if members.epoch < self.members_epoch:
            raise WorkRefused(
                f"member list {members.name!r} is at epoch {members.epoch}, and this site's policy (members_epoch) "
                f"requires {self.members_epoch} or later: ask an officer for the newest list"
            )

    def check_plain_round(self, n_parameters: int) -> None:
        """Raise `WorkRefused` unless a round without secure aggregation, and without noise, is allowed."""
        if self.requires_secure_rounds:
            raise WorkRefused(
                "this site's policy requires secure aggregation, and this round would show the coordinator the update"
            )
        if not self.share_sample_count:
            raise WorkRefused(
                "this site's policy (share_sample_count = false) forbids sending its sample count, and a report of a "
                "round without secure aggregation contains it"
            )
        if not self.share_metrics:
            raise WorkRefused(
                "this site's policy (share_metrics = false) forbids sending its metrics, and a report of a round "
                "without secure aggregation contains them"
            )
        self._check_size(n_parameters)
        self._check_budgets(None)

    def check_secure_round(self, terms: SecureTerms) -> None:
        """Raise `WorkRefused`, with the reason to give the coordinator, unless this round is within the limits, and
        there is a member list to hold its cohort against; `AttemptRefused` where it hangs on who is in the cohort.
        """
        if self.members is None:
            raise WorkRefused(
                "a round with secure aggregation needs the consortium's member list, because the coordinator could "
                'otherwise make up the other clients: set members = "FILE" in the policy'
            )
        self.check_secure_limits(terms)

    def check_secure_limits(self, terms: SecureTerms) -> None:
        """The same but for the list: for a site that has no policy at all, and so believes its coordinator."""
        self._check_minimum(terms.minimum)  # what is the run's comes first: no other cohort would mend it
        self._check_size(terms.n_parameters)
        self._check_budgets(terms)
        self._check_colluders(terms.colluders)
        self._check_cohort(terms)

    def check_second_update(self, round_: int, run: str = "") -> None:
        """Raise `AttemptRefused` unless another update may be given for what shares were revealed of in `round_`.

        `run`: whose round it is, if not this one's.
        """
        if not self.retrain_after_release:
            where = f"round {round_} of run {run!r}" if run else f"round {round_}"
            raise AttemptRefused(
                f"this client has already revealed shares for {where}, and this site's policy "
                f"(retrain_after_release = false) allows no second update. It can take part in {_ANOTHER_MODEL}"
            )

    def check_same_model(self, before: Collection[str], now: Collection[str], n_invited: int, earlier: str) -> None:
        """Raise `AttemptRefused` for a sum over the very model of one before it, of which shares were revealed, if the
        clients of the two differ by any, but by so few that, with those who may work for the coordinator taken off, the
        difference would be of fewer than `minimum_cohort`. These are a third of `n_invited`, the greater of the two
        cohorts (`parameters.py`). `earlier`: of which round and run that one was, in words.
        """
        if changed := _few_changed(before, now, self._with_colluders(n_invited)):
            raise AttemptRefused(
                f"this site already revealed shares of a sum over the same model, in {earlier}. "
                f"{_near('The clients of the two sums', changed)}. Ask the same clients again, or use {_ANOTHER_MODEL}"
            )

    def cohort_change_between(self, before: Collection[str], now: Collection[str], earlier: str) -> str | None:
        """What is to be said of two sums over these clients; None if they may both be opened without a word.

        `earlier`: which round the sum before was of, in words.
        """
        if changed := _few_changed(before, now, self.minimum_cohort):
            return _near(f"the clients of this sum and of {earlier}", changed)
        return None

    def check_cohort_change(self, before: Collection[str], now: Collection[str], earlier: str) -> str | None:
        """The same. Raises `AttemptRefused` instead, where the policy says so."""
        found = self.cohort_change_between(before, now, earlier)
        if found is not None and self.refuses_cohort_change:
            raise AttemptRefused(
                'this site\'s policy (cohort_change, by default "refuse" with a member list) does not allow this '
                f"round: {found}. Ask the same clients in every round (target and minimum = their number, "
                "over_selection = 1.0), or add noise ([privacy]) with epsilon and without cohort_change in the "
                'policies, or set cohort_change = "warn" in the policies of sites that accept the risk'
            )
        return found

    def check_terms_change(
        self, before: Collection[str], now: Collection[str], n_invited: int, earlier: str
    ) -> str | None:
        """What is to be said of two sums under different terms; None where so many of their clients differ as
        `check_same_model` asks. Raises `AttemptRefused` instead, where the policy says so. `earlier`: which round the
        sum before was of, in words.
        """
        if not _is_near(before, now, self._with_colluders(n_invited)):
            return None
        found = f"nearly the same clients are asked as in {earlier}, under other {_TERMS_MAY_TELL}"
        if self.refuses_terms_change:
            raise AttemptRefused(
                'this site\'s policy (terms_change, by default "refuse" with a member list) does not allow this '
                f"round: {found}. Keep them for the whole run (no [[override]] of [training]), or add noise "
                "([privacy]) with epsilon and without terms_change in the policies, or set terms_change = "
                '"warn" in the policies of sites that accept the risk'
            )
        return found

    def _with_colluders(self, n_invited: int) -> int:
        """By how many clients two sums must differ, so that the difference is a sum still when a third of those invited
        work for the coordinator and take off what they sent.
        """
        return self.minimum_cohort + n_invited // 3

    def _check_minimum(self, minimum: int) -> None:
        if minimum < self.minimum_cohort:
            raise WorkRefused(
                f"{self._requires_more_than(minimum)}: the run file's minimum must be {self.minimum_cohort} or more"
            )

    def _check_cohort(self, terms: SecureTerms) -> None:
        n_clients = len(set(terms.cohort))
        if n_clients < self.minimum_cohort:
            raise AttemptRefused(
                f"{self._requires_more_than(n_clients)}: at least {self.minimum_cohort} clients must take part"
            )
        least = self.threshold_least(terms.n_holders)
        if not least <= terms.threshold <= terms.n_holders:
            raise AttemptRefused(
                f"this site's policy (threshold_share = {self.threshold_share:.4g}) requires a threshold of at least "
                f"{least} of {terms.n_holders} clients, and this round's is {terms.threshold}. The threshold follows "
                "from the number of clients, so a cohort of another size may fit; if none does, lower threshold_share"
            )

    def _requires_more_than(self, n_clients: int) -> str:
        return (
            f"this site's policy (minimum_cohort = {self.minimum_cohort}) requires a sum of at least "
            f"{self.minimum_cohort} clients, and this round could unmask a sum of {n_clients}"
        )

    def _check_size(self, n_parameters: int) -> None:
        if self.max_parameters is not None and n_parameters > self.max_parameters:
            raise WorkRefused(
                f"this site's policy (max_parameters = {self.max_parameters}) allows at most {self.max_parameters} "
                f"parameters, and this model has {n_parameters}: raise max_parameters in the policy if the site is to "
                "take part"
            )

    def _check_budgets(self, terms: SecureTerms | None) -> None:
        """`asked`: None for a round without secure aggregation, and so without noise."""
        spent = (None, None) if terms is None else (terms.epsilon, terms.epsilon_total)
        _check_budget("epsilon", self.epsilon, spent[0], "the run")
        _check_budget("epsilon_total", self.epsilon_total, spent[1], "all runs together")

    def _check_colluders(self, colluders: int | None) -> None:
        if colluders is not None and colluders < self.colluders:
            raise WorkRefused(
                f"this site's policy (colluders = {self.colluders}) requires noise that holds against "
                f"{counted(self.colluders, 'colluding client')}, and this round's noise holds against {colluders}: "
                f"the run file must set privacy.colluders to {self.colluders} or more"
            )


def _check_budget(key: str, budget: float | None, epsilon: float | None, of: str) -> None:
    if budget is None:
        return
    if epsilon is None:
        raise WorkRefused(
            f"this site's policy has a privacy budget ({key}), and this round adds no noise: the run file needs "
            "[privacy]"
        )
    if not epsilon <= budget:  # also refuses a NaN
        raise BudgetSpent(
            f"this round would bring this site's privacy cost for {of} to epsilon {epsilon:g}, and its budget "
            f"({key}) is {budget:g}",
            public_reason="this site's budget of privacy has no room for this round; its own log has the numbers",
        )


def _near(two: str, changed: Sequence[str]) -> str:
    """Why `two` sums that differ by these clients must not both be opened."""
    sender = agreeing(len(changed), changed[0], "they")
    n_others = len(changed) - _NAMED_MAX
    names = ", ".join(changed[:_NAMED_MAX]) + (f" and {counted(n_others, 'other')}" if n_others > 0 else "")
    return f"{two} differ only by {names}, so subtracting the two sums would nearly reveal what {sender} sent"


def _few_changed(before: Collection[str], now: Collection[str], least: int) -> list[str]:
    """By whom two sums differ, if that is fewer than `least`; else nobody."""
    return sorted(set(before) ^ set(now)) if _is_near(before, now, least) else []


def _is_near(before: Collection[str], now: Collection[str], least: int) -> bool:
    """Whether two sums differ by fewer clients than this."""
    return len(set(before) ^ set(now)) < least
