"""A rank that waits long for others says for which, and what they have to do.

```
          0 s                       5 s                          30 s                                90 s ...
block:    begins --- the store gets the mark of this rank --- a line in the log --- a line each minute
```

A rank without a mark has not come yet, or less than 5 s ago. Of the ranks that wait, the first one logs. A rank that
waits for a short time does not ask the store at all.
"""

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from umbel.aggregation.phrases import lasting
from umbel.client.datacenter.ranks.names import RANKS, RankNames

_RANKS_SHOWN = 8
log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class RankWaits:
    """The waits of one rank, which all ranks have in the same order. `store`: of the job; None: the rank is alone."""

    rank: int
    size: int
    store: Any = field(repr=False)
    names: RankNames = RANKS
    mark_s: float = 5.0
    first_s: float = 30.0
    every_s: float = 60.0
    _numbers: "count[int]" = field(default_factory=count, repr=False)

    @contextmanager
    def told(self, what: str) -> Generator[None]:
        """Log for which ranks this one waits if the block takes long. `what`: what it waits for, such as "reports"."""
        number = next(self._numbers)
        if self.store is None:
            yield
            return
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(number, what, ended), name="umbel-waiting", daemon=True)
        watch.start()
        try:
            yield
        finally:
            ended.set()
            watch.join()

    def _watch(self, number: int, what: str, ended: threading.Event) -> None:
        began = time.monotonic()
        if ended.wait(self.mark_s):
            return
        try:
            store = _own_connection(self.store)
            store.set(_key(number, self.rank), b"1")
            pause_s = self.first_s - self.mark_s
            while not ended.wait(pause_s):
                pause_s = self.every_s
                waiting = [rank for rank in range(self.size) if store.check([_key(number, rank)])]
                if waiting and waiting[0] == self.rank:
                    self._tell(what, [one for one in range(self.size) if one not in waiting], time.monotonic() - began)
        except RuntimeError:  # the machine with the store is gone: the call that this rank waits in says so
            return

    def _tell(self, what: str, missing: list[int], waited_s: float) -> None:
        shown = ", ".join(map(str, missing[:_RANKS_SHOWN])) + (", ..." if len(missing) > _RANKS_SHOWN else "")
        found = f"all {self.names.plural} are at it"
        if missing:
            found = f"missing: {self.names.of_several(shown) if len(missing) > 1 else self.names.of(missing[0])}"
        log.info("%s has waited %s for %s; %s", self.names.of(self.rank), lasting(waited_s), what, found)


def _own_connection(store: Any) -> Any:
    """Another connection to the same store, because the first may be busy with what this rank waits for."""
    return store.clone() if hasattr(store, "clone") else store  # torch has it since 2.8


def _key(number: int, rank: int) -> str:
    return f"umbel_waits_{number}_{rank}"
