"""The sum of the round under way, fed from stored updates in a worker thread, one at a time.

The stored updates are the truth; this is a sum that can always be made again from them, to the same bits.
"""

import asyncio
from concurrent.futures import Executor
from pathlib import Path

from umbel.aggregation.grid import Grid, GridAccumulator
from umbel.server.updates import checked_values


class Folding:
    """One round's accumulator and the folds that are on their way into it."""

    def __init__(self, n_values: int, grid: Grid, worker: Executor) -> None:
        self._n_values = n_values
        self._grid = grid
        self._worker = worker
        self._total: GridAccumulator | None = None
        self._pending: list[asyncio.Future[None]] = []

    def add(self, path: Path, weight: int) -> None:
        """Fold a stored update after those added before."""
        self._pending.append(asyncio.get_running_loop().run_in_executor(self._worker, self._fold, path, weight))

    async def total(self) -> GridAccumulator:
        """The sum once every fold is in. Raises what a fold raised: then build a new `Folding` from what is stored."""
        await asyncio.gather(*self._pending)
        assert self._total is not None, "a round closes with at least one report"
        return self._total

    async def discard(self) -> None:
        """Stop folding and let go of the sum."""
        for fold in self._pending:
            fold.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        self._pending.clear()
        self._total = None

    def _fold(self, path: Path, weight: int) -> None:
        if self._total is None:  # allocated with the first fold, in the thread: int64, twice the model
            self._total = GridAccumulator(self._n_values, self._grid)
        self._total.fold(checked_values(path, self._grid), weight)
