r"""How clients are drawn and weighted, and what the mean then estimates.

Objective. N clients, client i with n_i samples and update x_i, n = sum n_i. A round should move the model by

    X = sum_i (n_i / n) x_i.

**samples** (McMahan et al. 2017, Algorithm 1): a cohort S drawn uniformly without replacement, mean weighted by counts,

    A = sum_{i in S} n_i x_i / sum_{i in S} n_i.

With every client equally likely to be in S (probability q), E[sum_S n_i x_i] = q n X and E[D] = q n, D = sum_S n_i:
numerator and denominator are unbiased, so A is a ratio estimator. It is exact when all n_i are equal or S is the whole
population; otherwise (Hartley and Ross 1954; Cochran, Sampling Techniques, sections 6.8 and 6.15)

    E[A] - X  =  - Cov(A, D) / E[D]
              ~  - (1 - K/N) / (K m^2 (N - 1)) * sum_i n_i^2 (x_i - X)        for |S| = K, m = n / N,

so large clients count a little too little, by O(1/K), and not at all once cohorts are large. Dividing by the constant
q n instead would be exactly unbiased (Horvitz-Thompson) at the price of a step whose length varies with the luck of the
draw; FedAvg does not do so, and neither do we.

**proportional** (Li et al. 2020, Algorithms 1 and 2): K independent draws with replacement, client i with probability
n_i / n, plain mean over draws: E[x of one draw] = X, so the mean is unbiased for every K. A client drawn m times trains
once and counts m times: its weight is m.

Over-selection and drop-outs. Let whether a client reports not depend on what it holds.

- samples: a uniform sample of a uniform sample is uniform, so both statements above hold with K the number of reports,
  whichever of them are missing and however many were asked.
- proportional, when each *draw* is answered or lost on its own: the answered draws are still independent draws from
  n_i / n, so the mean stays unbiased. A fleet so large that hardly anybody is drawn twice comes close to this.
- proportional, when a client drawn m times is lost with all its m draws, each client being reachable (set R) with
  probability r: given R, the mean is unbiased for the reachable clients, X_R = sum_R n_i x_i / n_R, and the average
  over R is a ratio estimator again. With M draws and p_i = n_i / n,

      E[A] - X  =  Cov(X_R, g(p_R)) / E[g(p_R)],  g(p) = 1 - (1 - p)^M,
                ~  - (1 - r)/r * sum_i p_i^2 (x_i - X)  for many draws,   and 0 for one.

  It shrinks with the fleet (sum_i p_i^2 is 1/N if all are alike), not with the cohort.
- proportional, drawn again: a draw that falls on fewer clients than the round's minimum is drawn anew (`cohort.py`), so
  a client with nearly all the data counts too little. With few draws on few clients that is the price of the minimum.
- proportional, closing early: the report that reaches the target counts with all its draws, so the often-drawn count a
  little too much; the fewer clients are drawn twice, the less.

Where a bias remains, whatever the weighting:
- the *waiting* clients are not a uniform sample of the fleet (time zones, charging);
- closing at the target prefers fast clients, so slow ones, often those with the most data, count too little;
- clients that report less often the more they hold count too little, which over-selection does not correct;
- partial work: an update after fewer steps is a shorter move in the client's direction, weighted as if it were whole;
- a coverage floor: a named site is in every cohort, an unnamed client of N in a share q < 1 of them, and neither is
  weighted by the inverse of that. Under `samples` the expectation is then (to the same order) the mean weighted by
  n_i pi_i with pi_i = 1 for the named and q for the others: the named count 1/q times too much, unless all waiting
  clients are asked. Under `proportional` a named site that the draws missed takes the place of the last draw, so its
  expected draws rise from K p_i to K p_i + (1 - p_i)^K: small beside K p_i for a site with much data, much for one with
  little. A named tier does the same to a client drawn evenly from it, where no other client of it was drawn. Holding a
  round open for a floor, in turn, takes away some of the preference for the fast;
- a second attempt draws clients that failed the first one last, so clients that fail often count less.
The round's record lists the clients that were left out, with reasons, so that these biases can be seen.
"""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.types import ClientId


@dataclass(frozen=True, slots=True)
class Candidate:
    """A client that waits for work."""

    client: ClientId
    sample_count: int
    tier: str = ""  # as its token binds it


def draw(
    weighting: Weighting,
    candidates: Sequence[Candidate],
    n_draws: int,
    seed: int,
    *,
    required: Collection[ClientId] = (),
    last: Collection[ClientId] = (),
) -> Mapping[ClientId, int]:
    """Draw a cohort: client -> how many draws fell on it, in the order of names.

    `samples`: min(n_draws, all) distinct clients, one draw each; `proportional`: exactly `n_draws` draws. The same seed
    and candidates, in any order, give the same cohort, in any language: the randomness is SHA-256. The draws of a
    smaller cohort are the first of a larger one's. Each candidate appears once and holds at least one sample.
    `required`: candidates that must be in it, at most `n_draws`; `last`: drawn only if there are too few others.
    """
    match weighting:
        case Weighting.SAMPLES:
            drawn = _lots([candidate.client for candidate in candidates], seed)
            if required or last:
                drawn.sort(key=lambda client: (client not in required, client in last))
            return dict.fromkeys(sorted(drawn[:n_draws]), 1)
        case Weighting.PROPORTIONAL:
            ordered = sorted(candidates, key=lambda candidate: candidate.client)
            others = [candidate for candidate in ordered if candidate.client not in last]
            drawn = _tickets(others if len(others) >= n_draws else ordered, n_draws, seed)
            return dict(sorted(Counter(_with_required(drawn, sorted(required))).items()))


def _lots(clients: Sequence[ClientId], seed: int) -> list[ClientId]:
    """The clients in a random order."""
    return sorted(clients, key=lambda client: _digest(seed, client))


def _tickets(ordered: Sequence[Candidate], n_draws: int, seed: int) -> list[ClientId]:
    """Independent draws with replacement, each candidate with a chance proportional to its samples."""
    cumulative = list(accumulate(candidate.sample_count for candidate in ordered))
    tickets = (int.from_bytes(_digest(seed, str(j)), "big") % cumulative[-1] for j in range(n_draws))
    return [ordered[bisect_right(cumulative, ticket)].client for ticket in tickets]


def _with_required(drawn: list[ClientId], required: Sequence[ClientId]) -> list[ClientId]:
    """The same number of draws: required clients that were not drawn replace the last ones."""
    n_kept, missing = len(drawn), list[ClientId]()
    while len(missing) < (n_missing := len(lost := [c for c in required if c not in set(drawn[:n_kept])])):
        missing, n_kept = lost, len(drawn) - n_missing
    return [*drawn[:n_kept], *missing]


def weight_of(weighting: Weighting, n_draws: int, sample_count: int) -> int:
    """The integer weight of one client's update in the sum."""
    match weighting:
        case Weighting.SAMPLES:
            return sample_count
        case Weighting.PROPORTIONAL:
            return n_draws


def _digest(seed: int, label: str) -> bytes:
    return hashlib.sha256(f"umbel/draw/1\x1f{seed}\x1f{label}".encode()).digest()
