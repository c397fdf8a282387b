"""Whether the site takes part in a run: by its policy, by a person's decision, and by whether it has code for it. Pure.

The policy comes first: no person overrides what it refuses. A person's `deny` comes before what the policy allows. If
the coordinator then lists another run under the denied name, a person is asked about it, also if the policy allows it:
otherwise the coordinator could undo a denial.
"""

from dataclasses import dataclass
from enum import StrEnum

from umbel.aggregation.messages import OpenRun
from umbel.client.agent.decisions import SiteDecision
from umbel.client.agent.site_commands import SiteCommands
from umbel.client.errors import WorkRefused
from umbel.client.policy.policy import RunRule, SitePolicy


class Stand(StrEnum):
    """How a site stands to a run that is open to it."""

    ASKED = "waiting for a person"
    ALLOWED = "allowed"
    DENIED = "denied"
    REFUSED = "refused"
    NO_APP = "no code"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason`: for the site, with what to do. `public_reason`: for the coordinator. Empty if nothing is in the way."""

    stand: Stand
    reason: str = ""
    public_reason: str = ""

    may_change: bool = False  # whether the site may take part soon: a person may decide, or there may be room


def verdict(
    run: OpenRun,
    policy: SitePolicy | None,
    *,
    is_of_members: bool,
    decision: SiteDecision | None,
    app: str | None,
    commands: SiteCommands,
) -> Verdict:
    """`policy`: None if the site has no file. `is_of_members`: the run is bound to the list that the site trusts.
    `decision`: the last about this name.
    """
    try:
        _require_possible(run, policy, is_of_members=is_of_members)
    except WorkRefused as error:
        return Verdict(Stand.REFUSED, str(error), error.public_reason)
    policy = policy or SitePolicy()
    own = decision if decision is not None and decision.identity == run.identity else None
    if own is not None and not own.is_allowed:
        again = commands.text("allow", run.name)
        how = f"a person at this site denied it; to take part: {again}"
        return Verdict(Stand.DENIED, how, "a person at the site denied it")
    was_denied = decision is not None and not decision.is_allowed
    if own is None and (was_denied or policy.run_rule(run.name, is_of_members=is_of_members) is not RunRule.ALLOW):
        return Verdict(Stand.ASKED, _question(run, decision, commands), undecided(run), may_change=True)
    if app is None:
        return Verdict(
            Stand.NO_APP,
            f"no --app of this agent names it; start the agent with --app '{run.name}=MODULE:NAME' as well",
            "the site has no code for this run",
        )
    return Verdict(Stand.ALLOWED)


def undecided(run: OpenRun) -> str:
    """What the coordinator sees of a run that waits for a person."""
    return f"a person at the site must decide: umbel site allow {run.name}"


def _require_possible(run: OpenRun, policy: SitePolicy | None, *, is_of_members: bool) -> None:
    """Raise `WorkRefused` if the site's policy would refuse every round of the run."""
    if policy is None:
        return
    policy.check_run(run.name)
    if run.is_secure:
        policy.check_secure_run(run.minimum, run.n_values, is_of_members=is_of_members)
    else:
        policy.check_plain_round(run.n_values)


def _question(run: OpenRun, decision: SiteDecision | None, commands: SiteCommands) -> str:
    how = f"{commands.text('allow', run.name)}, or {commands.text('deny', run.name)}"
    if decision is None:
        return f"decide: {how}"
    before = "allowed" if decision.is_allowed else "denied"
    if decision.is_outdated:
        return (
            f"a person at this site {before} a run of this name before decisions covered the fewest clients of a sum "
            f"and the noise; decide again: {how}"
        )
    changed = (
        "the coordinator now lists one with another run file, first model, member list or fewest clients, or with "
        "other masking or noise"
    )
    return f"a person at this site {before} another run of this name, and {changed}; decide again: {how}"
