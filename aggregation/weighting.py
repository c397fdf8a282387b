r"""Who is drawn, with what weight, and what the mean then estimates.

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
- who is *waiting* when a cohort is drawn is not uniform over the fleet (time zones, charging);
- closing at the target prefers the fast, so slow clients, often those with the most data, count too little;
- whoever reports less often the more it holds counts too little, and over-selection does not mend it;
- partial work: an update after fewer steps is a shorter move in the client's direction, weighted as if it were whole.
The round's record lists who was left out and why, so that these can be seen.
"""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from umbel.aggregation.types import ClientId, Weighting


@dataclass(frozen=True, slots=True)
class Candidate:
    """A client that waits for work and holds `sample_count` samples. `tier`: its label of that name, or empty."""

    client: ClientId
    sample_count: int
    tier: str = ""


def draw(weighting: Weighting, candidates: Sequence[Candidate], n_draws: int, seed: int) -> Mapping[ClientId, int]:
    """Draw a cohort: client -> how many draws fell on it, in the order of names.

    `samples`: min(n_draws, all) distinct clients, one draw each; `proportional`: exactly `n_draws` draws. The same seed
    and candidates, in any order, give the same cohort, in any language: the randomness is SHA-256. The draws of a
    smaller cohort are the first of a larger one's. Each candidate appears once and holds at least one sample.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.client)
    match weighting:
        case Weighting.SAMPLES:
            drawn = sorted(ordered, key=lambda candidate: _hash(seed, candidate.client))[:n_draws]
            counts = Counter(candidate.client for candidate in drawn)
        case Weighting.PROPORTIONAL:
            cumulative = list(accumulate(candidate.sample_count for candidate in ordered))
            tickets = (_hash(seed, str(j)) % cumulative[-1] for j in range(n_draws))
            counts = Counter(ordered[bisect_right(cumulative, ticket)].client for ticket in tickets)
    return dict(sorted(counts.items()))


def weight_of(weighting: Weighting, n_draws: int, sample_count: int) -> int:
    """The integer weight of one client's update in the sum."""
    match weighting:
        case Weighting.SAMPLES:
            return sample_count
        case Weighting.PROPORTIONAL:
            return n_draws


def _hash(seed: int, label: str) -> int:
    return int.from_bytes(hashlib.sha256(f"umbel/draw/1\x1f{seed}\x1f{label}".encode()).digest(), "big")
