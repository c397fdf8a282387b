"""The `[sites]` section of an experiment's file: the policies of the simulated sites, and what each of them declines.

```toml
[sites]
policy = "site.toml"                                   # one policy for every client
# policy = ["lyon.toml", "", "bern.toml", "graz.toml"] # one for each client by number; "": this site has none
```

The limits are those of the SDK (`client/policy/`), in its words. Member lists, keys and links are not checked, because
a simulation has none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, cast

import numpy as np
from pydantic import BeforeValidator

from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.masks import NoisePlan, SecurePlan
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.privacy.accounting import Ledger
from umbel.aggregation.secagg.numbers.contribution import LocalWork
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.types import ClientId, client_number
from umbel.client.errors import AttemptRefused, WorkRefused
from umbel.client.policy.earlier_sums import not_signed
from umbel.client.policy.policy import SitePolicy, read_policy
from umbel.client.policy.terms import Costs, as_sent, ledger_with, secure_terms
from umbel.client.wire.offers import SecureInvitation
from umbel.sim.federation.site_sums import PlayedSum, checks_of
from umbel.sim.fleet.fates import Fates

UNCHECKED = ("members_sha256", "members_epoch", "links", "link_hosts")
"""Keys of a policy that have no effect in a simulation. Of `members`, only whether a list is named counts."""
_NO_POLICY = SitePolicy()
_PATH_CHARACTERS_MAX = 4096


def _files(given: object) -> object:
    """A text, or a tuple of texts. Raises `ValueError` with a sentence for anything else."""
    names = tuple(cast(list[object], given)) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(name, str) for name in names):
        raise ValueError('it must be a file, such as "site.toml", or a list with one for each client, "" for none')
    return given if isinstance(given, str) else names


@dataclass(frozen=True, slots=True)
class SitesSection:
    """What the sites allow; the module explains the key."""

    policy: Annotated[str | tuple[str, ...], BeforeValidator(_files)]
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if not any(self.files):
            raise ValueError(
                'policy must name a policy file, such as policy = "site.toml", or one for each client by number; '
                "without a policy, leave [sites] out"
            )
        if longest := [name for name in self.files if len(name) > _PATH_CHARACTERS_MAX]:
            raise ValueError(f"a path in policy has {len(longest[0])} characters; the limit is {_PATH_CHARACTERS_MAX}")

    @property
    def files(self) -> tuple[str, ...]:
        """Of every client in one entry, or of each client by number; empty: no policy."""
        return (self.policy,) if isinstance(self.policy, str) else self.policy


@dataclass(slots=True)
class SiteMemory:
    """What sites with a policy keep from round to round."""

    spent: dict[ClientId, Ledger] = field(default_factory=dict[ClientId, Ledger])  # of sites with a privacy budget
    sums: list[PlayedSum] = field(default_factory=list[PlayedSum])  # the secure rounds so far


@dataclass(frozen=True, slots=True)
class SitePolicies:
    """The policies of all sites. `every`: of each client that has no entry in `each`; None: it has none."""

    every: SitePolicy | None = None
    each: Mapping[int, SitePolicy | None] = field(default_factory=dict[int, SitePolicy | None])

    @classmethod
    def read(cls, section: SitesSection | None, folder: Path, n_clients: int) -> "SitePolicies":
        """The policies of a section. `folder`: for relative paths. Raises `ValueError` and `OSError`."""
        if section is None:
            return cls()
        files = section.files
        found = {name: _read(folder / name) for name in dict.fromkeys(files) if name}
        if isinstance(section.policy, str):
            return cls(found[section.policy])
        if len(files) != n_clients:
            raise ValueError(
                f"sites.policy has {counted(len(files), 'entry', 'entries')}, and the experiment has "
                f'{counted(n_clients, "client")}: give one for each client by number ("" for a site without a '
                "policy), or one file for all"
            )
        return cls(None, {number: found.get(name) for number, name in enumerate(files)})

    def of(self, client: ClientId) -> SitePolicy | None:
        """The policy of this site; None if it has none."""
        return self.each.get(client_number(client), self.every) if self.each else self.every

    def __bool__(self) -> bool:
        return any(True for _ in self._all())

    def _all(self) -> Iterator[SitePolicy]:
        """Each policy once for each client that has its own, without those that have none."""
        return (one for one in (self.every, *self.each.values()) if one is not None)

    @property
    def unchecked_words(self) -> str:
        """Which keys of the policies a simulation does not check, in a sentence; empty if none is set."""
        set_ = [key for key in UNCHECKED if any(getattr(one, key) != getattr(_NO_POLICY, key) for one in self._all())]
        if not set_:
            return ""
        return (
            f"a simulation does not check these keys of the sites' policies: {', '.join(set_)}, because simulated "
            "clients have no listed keys and follow no links"
        )

    def work_floor(self, client: ClientId, secure: SecurePlan) -> float:
        """The least share of the planned steps of a masked update. A client without a policy has only the run's."""
        policy = self.of(client)
        return secure.minimum_work if policy is None else policy.work_floor(secure.minimum_work, secure.noise)

    def relies_on(self, client: ClientId, noise: NoisePlan | None) -> bool:
        """Whether this noise covers what the client sends. One without a policy counts as one that has a budget."""
        policy = self.of(client)
        return noise is not None if policy is None else policy.relies_on(noise)

    def as_sent(self, client: ClientId, work: LocalWork) -> LocalWork:
        """What a masked sum counts of this client's work."""
        policy = self.of(client)
        return work if policy is None else as_sent(policy, work)

    def in_attempt(
        self,
        plan: RoundPlan,
        cohort: Sequence[ClientId],
        n_values: int,
        before: SiteMemory,
        invitation: SecureInvitation | None = None,
    ) -> "SitesInAttempt":
        """What the sites decline in an attempt with this cohort. `n_values`: of the model. `before`: what sites
        remember. `invitation`: of a secure round.
        """
        if not self:
            return NO_POLICIES
        known, refused, after = dict[tuple[SitePolicy, Ledger | None], str](), dict[ClientId, str](), dict(before.spent)
        for client in cohort:
            if (policy := self.of(client)) is None:
                continue
            key = policy, _with_this(policy, plan, before.spent.get(client))
            if key not in known:
                known[key] = _refusal(policy, plan, cohort, len(cohort), n_values, key[1])
            if why := known[key] or _refused_sum(client, policy, before.sums, invitation):
                refused[client] = why
            elif key[1] is not None:
                after[client] = key[1]
        return SitesInAttempt(self, plan, n_values, refused, SiteMemory(after, before.sums), invitation)


@dataclass(frozen=True, slots=True)
class SitesInAttempt:
    """What the sites decline in one attempt. `plan`, `n_values`: of the round and the model; None where no site has a
    policy. `refused`: the clients that decline when they hear of it. `memory`: `spent` is with this attempt, `sums` are
    before it. `invitation`: of a secure round.
    """

    policies: SitePolicies = field(default_factory=SitePolicies)
    plan: RoundPlan | None = None
    n_values: int = 0
    refused: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])
    memory: SiteMemory = field(default_factory=SiteMemory)
    invitation: SecureInvitation | None = None

    def refusal(self, client: ClientId, phase: Phase, clients: Sequence[ClientId]) -> str:
        """Why this client declines instead of its message in this phase; empty if it sends it. `clients`: those that
        the phase is about.
        """
        if phase is Phase.ADVERTISE_KEYS:
            return self.refused.get(client, "")
        if self.plan is None or self.invitation is None or (policy := self.policies.of(client)) is None:
            return ""
        if phase is Phase.SHARE_KEYS:
            n_invited, ledger = len(self.invitation.context.cohort), self.memory.spent.get(client)
            return _refusal(policy, self.plan, clients, n_invited, self.n_values, ledger)
        if phase is not Phase.CONSISTENCY_CHECK:
            return ""
        try:
            checks_of(client, policy, self.memory.sums, self.invitation).check_sum(self.invitation, clients)
        except AttemptRefused as error:
            return not_signed(error).public_reason
        return ""

    def fates_of(self, cohort: Sequence[ClientId], fates: Fates) -> Fates:
        """The fates of a cohort in which clients that decline fetch and train nothing. `fates`: without policies."""
        return fates.declining(np.array([name in self.refused for name in cohort])) if self.refused else fates

    def charged(self, cohort: Sequence[ClientId], fates: Fates) -> dict[ClientId, Ledger]:
        """What the clients that begin this attempt have spent with it, whether or not a sum is made."""
        hears = zip(cohort, fates.hears.tolist(), strict=True)
        spent = self.memory.spent
        return {one: spent[one] for one, does in hears if does and one in spent and one not in self.refused}


NO_POLICIES = SitesInAttempt()


def _read(path: Path) -> SitePolicy:
    try:
        return read_policy(path)
    except FileNotFoundError as error:
        raise ValueError(f"sites.policy names {path}, and there is no such file") from error


def _has_budget(policy: SitePolicy) -> bool:
    return (policy.epsilon, policy.epsilon_total) != (None, None)


def _with_this(policy: SitePolicy, plan: RoundPlan, spent: Ledger | None) -> Ledger | None:
    """What a site has spent, with this attempt; None without noise or without a budget."""
    if plan.noise is None or not _has_budget(policy):
        return None
    return _after(spent or Ledger(policy.delta), plan.noise)


@lru_cache(maxsize=1024)
def _after(spent: Ledger, noise: NoisePlan) -> Ledger:
    """Sites with the same past share one ledger."""
    return ledger_with(spent, noise)


def _refusal(
    policy: SitePolicy,
    plan: RoundPlan,
    clients: Sequence[ClientId],
    n_invited: int,
    n_values: int,
    ledger: Ledger | None,
) -> str:
    """Why a site with this policy declines an attempt among these clients; empty if it takes part.

    `ledger`: with this attempt. In a simulation it is that of all runs, too.
    """
    try:
        policy.check_run(plan.run)
        if plan.secure is None:
            policy.check_plain_round(n_values)
        else:
            costs = Costs(ledger, ledger)
            policy.check_secure_round(secure_terms(policy, plan.secure, clients, n_invited, n_values, costs))
    except WorkRefused as error:
        return error.public_reason
    return ""


def _refused_sum(
    client: ClientId, policy: SitePolicy, before: Sequence[PlayedSum], invitation: SecureInvitation | None
) -> str:
    """Why a site declines a secure round for the sums that it was in; empty if it takes part. A secure run has no plain
    rounds after its first secure one.
    """
    if invitation is None:
        return ""
    try:
        checks_of(client, policy, before, invitation).check_invitation(invitation)
    except WorkRefused as error:
        return error.public_reason
    return ""
