r"""Who is drawn, with what weight, and what the mean then estimates.

Objective. N clients, client i with n_i samples and update x_i, n = sum n_i. A round should move the model by

    X = sum_i (n_i / n) x_i.

**samples** (McMahan et al. 2017, Algorithm 1): a cohort S drawn uniformly without replacement, mean weighted by counts,

    A = sum_{i in S} n_i x_i / sum_{i in S} n_i.

With every client equally likely to be in S (probability q), E[sum_S n_i x_i] = q n X and E[sum_S n_i] = q n: numerator
and denominator are unbiased for q n X and q n, so A is a ratio estimator. It is exact when all n_i are equal or S is
the whole population; otherwise its bias is of first order in 1/K (Cochran, Sampling Techniques, section 6.8):

    E[A] - X  ~  - Cov(A, D) / E[D]  =  O(1/K),        D = sum_S n_i,

and vanishes as cohorts grow. Dividing by the constant q n instead would be exactly unbiased (Horvitz-Thompson) at the
price of a step whose length varies with the luck of the draw; FedAvg does not do so, and neither do we.

**proportional** (Li et al. 2020, Algorithms 1 and 2): K independent draws with replacement, client i with probability
n_i / n, plain mean over draws: E[x of one draw] = X, so the mean is unbiased for every K. A client drawn m times trains
once and counts m times: its weight is m.

Over-selection and drop-outs. Asking more than needed and averaging over those who report keeps both statements true as
long as *whether* a client reports does not depend on what it holds: a uniform sample of a uniform sample is uniform;
the draws that are answered are still independent draws from n_i / n. (A client drawn m times drops out with all its m draws
at once; given who is reachable, the mean is then unbiased for the *reachable* clients, and averaging over that leaves a ratio bias of second order, as above.)

Where a bias remains, whatever the weighting:
- who is *waiting* when a cohort is drawn is not uniform over the fleet (time zones, charging);
- closing at the target prefers the fast, so slow clients, often those with the most data, count too little;
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
    """A client that waits for work and holds `sample_count` samples."""

    client: ClientId
    sample_count: int


def draw(weighting: Weighting, candidates: Sequence[Candidate], n_draws: int, seed: int) -> Mapping[ClientId, int]:
    """Draw a cohort: client -> how many draws fell on it, in the order of names.

    `samples`: min(n_draws, all) distinct clients, one draw each; `proportional`: exactly `n_draws` draws. The same seed
    and candidates, in any order, give the same cohort, in any language: the randomness is SHA-256.
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
