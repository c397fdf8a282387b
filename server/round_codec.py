"""The codec of a run's newest attempt and the ranks of its cohort, made once for each attempt."""

from collections.abc import Iterable

from umbel.aggregation.layout import Layout
from umbel.aggregation.round import Committed, Recruiting
from umbel.aggregation.types import ClientId, ranks_of
from umbel.aggregation.update_codec import Part, UpdateCodec, codec_for
from umbel.server.stored import LiveRun


class RoundCodec:
    """What updates of an attempt are read with. Ask with the run as it is at that moment."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._codec: tuple[int, UpdateCodec] | None = None
        self._ranks: tuple[int, dict[ClientId, int]] | None = None

    def of(self, live: LiveRun) -> UpdateCodec:
        """The codec that the attempt's plan asks for."""
        if self._codec is None or self._codec[0] != live.round_id:
            self._codec = live.round_id, codec_for(live.plan.codec, live.plan.grid, self._layout)
        return self._codec[1]

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
