"""A rank that must leave tells all others to stop training, so that the run is saved before its machine goes away."""

import time
from collections.abc import Callable

from umbel.client.datacenter.ranks.group import Group

_LOOK_EVERY_S = 1.0


class Leaving:
    """Whether this rank's training should end with what is done. Call it between two steps, as `told_to_stop`."""

    def __init__(self, group: Group, own: Callable[[], str | None]) -> None:
        """`own`: why this rank must leave; None while it may stay."""
        self._group, self.own = group, own
        self._has_told, self._heard, self._looked_at = False, "", 0.0

    def __call__(self) -> str | None:
        if (reason := self.own()) is not None:
            if not self._has_told:
                self._group.tell_all(f"{self._group.names.of(self._group.rank)} must leave: {reason}")
                self._has_told = True
            return reason
        now = time.monotonic()
        if not self._heard and now >= self._looked_at + _LOOK_EVERY_S:
            self._looked_at, self._heard = now, self._group.told()
        return self._heard or None
