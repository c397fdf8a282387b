"""What the clients of a simulated run keep between two attempts, in memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.types import CHANGES_MAX, ClientId
from umbel.sim.data.partition.partition import Indices
from umbel.sim.federation.site_policies import SiteMemory


@dataclass(slots=True)
class Memory:
    """What clients keep from round to round."""

    left: dict[ClientId, Residual] = field(default_factory=dict[ClientId, Residual])  # of error feedback
    has: dict[ClientId, int] = field(default_factory=dict[ClientId, int])  # the version of each client asked so far
    changes: tuple[int, ...] = ()  # bytes of each change that leads to the newest version, the oldest first
    sites: SiteMemory = field(default_factory=SiteMemory)
    kept: dict[ClientId, Tensor] = field(default_factory=dict[ClientId, Tensor])  # for the algorithm (`kept.py`)

    def down_bytes(self, clients: Sequence[ClientId], version: int, model: ModelState) -> Indices:
        """What each fetches to have the newest version: nothing, the changes since its own, or the model."""
        behind = (version - self.has.get(client, -1) for client in clients)
        whole = model.file.size_bytes
        n_known = len(self.changes)
        return np.array([sum(self.changes[n_known - n :]) if n <= n_known else whole for n in behind], dtype=np.int64)

    def fetched(self, clients: Iterable[ClientId], version: int) -> None:
        self.has.update(dict.fromkeys(clients, version))

    def note(self, model: ModelState) -> None:
        """Take a new version. As a coordinator does (`server/store/versions.py`), offer at most eight changes in a row
        that together are smaller than the model.
        """
        made = () if model.change is None else (*self.changes, model.change.size_bytes)[-CHANGES_MAX:]
        while made and sum(made) >= model.file.size_bytes:
            made = made[1:]
        self.changes = made
