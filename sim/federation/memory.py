"""What clients keep from round to round: the model that they fetched last, and what error feedback has left over."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.types import CHANGES_MAX, ClientId
from umbel.sim.data.partition.partition import Indices
from umbel.sim.federation.versions import ModelState


@dataclass(slots=True)
class Memory:
    """`left`: of error feedback, by client. `has`: the version that a client has, of those who were ever asked.
    `changes`: bytes of what leads to the newest version from those before it, oldest first; see `note`.
    """

    left: dict[ClientId, Residual] = field(default_factory=dict[ClientId, Residual])
    has: dict[ClientId, int] = field(default_factory=dict[ClientId, int])
    changes: tuple[int, ...] = ()

    def down_bytes(self, clients: Sequence[ClientId], version: int, model: ModelState) -> Indices:
        """What each has to fetch to have the newest version: nothing, the changes since its own, or the whole."""
        behind = (version - self.has.get(client, -1) for client in clients)
        whole = model.file.size_bytes
        n_known = len(self.changes)
        return np.array([sum(self.changes[n_known - n :]) if n <= n_known else whole for n in behind], dtype=np.int64)

    def fetched(self, clients: Iterable[ClientId], version: int) -> None:
        """These have it now."""
        self.has.update(dict.fromkeys(clients, version))

    def note(self, model: ModelState) -> None:
        """There is a new version. As a coordinator offers changes (`server/store/versions.py`): as far as they were
        made, eight at most, and together smaller than the model.
        """
        made = () if model.change is None else (*self.changes, model.change.size_bytes)[-CHANGES_MAX:]
        while made and sum(made) >= model.file.size_bytes:
            made = made[1:]
        self.changes = made
