"""The codec of a run's newest attempt and the ranks of its cohort, made once for each attempt."""

from collections.abc import Iterable

from umbel.aggregation.codec.update_codec import Part, UpdateCodec, UpdateReader, codec_for
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import RoundPlan, ranks_of
from umbel.aggregation.round.states import Committed, Recruiting
from umbel.aggregation.secagg.masked_input import MaskedReader
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.types import ClientId
from umbel.server.store.stored import LiveRun


class RoundCodec:
    """What updates of an attempt are read with. Ask with the run as it is at that moment."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._reader: tuple[int, UpdateReader] | None = None
        self._ranks: tuple[int, dict[ClientId, int]] | None = None

    def of(self, live: LiveRun) -> UpdateReader:
        """What reads the updates that the attempt's plan asks for."""
        if self._reader is None or self._reader[0] != live.round_id:
            self._reader = live.round_id, self._reader_of(live.plan)
        return self._reader[1]

    def composition(self, plan: RoundPlan) -> Composition:
        """The numbers that are masked in a secure round."""
        assert plan.secure, "only secure rounds have them"
        return Composition(plan.codec, plan.secure, plan.grid, plan.sample_count_max, self._layout)

    def plain(self, plan: RoundPlan) -> UpdateCodec:
        """The codec of a round whose updates are not masked."""
        return codec_for(plan.codec, plan.grid, self._layout)

    def _reader_of(self, plan: RoundPlan) -> UpdateReader:
        return MaskedReader(self.composition(plan)) if plan.is_secure else self.plain(plan)

    def rank(self, live: LiveRun, client: ClientId) -> int:
        """The client's place in the cohort, which has been drawn."""
        if self._ranks is None or self._ranks[0] != live.round_id:
            state = live.state.closing if isinstance(live.state, Committed) else live.state
            assert not isinstance(state, Recruiting), "a cohort has been drawn"
            self._ranks = live.round_id, ranks_of(state.cohort)
        return self._ranks[1][client]

    def parts(self, live: LiveRun, weights: Iterable[tuple[ClientId, int]]) -> list[Part]:
        """These clients, by weight, as parts of the round's sum."""
        return [Part(weight, self.rank(live, client)) for client, weight in weights]
