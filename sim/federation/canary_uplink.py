"""The updates of a simulated canary: written and read as the run says, looked at one by one, and never summed."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.reports import Probe, WorkDone
from umbel.aggregation.run.canary import CanaryUpdate
from umbel.aggregation.run.verdicts import CanaryClosed
from umbel.aggregation.types import METRIC_ABS_MAX, ClientId


class CanaryUplink:
    """Of one attempt. `sizes`, `refused`: as of an `Uplink`. `largest`: the largest change of one value in each."""

    def __init__(self, plan: RoundPlan, layout: Layout, ranks: Mapping[ClientId, int]) -> None:
        self.codec = codec_for(plan.codec, plan.grid, layout)
        self.sizes = dict[ClientId, int]()
        self.refused = dict[ClientId, str]()
        self.largest = dict[ClientId, float]()
        self._ranks = ranks

    @property
    def update_bytes(self) -> int:
        """How long an update is, or can be, before one is written."""
        return self.codec.update_bytes[-1]

    def add(self, clients: Sequence[ClientId], values: Tensor) -> None:
        """Write the updates of some clients, and read them. `values`: float32 (k, n_values)."""
        for client, row in zip(clients, values, strict=True):
            try:
                self._add_one(client, row)
            except UpdateRefused as error:
                self.refused[client] = str(error)

    def _add_one(self, client: ClientId, row: Tensor) -> None:
        rank, head = self._ranks[client], self.codec.header_bytes
        update = b"".join(self.codec.encode(lambda: iter([row]), rank))
        self.largest[client] = self.codec.largest_change(update[:head], [update[head:]], rank)
        self.sizes[client] = len(update)

    def trial(self, works: Mapping[ClientId, WorkDone]) -> CanaryClosed:
        """What the accepted have sent, for the verdicts. `works`: theirs, with the probes."""
        return CanaryClosed(
            {client: CanaryUpdate(work, self.sizes[client], self.largest[client]) for client, work in works.items()}
        )


def probe_of(steps_full: int, step_s: float, down_bytes_per_s: float, losses: tuple[float, float, float]) -> Probe:
    """What a client measures of itself. `losses`: of its first step, its last, and in the mean. A simulated device has
    memory enough.
    """
    first, last, _ = losses
    return Probe(
        steps_full=steps_full,
        step_s=step_s,
        download_bytes_per_s=down_bytes_per_s,
        first_loss=_kept(first),
        last_loss=_kept(last),
        is_loss_finite=all(map(math.isfinite, losses)),
    )


def _kept(loss: float) -> float | None:
    return loss if abs(loss) <= METRIC_ABS_MAX else None
