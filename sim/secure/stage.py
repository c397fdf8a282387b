"""Virtual time: what is due in it, in order, and what it cost the processor and the line meanwhile."""

import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager

from umbel.aggregation.types import ClientId


class VirtualTime:
    """Nothing waits: taking what is due next off the list is what moves time.

    What the processor does takes no virtual time. `cpu_s`: of this process, by what it was for; `up`, `down`: bytes by
    client.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.up: Counter[ClientId] = Counter()
        self.down: Counter[ClientId] = Counter()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._n_planned = 0

    def plan(self, at: float, what: Callable[[], None]) -> None:
        """Have it done then; of two things for the same moment, first what was planned first."""
        heapq.heappush(self._due, (max(at, self.now), self._n_planned, what))
        self._n_planned += 1

    def play(self, until: Callable[[], bool]) -> None:
        """Do what is due, in its order, until that is true or nothing is left."""
        while self._due and not until():
            self.now, _, what = heapq.heappop(self._due)
            what()

    @contextmanager
    def counting(self, what: str) -> Generator[None]:
        """Count this process's CPU seconds inside for `what`."""
        started = time.process_time()
        try:
            yield
        finally:
            self.cpu_s[what] += time.process_time() - started
