"""The order of the tests in a run with several workers: each worker begins with its share of the slow ones.

With `--dist worksteal` xdist cuts the list of tests into consecutive parts, one for each worker. A worker without tests
takes the last half of the longest queue. If all slow tests came first in the list, one worker would hold nearly all of
them, and the others would take fast tests from its end.

So the list is made from its parts. Each part begins with as many slow tests as the others, give or take one, and fast
tests follow. Slow tests are dealt out in runs of one file, because what a module sets up for its tests costs seconds.
"""

from collections.abc import Hashable, Iterator, Sequence

_RUN_MAX = 8  # of more slow tests in one file, several workers take some


def dealt(is_slow: Sequence[bool], files: Sequence[Hashable], n_workers: int) -> list[int]:
    """Return the places of the tests in the order to run them. Every worker finds the same.

    `is_slow`, `files`: of each test, in the order in which it was collected.
    """
    slow = [place for place, flag in enumerate(is_slow) if flag]
    fast = iter([place for place, flag in enumerate(is_slow) if not flag])
    hands = _hands(_runs(slow, files), first_parts(len(slow), n_workers))
    order = list[int]()
    for hand, size in zip(hands, first_parts(len(is_slow), n_workers), strict=True):
        order += sorted(hand)  # tests of one file are together again
        order += [next(fast) for _ in range(size - len(hand))]
    return order


def first_parts(n_tests: int, n_workers: int) -> list[int]:
    """Return how many tests xdist's `worksteal` sends to each worker at first."""
    sizes, left = list[int](), n_tests
    for workers_left in range(n_workers, 0, -1):
        sizes.append(left // workers_left)
        left -= sizes[-1]
    return sizes


def _runs(slow: Sequence[int], files: Sequence[Hashable]) -> Iterator[list[int]]:
    """Yield the slow tests in their order, in runs of one file."""
    run = list[int]()
    for place in slow:
        if run and (files[place] != files[run[-1]] or len(run) == _RUN_MAX):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def _hands(runs: Iterator[list[int]], sizes: Sequence[int]) -> list[list[int]]:
    """Deal the runs out in turn. A hand that becomes full takes the beginning of a run, and the next hand the rest."""
    hands = [list[int]() for _ in sizes]
    turn = 0
    for run in runs:
        rest = run
        while rest:
            room = sizes[turn] - len(hands[turn])
            hands[turn] += rest[:room]
            rest = rest[room:]
            turn = (turn + 1) % len(sizes)
    return hands
