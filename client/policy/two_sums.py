"""Rules for two sums with the same site in them: their difference must not reveal one site's update.

docs/decisions/0017-sums-that-could-be-subtracted.md has the rules and their reasons.
"""

from collections.abc import Collection, Sequence

from umbel.aggregation.phrases import agreeing, counted
from umbel.client.errors import AttemptRefused
from umbel.client.policy.policy import ANOTHER_MODEL, SitePolicy

_TERMS_MAY_TELL = (
    "terms (the [training], clip_norm, max_abs, sample_count_max, expected_sample_count or minimum_work), so "
    "subtracting the two sums could reveal one site's update"
)
_NAMED_MAX = 3  # a sentence with more names has no room for what to do


def check_same_model(
    policy: SitePolicy, before: Collection[str], now: Collection[str], n_invited: int, earlier: str
) -> None:
    """Raise `AttemptRefused` if two sums over one model differ by some clients, but by too few.

    Args:
        policy: the site's.
        before: the clients of a sum that this site revealed shares of.
        now: the clients of the new sum.
        n_invited: the size of the larger of the two cohorts; a third of it may work for the coordinator.
        earlier: the earlier round and run, in words.
    """
    if changed := _changed_if_few(before, now, _with_colluders(policy, n_invited)):
        raise AttemptRefused(
            f"this site already revealed shares of a sum over the same model, in {earlier}. "
            f"{_differ('The clients of the two sums', changed)}. Ask the same clients again, or use {ANOTHER_MODEL}"
        )


def cohort_change_between(
    policy: SitePolicy, before: Collection[str], now: Collection[str], earlier: str
) -> str | None:
    """Say why two sums over these clients are too close; None if they are not. `earlier`: the earlier round."""
    if changed := _changed_if_few(before, now, policy.minimum_cohort):
        return _differ(f"the clients of this sum and of {earlier}", changed)
    return None


def check_cohort_change(policy: SitePolicy, before: Collection[str], now: Collection[str], earlier: str) -> str | None:
    """As `cohort_change_between`, but raise `AttemptRefused` if the policy refuses such sums."""
    found = cohort_change_between(policy, before, now, earlier)
    if found is not None and policy.refuses_cohort_change:
        raise AttemptRefused(
            'this site\'s policy (cohort_change, by default "refuse" with a member list) does not allow this '
            f"round: {found}. The run file can ask the same clients in every round (target and minimum = their number, "
            "over_selection = 1.0). Or it can add noise ([privacy]). Then each site's policy must set epsilon, without "
            'cohort_change. Or sites that accept the risk can set cohort_change = "warn" in their policies'
        )
    return found


def check_terms_change(
    policy: SitePolicy, before: Collection[str], now: Collection[str], n_invited: int, earlier: str
) -> str | None:
    """Say that two sums under different terms have nearly the same clients; None if enough clients differ.

    Raises `AttemptRefused` if the policy refuses such sums. `n_invited`, `earlier`: as in `check_same_model`.
    """
    if not _is_near(before, now, _with_colluders(policy, n_invited)):
        return None
    found = f"it asks nearly the same clients as {earlier}, but under other {_TERMS_MAY_TELL}"
    if policy.refuses_terms_change:
        raise AttemptRefused(
            'this site\'s policy (terms_change, by default "refuse" with a member list) does not allow this '
            f"round: {found}. The run file can keep these terms for the whole run (no [[override]] of [training]). Or "
            "it can add noise ([privacy]). Then each site's policy must set epsilon, without terms_change. Or "
            'sites that accept the risk can set terms_change = "warn" in their policies'
        )
    return found


def _with_colluders(policy: SitePolicy, n_invited: int) -> int:
    """The least difference of two sums that hides a site even if a third of the invited clients collude."""
    return policy.minimum_cohort + n_invited // 3


def _differ(two: str, changed: Sequence[str]) -> str:
    sender = agreeing(len(changed), changed[0], "they")
    n_others = len(changed) - _NAMED_MAX
    names = ", ".join(changed[:_NAMED_MAX]) + (f" and {counted(n_others, 'other')}" if n_others > 0 else "")
    return f"{two} differ only by {names}, so subtracting the two sums would nearly reveal what {sender} sent"


def _changed_if_few(before: Collection[str], now: Collection[str], least: int) -> list[str]:
    """The clients that two sums differ by, if these are fewer than `least`; else none."""
    return sorted(set(before) ^ set(now)) if _is_near(before, now, least) else []


def _is_near(before: Collection[str], now: Collection[str], least: int) -> bool:
    return len(set(before) ^ set(now)) < least
