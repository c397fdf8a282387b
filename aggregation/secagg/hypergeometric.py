"""The upper tail of the hypergeometric distribution, for counts where exact integers are slow."""

import math
from fractions import Fraction

ROUNDING = 1e-9
_NEAR = 1e-6  # of a limit: a thousand times what `tail`, or another library's logarithms, may be off by


def is_within(limit: Fraction, times: Fraction, n: int, marked: int, drawn: int, above: int, power: int = 1) -> bool:
    """Whether `times` * P(X > above)^`power` is `limit` at most; X as in `tail`. Every machine decides alike: where
    float64 comes near the limit, integers decide. `times` times the chance 1 must not be near the limit.
    """
    found, bound = float(times) * tail(n, marked, drawn, above) ** power, float(limit)
    if abs(found - bound) > _NEAR * bound:
        return found < bound
    return times * _exact_tail(n, marked, drawn, above) ** power <= limit


def tail(n: int, marked: int, drawn: int, above: int) -> float:
    """A bound on P(X > above): X of `drawn` taken out of n are marked, where `marked` of the n are.

    At most 1 + `ROUNDING` times the truth and never below it, rounding included; 1 where more than `above` is likely,
    that is, where the most likely X is.
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
        # What follows falls faster and faster, so what is left out is far below the rounding that is added.
        term *= (marked - x) * (drawn - x) / ((x + 1) * (n - marked - drawn + x + 1))
        total += term
        x += 1
    return min(1.0, total * (1 + ROUNDING))


def _exact_tail(n: int, marked: int, drawn: int, above: int) -> Fraction:
    ways = (math.comb(marked, x) * math.comb(n - marked, drawn - x) for x in range(above + 1, min(marked, drawn) + 1))
    return Fraction(sum(ways), math.comb(n, drawn))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
