"""The updates of one simulated attempt: what clients write, and what the coordinator reads and sums.

- `PlainUplink`: updates are written and read with the run's codec. Float32 updates are not written out: the integers
  that the coordinator would read are made for a whole group of clients at once, and are the same.
- `MaskedUplink`: each client's integers are those that an SDK would mask (`secagg/numbers/contribution.py`). Masks
  cancel in the sum, so it is the sum of these integers modulo the bits of each. Where masks are computed anyway, the
  sum is read from what remains after unmasking.
- `CanaryUplink`: a canary's updates are inspected one by one and never summed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from umbel.aggregation.algorithms.fednova import normalised
from umbel.aggregation.algorithms.qfedavg import FairTerms, loss_weight, weighed
from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.codec.update_codec import Float32Codec, codec_for
from umbel.aggregation.codec.vector_update import VectorUpdateCodec
from umbel.aggregation.errors import NonFiniteUpdate, UpdateOutOfRange, UpdateRefused
from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.model.next_model import HasMean
from umbel.aggregation.model.state import CountPlaces
from umbel.aggregation.plans.codec import Part
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.reports import EvaluationDone, Probe, WorkDone
from umbel.aggregation.round.states import Closing
from umbel.aggregation.run.canary import CanaryClosed, CanaryUpdate
from umbel.aggregation.secagg.masked_input import MaskedReader
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import (
    Contribution,
    ContributionRefused,
    LocalWork,
    contribution,
    nothing,
    seeded_secret,
)
from umbel.aggregation.secagg.numbers.totals import Totals, totals
from umbel.aggregation.stated_order import norm_of_pieces
from umbel.aggregation.types import METRIC_ABS_MAX, ClientId
from umbel.aggregation.update.grid import GridAccumulator, IntegerSum, check_values, sum_sha256, to_integers
from umbel.sim.federation.memory import Memory
from umbel.sim.federation.site_policies import SitePolicies
from umbel.sim.federation.window import Played

_BLOCK_VALUES = 1 << 18  # values that fit the cache with their integers


@dataclass(frozen=True, slots=True)
class RoundSum:
    """What a round's sum says."""

    mean: HasMean
    sum_sha256: str
    update_rms: float | None = None
    totals: Totals | None = None  # of a masked sum


def sent_part(layout: Layout, changes: Tensor, control: Tensor | None = None) -> Tensor:
    """The values that clients send, in the order of `layout.update`: float32 (k, n).

    `layout`: of the run. `changes`: of the whole model, (k, `layout.model.n_values`). `control`: what clients send of
    their control variates, at the places of their weights, as large.
    """
    if control is None and layout.update is layout:
        return changes
    places = {spec.name: spec.place for spec in layout.model.owners()}

    def of(spec: TensorSpec) -> Tensor:
        if spec.controls is None:
            return changes[:, places[spec.name]]
        assert control is not None, "a layout with control variates comes with changes of them"
        return control[:, places[spec.controls]]

    return torch.cat([of(spec) for spec in layout.update.owners()], dim=1)


def model_part(layout: Layout, sent: Tensor) -> Tensor:
    """Of what clients send, (k, n), the changes of the model itself, without those of control variates."""
    if not layout.has_control:
        return sent
    return torch.cat([sent[:, spec.place] for spec in layout.update.owners() if spec.controls is None], dim=1)


def divide_by_steps(layout: Layout, changes: Tensor, steps: Sequence[int]) -> None:
    """Divide in place as the SDK does under FedNova. `changes`: float32 (k, n), of the whole model."""
    for spec in layout.model.owners():
        if spec.is_stepped:
            for row, n_steps in zip(changes[:, spec.place], steps, strict=True):
                row.copy_(normalised(row, n_steps))


def weigh(layout: Layout, changes: Tensor, losses: Sequence[float], terms: FairTerms) -> list[float]:
    """Multiply the changes in place as the SDK does under q-FedAvg. Returns the norms that clients report.

    `changes`: float32 (k, n), of the whole model. `losses`: of the round's model, for each client. A change whose loss
    or norm is not finite becomes NaN, which the uplink refuses.
    """
    norms = [
        norm_of_pieces(change[spec.place][piece] for spec, piece in layout.pieces() if spec.is_stepped)
        for change in changes
    ]
    for change, loss, norm in zip(changes, losses, norms, strict=True):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            change.fill_(math.nan)
            continue
        weight = loss_weight(loss, terms)
        for spec in layout.owners():
            if spec.is_stepped:
                change[spec.place] = weighed(change[spec.place], weight)
    return norms


Read: TypeAlias = Callable[[int, int], Tensor]
"""Coordinates of an update, from one to before another, as the coordinator reads them: float64."""


class Uplink(ABC):
    """Takes the updates of one attempt."""

    def __init__(self, ranks: Mapping[ClientId, int], update_bytes: int) -> None:
        self.update_bytes = update_bytes  # the greatest possible length of an update
        self.sizes = dict[ClientId, int]()  # bytes of each update on the wire
        self.read = dict[ClientId, Read]()  # of clients with control variates, until somebody takes it
        self.refused = dict[ClientId, str]()  # why an update does not count, in the words of the SDK or the coordinator
        self._ranks = ranks

    def add(
        self, clients: Sequence[ClientId], values: Tensor, works: Sequence[WorkDone], weights: Sequence[int]
    ) -> None:
        """Take the updates of some clients. `values`: float32 (k, n_values); `works`: what each reports."""
        for client, row, work, weight in zip(clients, values, works, weights, strict=True):
            try:
                self.sizes[client] = self._add_one(client, row, work, weight)
            except (UpdateRefused, ContributionRefused) as error:
                self.refused[client] = str(error)

    @abstractmethod
    def _add_one(self, client: ClientId, row: Tensor, work: WorkDone, weight: int) -> int:
        """Take one update; its length."""

    @abstractmethod
    def result(self, played: Played, closing: Closing, works: Sequence[WorkDone]) -> RoundSum | CanaryClosed:
        """The result of a closed round. `works`: by rank. Raises `TotalsRefused`."""

    def keep(self) -> None:  # noqa: B027 - most keep nothing
        """The round has made a model: keep what clients keep of it."""


class PlainUplink(Uplink):
    """Sums updates that the coordinator can read. `left`: the new residuals of error feedback, which are kept once the
    round has made a model.
    """

    def __init__(self, plan: RoundPlan, layout: Layout, ranks: Mapping[ClientId, int], version: int, memory: Memory):
        self.codec = codec_for(plan.codec, plan.grid, layout)
        super().__init__(ranks, self.codec.update_bytes[-1])
        self.total: IntegerSum = self.codec.new_sum()
        self.parts = list[Part]()
        self.left = dict[ClientId, Residual]()
        self._grid, self._codec_plan, self._counted = plan.grid, plan.codec, CountPlaces(layout.update)
        self._version, self._memory, self._has_control = version, memory, layout.has_control

    def add(
        self, clients: Sequence[ClientId], values: Tensor, works: Sequence[WorkDone], weights: Sequence[int]
    ) -> None:
        if isinstance(self.codec, Float32Codec) and isinstance(self.total, GridAccumulator):
            self._add_together(clients, values, weights)
        else:
            super().add(clients, values, works, weights)

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
        if self._has_control:
            for i, row in zip(kept, rows, strict=True):
                self._note_read(clients[i], [to_integers(row, self._grid)])
        self.sizes.update(dict.fromkeys((clients[i] for i in kept), self.update_bytes))
        self.parts.extend(Part(weights[i], self._ranks[clients[i]]) for i in kept)

    def _weighted_sum(self, rows: Tensor, weights: Tensor) -> Tensor:
        """The sum of their integers, weighted but for tensors of the kind count: int64 (n_values,)."""
        summed = torch.zeros(rows.shape[1], dtype=torch.int64)
        n_at_once = max(1, _BLOCK_VALUES // rows.shape[1])
        for some, counted in zip(rows.split(n_at_once), weights.split(n_at_once), strict=True):
            integers = to_integers(some.reshape(-1), self._grid).view_as(some)
            once = [(here, integers[:, here].sum(0)) for _, here in self._counted.within(0, rows.shape[1])]
            before = [summed[here].clone() for here, _ in once]
            summed += integers.mul_(counted.unsqueeze(1)).sum(0)
            for (here, added), earlier in zip(once, before, strict=True):
                summed[here] = earlier + added
        return summed

    def _is_fit(self, client: ClientId, row: Tensor) -> bool:
        try:
            check_values(row, self._grid)
        except (NonFiniteUpdate, UpdateOutOfRange) as error:
            self.refused[client] = str(error)
            return False
        return True

    def _add_one(self, client: ClientId, row: Tensor, work: WorkDone, weight: int) -> int:
        rank, head = self._ranks[client], self.codec.header_bytes
        update = self._written(client, row, rank)
        pieces = [piece.clone() for piece in self.codec.integers(update[:head], [update[head:]], rank)]
        self.total.add(pieces, weight)
        self.parts.append(Part(weight, rank))
        if self._has_control:
            self._note_read(client, pieces)
        return len(update)

    def _note_read(self, client: ClientId, pieces: Sequence[Tensor]) -> None:
        """Note what the integers of this client's update say."""
        alone = self.codec.new_sum()
        alone.add(pieces, 1)
        self.read[client] = self.codec.mean(alone, [Part(1, self._ranks[client])]).mean_slice

    def _written(self, client: ClientId, row: Tensor, rank: int) -> bytes:
        if not (isinstance(self.codec, VectorUpdateCodec) and self._codec_plan.feedback):
            return b"".join(self.codec.encode(lambda: iter([row]), rank))
        fed = self.codec.encode_fed(lambda: iter([row]), rank, self._version, self._memory.left.get(client))
        update = b"".join(fed.pieces)
        self.left[client] = fed.left
        return update

    def result(self, played: Played, closing: Closing, works: Sequence[WorkDone]) -> RoundSum:
        if self.total.total_weight != closing.aggregate.total_weight:
            raise AssertionError("the sum is not that of the accepted reports")
        mean = self.codec.mean(self.total, self.parts)
        return RoundSum(mean, sum_sha256(self.total), self.codec.update_rms(self.total))

    def keep(self) -> None:
        self._memory.left = self.left


class MaskedUplink(Uplink):
    """Sums masked updates. With `keeps`, it keeps each client's input in `made` for masking instead of summing it."""

    def __init__(
        self,
        plan: RoundPlan,
        layout: Layout,
        ranks: Mapping[ClientId, int],
        *,
        keeps: bool,
        sites: SitePolicies | None = None,
    ) -> None:
        assert plan.secure is not None, "only secure rounds mask updates"
        only = not plan.task.sends_updates
        self.composition = Composition(plan.codec, plan.secure, plan.grid, plan.sample_count_max, layout, only)
        reader = MaskedReader(self.composition)
        super().__init__(ranks, reader.update_bytes.start)
        self.made = dict[ClientId, Contribution]()
        self._plan, self._keeps, self._sites = plan, keeps, sites or SitePolicies()
        self._has_control = layout.has_control
        self._total = reader.new_sum()
        # The last bit of a norm depends on the pieces, so a row is read in those of a client.
        self._pieces = [piece.stop - piece.start for _, piece in layout.update.pieces()]

    def _add_one(self, client: ClientId, row: Tensor, work: WorkDone, weight: int) -> int:
        secret = seeded_secret(self._plan.seed_of(client), self._plan.attempt)
        is_covered = self._sites.relies_on(client, self.composition.secure.noise)
        change, local = partial(self._pieces_of, row), self._sites.as_sent(client, LocalWork.of(work))
        made = contribution(self.composition, change, local, secret, is_covered=is_covered)
        self._take(client, made)
        if self._has_control:
            whole = made.decoded.to(torch.float64)
            self.read[client] = lambda start, stop: whole[start:stop]
        return self.update_bytes

    def _take(self, client: ClientId, made: Contribution) -> None:
        if self._keeps:
            self.made[client] = made
        else:
            self._total.add((*made.levels(), made.words), 1)

    def add_measured(self, client: ClientId, done: EvaluationDone | None) -> None:
        """Take what a client measured in an evaluation; None if it has no held-out data."""
        work = LocalWork.measured_in(done)
        secret = seeded_secret(self._plan.seed_of(client), self._plan.attempt)
        sent = self._sites.as_sent(client, work)
        self._take(client, contribution(self.composition, nothing(self.composition), sent, secret))
        self.sizes[client] = self.update_bytes

    def _pieces_of(self, row: Tensor) -> Iterator[Tensor]:
        return iter(row.split(self._pieces))

    def totals(self, clients: Sequence[ClientId], unmasked: tuple[Tensor, Tensor] | None) -> Totals:
        """The decoded sums of these clients. `unmasked`: the sums of levels and words, where they were unmasked.

        Raises `TotalsRefused`.
        """
        n_levels = self.composition.n_levels
        levels, words = unmasked or (self._total.sums[:n_levels], self._total.sums[n_levels:])
        return totals(self.composition, levels, words, [self._ranks[client] for client in clients])

    def result(self, played: Played, closing: Closing, works: Sequence[WorkDone]) -> RoundSum:
        found = self.totals(sorted(closing.accepted), played.sums)
        return RoundSum(found.mean, found.sum_sha256, totals=found)


class CanaryUplink(Uplink):
    """Reads the updates of a canary. `largest`: the largest change of one value in each."""

    def __init__(self, plan: RoundPlan, layout: Layout, ranks: Mapping[ClientId, int]) -> None:
        self.codec = codec_for(plan.codec, plan.grid, layout)
        super().__init__(ranks, self.codec.update_bytes[-1])
        self.largest = dict[ClientId, float]()

    def _add_one(self, client: ClientId, row: Tensor, work: WorkDone, weight: int) -> int:
        rank, head = self._ranks[client], self.codec.header_bytes
        update = b"".join(self.codec.encode(lambda: iter([row]), rank))
        self.largest[client] = self.codec.largest_change(update[:head], [update[head:]], rank)
        return len(update)

    def result(self, played: Played, closing: Closing, works: Sequence[WorkDone]) -> CanaryClosed:
        """The updates of the accepted clients, for the verdicts. `works`: with their probes."""
        return CanaryClosed(
            {
                client: CanaryUpdate(works[self._ranks[client]], self.sizes[client], self.largest[client])
                for client in closing.accepted
            }
        )


def probe_of(steps_full: int, step_s: float, down_bytes_per_s: float, losses: tuple[float, float, float]) -> Probe:
    """A client's probe. `losses`: of its first step, its last, and the mean. A simulated device has enough memory."""
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
