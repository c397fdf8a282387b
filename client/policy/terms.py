"""What a secure round asks of a site, as its policy limits it: the clients of its sum, the cost in privacy, and what
of its work is sent. Pure.

Sites use it before the first message (`site.py`), and so does the simulator, which has no keys and no messages.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from umbel.aggregation.plans.masks import NoisePlan, SecurePlan
from umbel.aggregation.privacy.accounting import AccountantMissing, Ledger
from umbel.aggregation.privacy.section import release_of
from umbel.aggregation.secagg.numbers.contribution import LocalWork
from umbel.aggregation.secagg.parameters import parameters_for, roster_min
from umbel.client.errors import AttemptRefused, WorkRefused
from umbel.client.policy.policy import SecureTerms, SitePolicy


@dataclass(frozen=True, slots=True)
class Costs:
    """What private rounds have cost a site, with the round in question. None where nothing needs it."""

    of_run: Ledger | None = None
    of_all_runs: Ledger | None = None


def ledger_with(spent: Ledger, noise: NoisePlan) -> Ledger:
    """The cost of a run's private rounds, with one of this noise. `spent`: before it."""
    return spent.after(release_of(noise))


def secure_terms(
    policy: SitePolicy, plan: SecurePlan, names: Collection[str], n_invited: int, n_values: int, costs: Costs
) -> SecureTerms:
    """The terms of a round among the clients `names`, of `n_invited` that were asked. `n_values`: of the model.

    Raises `AttemptRefused` for too few clients, whatever the policy says, and `WorkRefused` if a cost is unknown.
    """
    if len(names) < 2:
        raise AttemptRefused("only one client takes part, so the sum would reveal its update")
    if len(names) < roster_min(n_invited):
        raise AttemptRefused(
            f"only {len(names)} of {n_invited} invited clients take part, and a secure round needs at least "
            f"{roster_min(n_invited)}"
        )
    parameters = parameters_for(len(names), n_invited=n_invited)
    return SecureTerms(
        cohort=names,
        minimum=plan.minimum,
        threshold=parameters.t,
        n_holders=parameters.k + 1,
        n_parameters=n_values,
        colluders=plan.noise.colluders if plan.noise else None,
        epsilon=_epsilon(costs.of_run, policy.epsilon),
        epsilon_total=_epsilon(costs.of_all_runs, policy.epsilon_total),
    )


def _epsilon(ledger: Ledger | None, budget: float | None) -> float | None:
    """The cost in epsilon; None without noise or without a budget."""
    if ledger is None or budget is None:
        return None
    try:
        return ledger.epsilon_within(budget)
    except AccountantMissing as error:
        raise WorkRefused(
            f"the cost of this round for this site's privacy budget cannot be computed: {error}"
        ) from error


def as_sent(policy: SitePolicy, work: LocalWork) -> LocalWork:
    """What a masked sum counts of this work: at most `weight_max` samples, and metrics only if they may be sent."""
    count = policy.samples_that_count
    evaluation_count = count(work.evaluation_sample_count)
    counted_work = replace(
        work,
        sample_count=count(work.sample_count),
        evaluation_sample_count=evaluation_count,
        weights={name: count(weight) for name, weight in work.weights.items()},
        evaluation_weights={name: count(weight) for name, weight in work.evaluation_weights.items()},
    )
    if policy.share_metrics:
        return counted_work
    return replace(
        counted_work,
        metrics={},
        evaluation={},
        counts={},
        evaluation_counts={},
        weights={},
        evaluation_weights={},
    )
