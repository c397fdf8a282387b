"""The updates of one simulated secure round: clipped, weighed, rotated, rounded, with their noise, and summed.

Each client's integers are those that an SDK would mask (`secagg/contribution.py`). Masks cancel in the sum, so it is
that of these integers, modulo what each of them has bits for. Where the masks are computed all the same, the sum is
read from what they leave over.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.secagg.masked_input import MaskedReader
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import (
    CONTRIBUTION_SECRET_BYTES,
    Contribution,
    ContributionRefused,
    LocalWork,
    contribution,
)
from umbel.aggregation.secagg.numbers.totals import Totals, totals
from umbel.aggregation.types import ClientId
from umbel.sim.secure.exchange import seeded_bytes


class MaskedUplink:
    """Of one attempt. `sizes`, `refused`: as of an `Uplink`. `made`: what each client masks, kept for those who mask it
    only where `keeps`, and else summed at once.
    """

    def __init__(self, plan: RoundPlan, layout: Layout, ranks: Mapping[ClientId, int], *, keeps: bool) -> None:
        assert plan.secure is not None, "it is of a secure round"
        self.composition = Composition(plan.codec, plan.secure, plan.grid, plan.sample_count_max, layout)
        self.sizes = dict[ClientId, int]()
        self.refused = dict[ClientId, str]()
        self.made = dict[ClientId, Contribution]()
        self._plan, self._ranks, self._keeps = plan, ranks, keeps
        reader = MaskedReader(self.composition)
        self._total = reader.new_sum()
        self.update_bytes = reader.update_bytes.start

    def add(self, clients: Sequence[ClientId], values: Tensor, works: Sequence[WorkDone]) -> None:
        """Make what some clients mask of their changes. `values`: float32 (k, n_values)."""
        for client, row, work in zip(clients, values, works, strict=True):
            try:
                made = self._made(client, row, work)
            except (UpdateRefused, ContributionRefused) as error:
                self.refused[client] = str(error)
                continue
            self.sizes[client] = self.update_bytes
            if self._keeps:
                self.made[client] = made
            else:
                self._total.add((*made.levels(), made.words), 1)

    def _made(self, client: ClientId, row: Tensor, work: WorkDone) -> Contribution:
        secret = contribution_secret(self._plan.seed_of(client), self._plan.attempt)
        is_covered = self.composition.secure.noise is not None  # as by a site that has a budget
        return contribution(self.composition, lambda: iter([row]), _local(work), secret, is_covered=is_covered)

    def totals(self, clients: Sequence[ClientId], n_draws: int, unmasked: tuple[Tensor, Tensor] | None) -> Totals:
        """What these have said together. `unmasked`: the sums of levels and words, where masks were taken off them.

        Raises `TotalsRefused`.
        """
        n_levels = self.composition.n_levels
        levels, words = unmasked or (self._total.sums[:n_levels], self._total.sums[n_levels:])
        return totals(self.composition, levels, words, [self._ranks[client] for client in clients], n_draws)


def contribution_secret(client_seed: int, attempt: int) -> bytes:
    """What a simulated client draws its dither and noise from: its own in each attempt, the same in each simulation.

    `client_seed`: that of its training (`RoundPlan.seed_of`).
    """
    return seeded_bytes(f"contribution/{client_seed}/{attempt}")(CONTRIBUTION_SECRET_BYTES)


def _local(work: WorkDone) -> LocalWork:
    return LocalWork(
        sample_count=work.sample_count,
        steps_done=work.steps_done,
        steps_planned=work.steps_planned,
        metrics=work.metrics,
        evaluation=work.evaluation,
        evaluation_sample_count=work.evaluation_sample_count,
    )
