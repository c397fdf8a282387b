"""Who is asked in a canary: few clients, as different from each other as they can be, and the same ones every time."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.types import ClientId


def spread(
    candidates: Sequence[Candidate], n_wanted: int, required: Collection[ClientId] = ()
) -> Mapping[ClientId, int]:
    """At most `n_wanted` clients, one draw each, in the order of names: those `required`, then of each tier in turn, by
    turns the one with the most and the one with the fewest samples that is left of it.

    The tier of the largest client comes first, and that client; the second tier begins with its smallest, and so
    on. The same candidates, in any order, give the same answer. Each candidate appears once; at most `n_wanted` are
    required.
    """
    chosen = [client for client in sorted(required) if client in {one.client for one in candidates}]
    tiers = _tiers([one for one in candidates if one.client not in required])
    turns = deque((tier, index % 2 == 0) for index, tier in enumerate(tiers))
    while turns and len(chosen) < n_wanted:
        tier, takes_largest = turns.popleft()
        chosen.append(tier.pop() if takes_largest else tier.popleft())
        if tier:
            turns.append((tier, not takes_largest))
    return dict.fromkeys(sorted(chosen), 1)


def _tiers(candidates: Sequence[Candidate]) -> list[deque[ClientId]]:
    """Each tier's clients from the smallest to the largest; the tier of the largest client first."""
    by_tier: dict[str, deque[ClientId]] = {}
    for one in sorted(candidates, key=lambda one: (one.sample_count, one.client)):
        by_tier.setdefault(one.tier, deque()).append(one.client)
    size = {one.client: (one.sample_count, one.client) for one in candidates}
    return sorted(by_tier.values(), key=lambda tier: size[tier[-1]], reverse=True)
