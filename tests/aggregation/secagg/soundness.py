"""Whether proposed parameters of a secure round's graph are sound, by the rule that `parameters_for` goes by."""

from umbel.aggregation.secagg.parameters import (
    COMPLETE_MAX,
    DEFAULT_RULE,
    Parameters,
    Rule,
    _complete_threshold_min,  # pyright: ignore[reportPrivateUsage]
    _neighbours_max,  # pyright: ignore[reportPrivateUsage]
    _stays_whole,  # pyright: ignore[reportPrivateUsage]
    _threshold_min,  # pyright: ignore[reportPrivateUsage]
    parameters_for,
)


class UnsoundParameters(ValueError):
    """Parameters that do not protect a round's clients; says which and why."""


def require_sound(n: int, proposed: Parameters, rule: Rule = DEFAULT_RULE) -> None:
    """Raise `UnsoundParameters` unless the rule holds.

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


def _require_threshold(t: int, least: int, most: int) -> None:
    if t < least:
        raise UnsoundParameters(
            f"a threshold of {t} shares could reveal secrets that must stay hidden; it must be {least} or more"
        )
    if t > most:
        raise UnsoundParameters(f"a threshold of {t} shares can never be met by {most} holders")
