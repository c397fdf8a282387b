"""A coordinator that knows the ring and names clients dead to cut off an arc: what it can read then."""

from collections.abc import Iterator, Set

from umbel.aggregation.secagg.graph import Graph


def dead_for_a_cut(graph: Graph, corrupt: Set[int]) -> frozenset[int]:
    """The honest clients of the two runs of k/2 places that hold the most corrupt ones, k/2 places apart or more.

    A corrupt client need not be dead: it tells its secrets anyway. Places between the runs let their clients, too, keep
    as many neighbours as they ask for.
    """
    n, run = graph.n, graph.k // 2
    is_corrupt = [index in corrupt for index in graph.ring]
    n_corrupt = [sum(is_corrupt[(start + step) % n] for step in range(run)) for start in range(n)]
    by_number = sorted(range(n), key=lambda start: -n_corrupt[start])
    first, second = min(
        (
            (one, next(other for other in by_number if 2 * run <= (other - one) % n <= n - 2 * run))
            for one in by_number[:20]
        ),
        key=lambda pair: (-min(n_corrupt[start] for start in pair), pair),
    )
    places = ((start + step) % n for start in (first, second) for step in range(run))
    return frozenset(graph.ring[place] for place in places) - corrupt


def exposed(graph: Graph, t: int, corrupt: Set[int], dead: Set[int]) -> list[frozenset[int]]:
    """The groups of honest clients whose sum shows, other than all that are alive, where everyone is told the same.

    A client answers where t of its holders bear witness with it. Corrupt ones always answer, with every share.
    """
    around = [frozenset(graph.neighbours(index)) for index in range(graph.n)]
    alive = frozenset(range(graph.n)) - dead
    honest = frozenset(range(graph.n)) - corrupt
    answering = {index for index in alive if len((around[index] | {index}) & alive) >= t} | corrupt
    opened = {index for index in honest & dead if len(around[index] & answering) >= t}
    unmasked = {index for index in honest & alive if len((around[index] | {index}) & answering) >= t}
    groups = _joined(around, honest - opened)
    return [group for group in groups if group <= unmasked and group != honest & alive]


def _joined(around: list[frozenset[int]], members: frozenset[int]) -> Iterator[frozenset[int]]:
    """The groups of `members` who share a mask that is still secret, directly or through others of them."""
    left = set(members)
    while left:
        group, new = set[int](), {left.pop()}
        while new:
            group |= new
            new = {other for index in new for other in around[index] & left}
            left -= new
        yield frozenset(group)
