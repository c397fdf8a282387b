"""The graph's parameters: k, the neighbours of each of n clients, and t, the shares that reconstruct a secret.

Corrupt clients are counted among the N *invited*, because the coordinator influences which of them take part: if it
left out honest ones, the share of corrupt ones among the n left would grow. So a round with few clients has a higher t,
and a round with too few is refused.

Up to `COMPLETE_MAX` clients all are neighbours, and t = floor((n + c) / 2) + 1 with c = floor(N / 3), so that
2t > n + c; a complete graph cannot be cut. For n = N that is floor(2n/3) + 1 of n shares, as in Bonawitz et al. 2017
for a coordinator that controls up to a third of the clients.

Above, the Harary graph of `graph.py` (Bell et al. 2020) has the least even k, and for it the least t, that keep the
probability of a leak below 2^-40 and that of a round lost to drop-outs below 2^-30. At most C = gamma n clients are
corrupt (work for the coordinator), and at most D = delta n drop out. Their places on the ring are random, because
nobody chose its order. So the number in given places is hypergeometric, and union bounds go over the places. Let c be
the least number such that some client has more than c corrupt neighbours with a probability of 2^-41 at most, and d the
same for drop-outs and 2^-30.

**Enough survive**: t <= k - d.

**Curious**: the coordinator follows the protocol and reads what it receives. t > c. Corrupt clients and drop-outs cut
the ring if they fill k/2 places in a row twice; n (n-k-1)/2 * P(k places hold only such) <= 2^-41.

**Split view**: the coordinator tells some neighbours that u is alive, others that u is dead. Honest ones answer one
way, corrupt ones both ways, so both secrets of u are revealed unless 2t > k + c. The bound on cuts is as before.
(Curious and split view are the semi-honest and the semi-malicious mode of public implementations.)

**Adaptive**, which we require: u itself holds one more share of its self mask, so 2t > k + 1 + c. And the coordinator
knows the ring: it may declare any clients dead, to cut off an arc whose sum it then reads. Our own argument, without a
published proof:

- An honest client whose mask key was revealed does not answer. At least t of its k + 1 holders said that it is dead,
  t - c of them honest; it answers only if t said that it is alive, again t - c honest; 2t > k + 1 + c rules out both.
- Edges between honest clients stay secret unless one of their mask keys is revealed. So a cut needs two disjoint runs
  of k/2 places in a row, full of corrupt clients and of honest ones with a revealed key. Let h of a run be of the
  latter: for the key of one, the h - 1 others do not answer, so t <= k - (h - 1).
- Hence each run holds at least a = k/2 - h >= t - 1 - k/2 corrupt clients. Counts of disjoint places are negatively
  associated, so the probability is at most n (n-k-1)/2 * P(a or more of k/2 places are corrupt)^2, to be <= 2^-41. (In
  all cases that we tried this is stricter than 2t > k + 1 + c, on which it rests.)

For gamma = delta = 0.1, k/t is 52/28 curious, 114/78 split view, 126/88 adaptive for n = 1000, and 60/32, 144/98,
160/111 for n = 10000. By this bound the adaptive cut succeeds against the split-view numbers with 2^-28 and 2^-27, and
against the curious ones nearly always.

All this holds for one ring, but the coordinator can try many: it sees the keys before it chooses the clients, and the
seed depends on both. Its chance grows with the number of rings that it tries, so `DEFAULT_RULE` asks for 2^-80 (152/110
and 194/139), which 2^40 rings do not bring above 2^-40. Both ends compute k and t, so each comparison is exact: float64
decides if a tail is more than a millionth from its bound, integers otherwise.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

COMPLETE_MAX = 300


class Adversary(StrEnum):
    """How the coordinator uses its corrupt clients; each kind includes the ones before."""

    CURIOUS = "curious"
    SPLIT_VIEW = "split-view"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class Parameters:
    k: int  # neighbours of each client
    t: int  # shares that reconstruct a secret, of its k + 1


@dataclass(frozen=True, slots=True)
class Rule:
    """What a sparse graph must withstand. Raises `ValueError`."""

    corrupt: float = 0.1  # share of the clients, 0 to 1
    dropouts: float = 0.1  # likewise
    adversary: Adversary = Adversary.ADAPTIVE
    security_bits: int = 40  # a leak has a probability of 2^-security_bits at most
    correctness_bits: int = 30  # likewise, a round that is lost although no more clients dropped out

    def __post_init__(self) -> None:
        if not (0 <= self.corrupt < 1 and 0 <= self.dropouts < 1 and self.corrupt + self.dropouts < 1):
            raise ValueError(
                "corrupt and dropouts must be shares of the clients: each at least 0, and their sum below 1"
            )
        if self.security_bits < 1 or self.correctness_bits < 1:
            raise ValueError("security_bits and correctness_bits must be positive")

    def n_corrupt(self, n: int) -> int:
        return _share_of(self.corrupt, n)

    def n_dropouts(self, n: int) -> int:
        return _share_of(self.dropouts, n)

    def survivors_min(self, n: int) -> int:
        """The fewest clients of n whose inputs a sparse round may sum; every client checks it."""
        return n - self.n_dropouts(n)


DEFAULT_RULE = Rule(security_bits=80)


def threshold_complete(n: int) -> int:
    """The threshold of a complete graph over n clients, in which each secret has n shares: floor(2n/3) + 1."""
    return 2 * n // 3 + 1


@lru_cache(maxsize=256)
def parameters_for(n: int, rule: Rule = DEFAULT_RULE, n_invited: int | None = None) -> Parameters:
    """The parameters of a round of n clients: complete up to `COMPLETE_MAX`, or if no sparse graph is possible.

    `n_invited`: n by default. Raises `ValueError` for fewer than two clients, or than `roster_min`.
    """
    n_invited = n if n_invited is None else n_invited
    if n < 2:
        raise ValueError(f"secure aggregation needs two clients or more, not {n}")
    if not roster_min(n_invited, rule) <= n <= n_invited:
        raise ValueError(
            f"{n} of {n_invited} invited clients cannot form a secure round: {roster_min(n_invited, rule)} to "
            f"{n_invited} must take part, because some of them may be corrupt"
        )
    sparse = sparse_parameters(n, rule, n_invited) if n > COMPLETE_MAX else None
    return sparse or Parameters(n - 1, _complete_threshold_min(n, rule, n_invited))


def roster_min(n_invited: int, rule: Rule = DEFAULT_RULE) -> int:
    """The fewest invited clients that must advertise keys: with fewer, t would exceed their number."""
    return min(n_invited, _corrupt_of(n_invited, rule) + 2)


def survivors_min(n: int, rule: Rule = DEFAULT_RULE, n_invited: int | None = None) -> int:
    """The fewest of n clients whose vectors may be summed: t if all are neighbours, otherwise by the rule."""
    parameters = parameters_for(n, rule, n_invited)
    return parameters.t if parameters.k == n - 1 else rule.survivors_min(n)


def sparse_parameters(n: int, rule: Rule = DEFAULT_RULE, n_invited: int | None = None) -> Parameters | None:
    """The least k of a Harary graph over n clients with the least t for it; None if no k < n - 1 is enough."""
    n_corrupt = rule.n_corrupt(n if n_invited is None else n_invited)
    corrupt = dead = 0
    for k in range(2, n - 1, 2):
        # More neighbours never have fewer corrupt or dead ones, so each search continues from the last.
        corrupt = _neighbours_max(n, n_corrupt, k, rule.security_bits + 1, corrupt)
        dead = _neighbours_max(n, rule.n_dropouts(n), k, rule.correctness_bits, dead)
        for t in range(_threshold_min(k, corrupt, rule.adversary), k - dead + 1):
            if _stays_whole(n, Parameters(k, t), rule, n_corrupt):
                return Parameters(k, t)
    return None


def _share_of(share: float, n: int) -> int:
    return math.floor(share * n + 1e-9)  # 0.07 * 100 is a little over 7, 0.29 * 100 a little under 29


def _corrupt_of(n_invited: int, rule: Rule) -> int:
    """How many of the clients invited to a complete graph may be corrupt: a third, or more if the rule says so."""
    return max(n_invited // 3, rule.n_corrupt(n_invited))


def _complete_threshold_min(n: int, rule: Rule, n_invited: int | None = None) -> int:
    """The least t with 2t > n + c: two thirds, if all invited clients take part."""
    return (n + _corrupt_of(n if n_invited is None else n_invited, rule)) // 2 + 1


def _threshold_min(k: int, corrupt: int, adversary: Adversary) -> int:
    """The least threshold with which `corrupt` neighbours of k reconstruct no secret of an honest client."""
    match adversary:
        case Adversary.CURIOUS:
            least = corrupt + 1
        case Adversary.SPLIT_VIEW:
            least = (k + corrupt) // 2 + 1
        case Adversary.ADAPTIVE:
            least = (k + 1 + corrupt) // 2 + 1
    return max(2, least)  # with one, each share would be the secret


def _stays_whole(n: int, parameters: Parameters, rule: Rule, corrupt: int) -> bool:
    """Whether the graph can be cut in two with a probability of 2^-(security_bits + 1) at most."""
    k = parameters.k
    limit, pairs = Fraction(1, 2 ** (rule.security_bits + 1)), Fraction(n * (n - k - 1), 2)
    if rule.adversary is Adversary.ADAPTIVE:
        run = k // 2
        return is_within(limit, pairs, n, corrupt, run, above=parameters.t - 2 - run, power=2)
    return is_within(limit, pairs, n, corrupt + rule.n_dropouts(n), k, above=k - 1)


def _neighbours_max(n: int, marked: int, k: int, bits: int, start: int = 0) -> int:
    """The least m >= start such that some client has more than m marked neighbours of k with probability <= 2^-bits."""
    m = start
    while not is_within(Fraction(1, 2**bits), Fraction(n), n, marked, k, above=m):
        m += 1
    return m


ROUNDING = 1e-9
_NEAR = 1e-6  # of a limit: a thousand times the error of `tail`, and of any library's logarithms


def is_within(limit: Fraction, times: Fraction, n: int, marked: int, drawn: int, above: int, power: int = 1) -> bool:
    """Whether `times` * P(X > above)^`power` <= `limit`, with X as in `tail`; the same on every machine.

    If float64 comes near the limit, integers decide. `times` * 1 must not be near the limit.
    """
    found, bound = float(times) * tail(n, marked, drawn, above) ** power, float(limit)
    if abs(found - bound) > _NEAR * bound:
        return found < bound
    return times * _exact_tail(n, marked, drawn, above) ** power <= limit


def tail(n: int, marked: int, drawn: int, above: int) -> float:
    """A bound on P(X > above) for the hypergeometric X: the marked among `drawn` of n, of which `marked` are marked.

    At most 1 + `ROUNDING` times the true value and never below it; 1 if the most likely X is above `above`.
    """
    least, most = max(0, drawn - (n - marked)), min(marked, drawn)
    x = above + 1
    if x > most:
        return 0.0
    if x <= max(least, (drawn + 1) * (marked + 1) // (n + 2)):
        return 1.0
    term = math.exp(_log_choose(marked, x) + _log_choose(n - marked, drawn - x) - _log_choose(n, drawn))
    total = term
    while x < most and term > 1e-17 * total:
        # The terms fall faster and faster, so the omitted ones are far below the added rounding.
        term *= (marked - x) * (drawn - x) / ((x + 1) * (n - marked - drawn + x + 1))
        total += term
        x += 1
    return min(1.0, total * (1 + ROUNDING))


def _exact_tail(n: int, marked: int, drawn: int, above: int) -> Fraction:
    ways = (math.comb(marked, x) * math.comb(n - marked, drawn - x) for x in range(above + 1, min(marked, drawn) + 1))
    return Fraction(sum(ways), math.comb(n, drawn))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
