"""How many neighbours k a client of n has, and how many shares t bring back a secret.

How many clients are corrupt is counted of those *invited*, N, for the coordinator has a say in who of them comes: if it
left out honest ones, the corrupt would be more among the n that are left. So a round of few that came has a higher t,
and one in which they are too few is no round.

Up to `COMPLETE_MAX` clients everyone is everyone's neighbour, and t = floor((n + c) / 2) + 1 with c = floor(N / 3), so
that 2t > n + c, and nothing cuts a complete graph. For n = N that is floor(2n/3) + 1 of n shares, as Bonawitz et al.
2017 have it for a coordinator that has up to a third of the clients.

Above, the Harary graph of `graph.py` (Bell et al. 2020) has the least even k, and for it the least t, that keep the
chance of a leak below 2^-40 and that of a round lost to drop-outs below 2^-30. At most C = gamma n clients are
corrupt, that is, work for the coordinator, and at most D = delta n drop out. Where they stand on the ring is chance,
for nobody chose its order. So how many stand in given places is hypergeometric, and union bounds go over the places.
Let c be the least number such that some client has more than c corrupt neighbours with a chance of 2^-41 at most, and
d the same for drop-outs and 2^-30.

**Enough come through**: t <= k - d.

**Curious**: the coordinator follows the protocol and looks at what it gets. t > c. Corrupt clients and drop-outs cut
the ring in two where they fill k/2 places in a row twice; n (n-k-1)/2 * P(k places hold only such) <= 2^-41.

**Split view**: it tells some neighbours that u is alive, others that u is dead. Honest ones answer one way, corrupt
ones both ways, so both secrets of u come out unless 2t > k + c. The cut as before. (These two are the semi-honest and
the semi-malicious mode of public implementations.)

**Adaptive**, what we ask: u itself holds one more share of its self mask, so 2t > k + 1 + c. And it knows the ring:
it may name as dead whomever it likes, to cut off an arc whose sum it then reads. Our own argument, no published
proof:

- An honest client whose mask key came out does not answer. At least t of its k + 1 holders said that it is dead, t -
  c of them honest; it answers only when t said that it is alive, again t - c honest; 2t > k + 1 + c rules out both.
- Edges between honest clients stay secret unless one of their mask keys came out. So a cut needs two disjoint runs of
  k/2 places in a row, full of corrupt clients and of honest ones whose key came out. Let h of a run be of these: for
  the key of one, the h - 1 others do not answer, so t <= k - (h - 1).
- Hence each run holds at least a = k/2 - h >= t - 1 - k/2 corrupt clients. Counts of disjoint places are negatively
  associated, so the chance is at most n (n-k-1)/2 * P(a or more of k/2 places are corrupt)^2, to be <= 2^-41. (That
  asks for more than 2t > k + 1 + c does wherever we looked; but it rests on it.)

For gamma = delta = 0.1, k/t is 52/28 curious, 114/78 split view, 126/88 adaptive for n = 1000, and 60/32, 144/98,
160/111 for n = 10000. The adaptive cut succeeds against the split-view numbers with 2^-28 and 2^-27 by this bound,
against the curious ones nearly always.

All this holds for one ring, and the coordinator can try out many: it sees the keys before it says who is in, and the
seed hangs on both. Its chance grows by as many rings as it has the patience for, so the rule that rounds go by asks for
2^-80 (152/110 and 194/139), which 2^40 rings do not bring above 2^-40. Both ends work k and t out, so each comparison
is exact: float64 decides it where a tail is further than a millionth from its bound, integers where it is nearer.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

from umbel.aggregation.secagg.hypergeometric import is_within

COMPLETE_MAX = 300


class UnsoundParameters(ValueError):
    """Numbers proposed for a round that do not protect its clients; says which and why."""


class Adversary(StrEnum):
    """What the coordinator does with its corrupt clients; each does what the ones before do, too."""

    CURIOUS = "curious"
    SPLIT_VIEW = "split-view"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class Parameters:
    """`k`: neighbours of each client; `t`: shares that bring back a secret, of the k + 1 there are."""

    k: int
    t: int


@dataclass(frozen=True, slots=True)
class Rule:
    """What a sparse graph must stand. Raises `ValueError`.

    `corrupt`, `dropouts`: shares of the clients, 0 to 1. `security_bits`: a leak has a chance of 2^-security_bits at
    most; `correctness_bits`: as much for a round that is lost though no more dropped out.
    """

    corrupt: float = 0.1
    dropouts: float = 0.1
    adversary: Adversary = Adversary.ADAPTIVE
    security_bits: int = 40
    correctness_bits: int = 30

    def __post_init__(self) -> None:
        if not (0 <= self.corrupt < 1 and 0 <= self.dropouts < 1 and self.corrupt + self.dropouts < 1):
            raise ValueError("corrupt and dropouts are shares of the clients, together less than all of them")
        if self.security_bits < 1 or self.correctness_bits < 1:
            raise ValueError("security_bits and correctness_bits are positive")

    def n_corrupt(self, n: int) -> int:
        return _share_of(self.corrupt, n)

    def n_dropouts(self, n: int) -> int:
        return _share_of(self.dropouts, n)

    def survivors_min(self, n: int) -> int:
        """The fewest clients of n whose inputs a sparse round may sum; every client sees to that."""
        return n - self.n_dropouts(n)


DEFAULT_RULE = Rule(security_bits=80)


def threshold_complete(n: int) -> int:
    """The threshold of a complete graph over n clients, each secret of which has n shares: floor(2n/3) + 1."""
    return 2 * n // 3 + 1


@lru_cache(maxsize=256)
def parameters_for(n: int, rule: Rule = DEFAULT_RULE, n_invited: int | None = None) -> Parameters:
    """The parameters of a round of n clients: complete up to `COMPLETE_MAX`, and where no sparse graph does.

    `n_invited`: of whom they are, n by default. Raises `ValueError` for fewer than two clients, or than `roster_min`.
    """
    n_invited = n if n_invited is None else n_invited
    if n < 2:
        raise ValueError(f"secure aggregation needs two clients or more, not {n}")
    if not roster_min(n_invited, rule) <= n <= n_invited:
        raise ValueError(f"{n} of {n_invited} clients are too few to keep a secret from those who may be corrupt")
    sparse = sparse_parameters(n, rule, n_invited) if n > COMPLETE_MAX else None
    return sparse or Parameters(n - 1, _complete_threshold_min(n, rule, n_invited))


def roster_min(n_invited: int, rule: Rule = DEFAULT_RULE) -> int:
    """The fewest of those invited who must advertise keys: with fewer, t would be more than there are."""
    return min(n_invited, _corrupt_of(n_invited, rule) + 2)


def survivors_min(n: int, rule: Rule = DEFAULT_RULE, n_invited: int | None = None) -> int:
    """The fewest of n clients whose vectors may be summed: t where all are neighbours, else what the rule says."""
    parameters = parameters_for(n, rule, n_invited)
    return parameters.t if parameters.k == n - 1 else rule.survivors_min(n)


def sparse_parameters(n: int, rule: Rule = DEFAULT_RULE, n_invited: int | None = None) -> Parameters | None:
    """The least k of a Harary graph over n clients with the least t for it; None where no k < n - 1 does."""
    n_corrupt = rule.n_corrupt(n if n_invited is None else n_invited)
    corrupt = dead = 0
    for k in range(2, n - 1, 2):
        # More neighbours never have fewer corrupt or dead ones among them, so each search goes on from the last.
        corrupt = _neighbours_max(n, n_corrupt, k, rule.security_bits + 1, corrupt)
        dead = _neighbours_max(n, rule.n_dropouts(n), k, rule.correctness_bits, dead)
        for t in range(_threshold_min(k, corrupt, rule.adversary), k - dead + 1):
            if _stays_whole(n, Parameters(k, t), rule, n_corrupt):
                return Parameters(k, t)
    return None


def require_sound(n: int, proposed: Parameters, rule: Rule = DEFAULT_RULE) -> None:
    """What a client asks of a round's parameters, by a rule of its own. Raises `UnsoundParameters`.

    More neighbours or a higher threshold than `parameters_for` gives pass: they cost work and drop-outs, not secrets.
    """
    k, t = proposed.k, proposed.t
    if n < 2 or not 1 <= k <= n - 1:
        raise UnsoundParameters(f"a client of {n} cannot have {k} neighbours")
    if k == n - 1:
        _require_threshold(t, _complete_threshold_min(n, rule), n)
        return
    if n <= COMPLETE_MAX:
        raise UnsoundParameters(f"up to {COMPLETE_MAX} clients are all neighbours, so {n - 1} of {n} and not {k}")
    if k % 2:
        raise UnsoundParameters(f"in a sparse graph each client has an even number of neighbours, not {k}")
    corrupt = _neighbours_max(n, rule.n_corrupt(n), k, rule.security_bits + 1)
    _require_threshold(t, _threshold_min(k, corrupt, rule.adversary), k)
    if not _stays_whole(n, proposed, rule, rule.n_corrupt(n)):
        raise UnsoundParameters(
            f"with {k} neighbours and a threshold of {t} shares, {n} clients can be cut in two groups whose sums show; "
            f"the rule gives {parameters_for(n, rule)}"
        )


def _share_of(share: float, n: int) -> int:
    return math.floor(share * n + 1e-9)  # 0.07 * 100 is a little over 7, 0.29 * 100 a little under 29


def _require_threshold(t: int, least: int, most: int) -> None:
    if t < least:
        raise UnsoundParameters(
            f"a threshold of {t} shares could reveal secrets that must stay hidden; it must be {least} or more"
        )
    if t > most:
        raise UnsoundParameters(f"a threshold of {t} shares can never be met by {most} holders")


def _corrupt_of(n_invited: int, rule: Rule) -> int:
    """How many of those invited to a complete graph may be corrupt: a third, or more if the rule has it so."""
    return max(n_invited // 3, rule.n_corrupt(n_invited))


def _complete_threshold_min(n: int, rule: Rule, n_invited: int | None = None) -> int:
    """2t > n + c. Where all who were invited came, that is two thirds."""
    return (n + _corrupt_of(n if n_invited is None else n_invited, rule)) // 2 + 1


def _threshold_min(k: int, corrupt: int, adversary: Adversary) -> int:
    """The least threshold with which `corrupt` neighbours of k bring back no secret they must not."""
    match adversary:
        case Adversary.CURIOUS:
            least = corrupt + 1
        case Adversary.SPLIT_VIEW:
            least = (k + corrupt) // 2 + 1
        case Adversary.ADAPTIVE:
            least = (k + 1 + corrupt) // 2 + 1
    return max(2, least)  # one share that is the secret would be no sharing


def _stays_whole(n: int, parameters: Parameters, rule: Rule, corrupt: int) -> bool:
    """Whether the chance that the graph can be cut in two is 2^-(security_bits + 1) at most."""
    k = parameters.k
    limit, pairs = Fraction(1, 2 ** (rule.security_bits + 1)), Fraction(n * (n - k - 1), 2)
    if rule.adversary is Adversary.ADAPTIVE:
        run = k // 2
        return is_within(limit, pairs, n, corrupt, run, above=parameters.t - 2 - run, power=2)
    return is_within(limit, pairs, n, corrupt + rule.n_dropouts(n), k, above=k - 1)


def _neighbours_max(n: int, marked: int, k: int, bits: int, start: int = 0) -> int:
    """The least m >= start such that some client has more than m marked neighbours of k with 2^-bits at most."""
    m = start
    while not is_within(Fraction(1, 2**bits), Fraction(n), n, marked, k, above=m):
        m += 1
    return m
