"""What a site allows, whatever its coordinator asks: limits in a TOML file that no server can change.

A round beyond a limit is refused before anything is trained or sent.

```toml
secure_aggregation = "required"
members = "pilot.json"                 # beside this file
members_sha256 = "7F3A 91C2 ..."       # the list that officers have confirmed
minimum_cohort = 5
```
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.masks import NoisePlan
from umbel.aggregation.privacy.section import DELTA_MAX, DELTA_MIN
from umbel.aggregation.secagg.numbers.plan import require_floor, usual_floor
from umbel.aggregation.trust.members import COHORT_MIN, MemberList
from umbel.aggregation.trust.public_keys import members_sha256_of
from umbel.aggregation.types import SAMPLE_COUNT_MAX, TARGET_MAX, require_within
from umbel.client.errors import AttemptRefused, BudgetSpent, WorkRefused
from umbel.client.policy.run_names import is_named_by, require_run_pattern
from umbel.client.toml_file import close_to, read_toml
from umbel.client.wire.destinations import LinkHost, LinkLevel, LinkRules

ANOTHER_MODEL = (
    "a run from another starting model (umbel model init gives the same model each time; pass another --seed)"
)
FILE_BYTES_MAX = 1 << 16
EPOCH_MAX = 1 << 53
PARAMETERS_MAX = 1 << 53
EPSILON_MAX = 1e6
RUNS_MAX = 1000
LINK_HOSTS_MAX = 100
_DENOMINATOR_MAX = 1000  # 0.6667 means two thirds


@dataclass(frozen=True, slots=True)
class SecureTerms:
    """What a round with secure aggregation asks, as far as a policy limits it."""

    cohort: Collection[str]
    minimum: int  # the fewest clients whose sum is unmasked
    threshold: int  # how many holders of a client's shares can recover its secrets
    n_holders: int  # holders of each client's shares: all clients of the cohort, in a complete graph
    n_parameters: int  # values of the model
    epsilon: float | None = None  # the run's cost for this site, with this round; None: no noise, or no budget for it
    colluders: int | None = None  # clients whose noise the round does not count on; None without noise
    epsilon_total: float | None = None  # as `epsilon`, for all runs together


class RunRule(StrEnum):
    """What an agent does about a run: take part, ask a person at the site first, or never take part."""

    ALLOW = "allow"
    ASK = "ask"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class SitePolicy:
    """A site's own limits; these defaults hold without a file. Raises `ValueError` for limits that make no sense."""

    secure_aggregation: Literal["required", "allowed"] | None = None
    """"required" refuses every round without it. Default: "required" if `members` names a list, else "allowed"."""
    members: Path | None = None
    """The file with the consortium's member list."""
    members_sha256: str = ""
    """The hash of the list that this site trusts at first."""
    members_epoch: int = 1
    """The oldest epoch of the list that this site accepts."""
    minimum_cohort: int = COHORT_MIN
    """The fewest clients whose sum may be unmasked."""
    threshold_share: float = 2 / 3
    """The least threshold for n holders of shares is floor(share * n) + 1. Two thirds protect against a coordinator
    that lies and colludes with fewer than a third of the clients (Bonawitz et al. 2017, section 6.2). The threshold
    follows from the number of clients, at about two thirds, so a higher share refuses most cohorts."""
    max_parameters: int | None = None
    """Values of the largest model."""
    retrain_after_release: bool = True
    """Whether this site may send a second update, trained anew, for a round or model that it revealed shares of."""
    epsilon: float | None = None
    """The privacy budget of one run, at `delta`. With any budget, a run without noise is refused."""
    epsilon_total: float | None = None
    """The privacy budget of all runs of all coordinators in this state directory."""
    delta: float = 1e-6
    colluders: int = 1
    """The least number of clients that the noise of a private round must not count on."""
    allowed_runs: tuple[str, ...] = ()
    """Names, or patterns such as `heart-*`. Other runs are treated as `other_runs` says."""
    share_sample_count: bool = True
    """Whether the coordinator may see the number of samples."""
    cohort_change: Literal["warn", "refuse"] | None = None
    """What to do about two rounds of a run whose clients differ by fewer than `minimum_cohort`. Default: "refuse" if
    `members` names a list, else "warn"; private rounds with a budget are allowed. `two_sums.py` has this rule and the
    next, and a stricter one for sums over one model."""
    links: LinkLevel = "public"
    """Which hosts outside `link_hosts` the coordinator may refer this site to for a model (`destinations.py`)."""
    link_hosts: tuple[str, ...] = ()
    minimum_work: float | None = None
    """The least share of the planned steps that a masked update must have, if the run asks less. Default: all steps, or
    one step where the site relies on noise."""
    weight_max: int | None = None
    """The most samples that this site counts as in a masked sum. A site with most of the samples would be most of the
    sum."""
    terms_change: Literal["warn", "refuse"] | None = None
    """The same as `cohort_change` for two rounds under different terms whose clients differ by few, or by none."""
    share_metrics: bool = True
    """Whether this site's metrics may be sent, masked or in clear."""
    denied_runs: tuple[str, ...] = ()
    """As `allowed_runs`, for runs that this site never takes part in."""
    other_runs: Literal["refuse", "ask", "members"] | None = None
    """Runs that neither of the two names: "refuse" them; "ask" a person at the site; or "members": take part in those
    that are bound to this site's member list, and ask about the rest. `umbel join`, which a person starts, asks nobody.
    Default: "refuse" if `allowed_runs` names any, else "ask"."""
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key would be a limit that does not hold

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
        for key in ("allowed_runs", "denied_runs"):
            _require_runs(getattr(self, key), key)
        if len(self.link_hosts) > LINK_HOSTS_MAX:
            raise ValueError(f"link_hosts names {len(self.link_hosts)} hosts; the limit is {LINK_HOSTS_MAX}")
        _ = self.link_rules  # raises for an entry that is no host
        self._check_members()

    def _check_members(self) -> None:
        if self.members == Path():
            raise ValueError('members must name a file, such as members = "pilot.json"')
        if self.members_sha256:
            object.__setattr__(self, "members_sha256", members_sha256_of(self.members_sha256))
        if self.members is None and (self.members_sha256 or self.members_epoch > 1):
            raise ValueError('members_sha256 and members_epoch need a member list: set members = "FILE"')
        if self.members is None and self.other_runs == "members":
            raise ValueError('other_runs = "members" needs the member list: members = "FILE"')
        if self.members is None and self.secure_aggregation == "required":
            raise ValueError('secure_aggregation = "required" needs the member list: members = "FILE"')

    def relies_on(self, noise: NoisePlan | None) -> bool:
        """Whether this noise covers what the site sends. The coordinator chooses the noise, so there must also be a
        budget of the site, which bounds the cost.
        """
        return bool(noise) and (self.epsilon, self.epsilon_total) != (None, None)

    @property
    def requires_secure_rounds(self) -> bool:
        return (self.secure_aggregation or ("allowed" if self.members is None else "required")) == "required"

    @property
    def link_rules(self) -> LinkRules:
        return LinkRules(self.links, frozenset(map(LinkHost.parse, self.link_hosts)))

    @property
    def tells_count(self) -> bool:
        """Whether the coordinator may see the number of samples: never if rounds must be secure."""
        return self.share_sample_count and not self.requires_secure_rounds

    def work_floor(self, of_run: float, noise: NoisePlan | None) -> float:
        """The least share of the planned steps in a masked update: the greater of the run's and the site's."""
        own = usual_floor(has_noise=self.relies_on(noise)) if self.minimum_work is None else self.minimum_work
        return max(of_run, own)

    def samples_that_count(self, n_samples: int) -> int:
        return n_samples if self.weight_max is None else min(n_samples, self.weight_max)

    @property
    def refuses_cohort_change(self) -> bool:
        return (self.cohort_change or ("warn" if self.members is None else "refuse")) == "refuse"

    @property
    def refuses_terms_change(self) -> bool:
        return (self.terms_change or ("warn" if self.members is None else "refuse")) == "refuse"

    def threshold_least(self, n_holders: int) -> int:
        """The least threshold that this site accepts: floor(share * n) + 1, exact for two thirds of any n."""
        return math.floor(Fraction(self.threshold_share).limit_denominator(_DENOMINATOR_MAX) * n_holders) + 1

    def check_run(self, run: str) -> None:
        """Raise `WorkRefused` if this site may not take part in the run, even if a person at the site confirms it."""
        if is_named_by(self.denied_runs, run):
            raise WorkRefused(
                f"this site's policy denies run {run[:63]!r} (denied_runs); to take part, change denied_runs"
            )
        if self.run_rule(run) is RunRule.REFUSE:
            raise WorkRefused(
                f"this site's policy does not allow run {run[:63]!r}; to take part, add it to allowed_runs"
            )

    def run_rule(self, run: str, *, is_of_members: bool = False) -> "RunRule":
        """What an agent does about a run. `is_of_members`: it is bound to the member list that this site trusts."""
        if is_named_by(self.denied_runs, run):
            return RunRule.REFUSE
        if is_named_by(self.allowed_runs, run):
            return RunRule.ALLOW
        match self.rule_for_other_runs:
            case "refuse":
                return RunRule.REFUSE
            case "members" if is_of_members:
                return RunRule.ALLOW
            case _:
                return RunRule.ASK

    @property
    def rule_for_other_runs(self) -> Literal["refuse", "ask", "members"]:
        """`other_runs`, or its default."""
        return self.other_runs or ("refuse" if self.allowed_runs else "ask")

    def check_members(self, members: MemberList) -> None:
        """Raise `WorkRefused` for a list that is older than this site accepts."""
        if members.epoch < self.members_epoch:
            raise WorkRefused(
                f"member list {members.name!r} is at epoch {members.epoch}, and this site's policy (members_epoch) "
                f"requires {self.members_epoch} or later: ask an officer for the newest list"
            )

    def check_plain_round(self, n_parameters: int) -> None:
        """Raise `WorkRefused` unless a round without secure aggregation, and without noise, is allowed."""
        if self.requires_secure_rounds:
            raise WorkRefused(
                "this site's policy requires secure aggregation, and this round would show the coordinator the update: "
                "the run file needs [secure_aggregation]"
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

    def check_secure_run(self, minimum: int, n_parameters: int, *, is_of_members: bool) -> None:
        """Raise `WorkRefused` for a run with secure aggregation of which no round can be within the limits.

        `minimum`: the fewest clients of its sums; `is_of_members`: it is bound to the list that this site trusts.
        """
        self._require_list()
        if not is_of_members:
            raise WorkRefused(
                "this run is not bound to the newest member list that this site trusts, so this site would decline all "
                "of its rounds: ask the operator to name this list in the run file (members_sha256), or ask an officer "
                "which list is the newest"
            )
        self._check_minimum(minimum)
        self._check_size(n_parameters)

    def _require_list(self) -> None:
        if self.members is None:
            raise WorkRefused(
                "a round with secure aggregation needs the consortium's member list, because the coordinator could "
                'otherwise make up the other clients: set members = "FILE" in the policy'
            )

    def check_secure_round(self, terms: SecureTerms) -> None:
        """Check a secure round against the limits. It needs a member list to check the cohort against.

        Raises `WorkRefused`, or `AttemptRefused` if another cohort could be within the limits.
        """
        self._require_list()
        self.check_secure_limits(terms)

    def check_secure_limits(self, terms: SecureTerms) -> None:
        """The same without the list: a site without a policy believes its coordinator about the cohort."""
        self._check_minimum(terms.minimum)  # limits of the run come first: no other cohort would help
        self._check_size(terms.n_parameters)
        self._check_budgets(terms)
        self._check_colluders(terms.colluders)
        self._check_cohort(terms)

    def check_second_update(self, round_: int, run: str = "") -> None:
        """Raise `AttemptRefused` unless a second update is allowed for what this site revealed shares of in `round_`.

        `run`: the run of that round, if it is another.
        """
        if not self.retrain_after_release:
            where = f"round {round_} of run {run!r}" if run else f"round {round_}"
            raise AttemptRefused(
                f"this client has already revealed shares for {where}, and this site's policy "
                f"(retrain_after_release = false) allows no second update. It can take part in {ANOTHER_MODEL}"
            )

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
        """`terms`: None for a round without secure aggregation, which has no noise."""
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


def _require_runs(patterns: Sequence[str], key: str) -> None:
    if len(patterns) > RUNS_MAX:
        raise ValueError(f"{key} names {len(patterns)} runs; the limit is {RUNS_MAX}")
    for pattern in patterns:
        require_run_pattern(pattern, f"a run of {key}")


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
            public_reason="this site's privacy budget does not allow this round; the site's log has the numbers",
        )


_POLICY = TypeAdapter(SitePolicy)
_KEYS = [field.name for field in fields(SitePolicy)]


def read_policy(path: Path) -> SitePolicy:
    """Read a policy file. The member list's path counts from its folder. Raises `OSError`, or `ValueError` with a
    sentence that names the file.
    """
    _, policy = read_toml(path, _POLICY, FILE_BYTES_MAX, "policy", _hint)
    return policy if policy.members is None else replace(policy, members=path.parent / policy.members.expanduser())


def _hint(_section: str, key: str) -> str:
    return close_to(key, _KEYS) or f"; the known keys are {', '.join(_KEYS)}"
