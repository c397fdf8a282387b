"""The updates of one simulated round: written by clients and read by the coordinator with the run's codec, and summed.

Updates as float32 are not written out: the integers that the coordinator would read from them are made of a whole group
of clients at once, and are the same.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.codec.update_codec import Float32Codec, Part, codec_for
from umbel.aggregation.codec.vector_update import VectorUpdateCodec
from umbel.aggregation.errors import NonFiniteUpdate, UpdateOutOfRange, UpdateRefused
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.types import ClientId
from umbel.aggregation.update.grid import GridAccumulator, check_values, to_integers
from umbel.aggregation.update.integer_sum import IntegerSum
from umbel.sim.federation.memory import Memory

_BLOCK_VALUES = 1 << 18  # whose integers stay in the cache with what they are made of


class Uplink:
    """Of one attempt. `sizes`: bytes of each update, by client, as they were on the wire; `refused`: why an update does
    not count, in the words of the SDK, which does not send it, or of the coordinator, which does not take it. `left`:
    what error feedback leaves over, which counts once the round has made a model.
    """

    def __init__(self, plan: RoundPlan, layout: Layout, ranks: Mapping[ClientId, int], version: int, memory: Memory):
        self.codec = codec_for(plan.codec, plan.grid, layout)
        self.total: IntegerSum = self.codec.new_sum()
        self.parts = list[Part]()
        self.sizes = dict[ClientId, int]()
        self.refused = dict[ClientId, str]()
        self.left = dict[ClientId, Residual]()
        self._grid, self._codec_plan = plan.grid, plan.codec
        self._ranks, self._version, self._memory = ranks, version, memory

    @property
    def update_bytes(self) -> int:
        """How long an update is, or can be, before one is written."""
        return self.codec.update_bytes[-1]

    def add(self, clients: Sequence[ClientId], values: Tensor, weights: Sequence[int]) -> None:
        """Write, read and sum the updates of some clients. `values`: float32 (k, n_values)."""
        if isinstance(self.codec, Float32Codec) and isinstance(self.total, GridAccumulator):
            self._add_together(clients, values, weights)
            return
        for client, row, weight in zip(clients, values, weights, strict=True):
            self._add_one(client, row, weight)

    def _add_together(self, clients: Sequence[ClientId], values: Tensor, weights: Sequence[int]) -> None:
        is_fit = torch.ones(len(clients), dtype=torch.bool)
        low, high = values.aminmax()
        if not (low.isfinite() and high.isfinite() and max(-float(low), float(high)) <= self._grid.max_abs):
            for i, client in enumerate(clients):
                is_fit[i] = self._is_fit(client, values[i])
        kept = is_fit.nonzero().squeeze(1).tolist()
        rows = values if len(kept) == len(clients) else values[is_fit]
        counted = torch.tensor([weights[i] for i in kept], dtype=torch.int64)
        self.total.merge_sums((self._weighted_sum(rows, counted),), int(counted.sum()), len(kept))
        self.sizes.update(dict.fromkeys((clients[i] for i in kept), self.update_bytes))
        self.parts.extend(Part(weights[i], self._ranks[clients[i]]) for i in kept)

    def _weighted_sum(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Of their integers: int64 (n_values,)."""
        summed = torch.zeros(rows.shape[1], dtype=torch.int64)
        n_at_once = max(1, _BLOCK_VALUES // rows.shape[1])
        for some, counted in zip(rows.split(n_at_once), weights.split(n_at_once), strict=True):
            summed += to_integers(some.reshape(-1), self._grid).view_as(some).mul_(counted.unsqueeze(1)).sum(0)
        return summed

    def _is_fit(self, client: ClientId, row: Tensor) -> bool:
        try:
            check_values(row, self._grid)
        except (NonFiniteUpdate, UpdateOutOfRange) as error:
            self.refused[client] = str(error)
            return False
        return True

    def _add_one(self, client: ClientId, row: Tensor, weight: int) -> None:
        rank = self._ranks[client]
        try:
            update = self._written(client, row, rank)
            head = self.codec.header_bytes
            pieces = [piece.clone() for piece in self.codec.integers(update[:head], [update[head:]], rank)]
        except UpdateRefused as error:
            self.refused[client] = str(error)
            return
        self.total.add(pieces, weight)
        self.sizes[client] = len(update)
        self.parts.append(Part(weight, rank))

    def _written(self, client: ClientId, row: Tensor, rank: int) -> bytes:
        if not (isinstance(self.codec, VectorUpdateCodec) and self._codec_plan.feedback):
            return b"".join(self.codec.encode(lambda: iter([row]), rank))
        fed = self.codec.encode_fed(lambda: iter([row]), rank, self._version, self._memory.left.get(client))
        update = b"".join(fed.pieces)
        self.left[client] = fed.left
        return update
