"""How the updates of one run are written: the plan of each round, and what clients keep from one round to the next."""

from collections.abc import Iterator

from torch import Tensor

from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.codec.rate import RoundShown
from umbel.aggregation.codec.section import CodecSection, codec_key
from umbel.aggregation.codec.update_codec import UpdateCodec, codec_for
from umbel.aggregation.codec.vector_update import VectorUpdateCodec
from umbel.aggregation.codec.vectors.codec import Projections
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.grid import Grid
from umbel.aggregation.types import ClientId
from umbel.aggregation.update.integer_sum import IntegerSum

_WINDOW_S = 600.0


class Uplink:
    """The updates of a run, from round 1 on. `codec`: what the round at hand is written and read with."""

    def __init__(self, section: CodecSection, grid: Grid, layout: Layout, seed: int) -> None:
        self._section, self._grid, self._layout, self._seed = section, grid, layout, seed
        self._left = dict[ClientId, Residual]()
        self._number = 1
        self._begin(section.first(layout.n_values, codec_key(seed, 1)))

    def within(self) -> Projections:
        """By parameter, what takes a gradient to the part that can be sent; nothing where all of it can."""
        return self.codec.within()

    def write(self, client: ClientId, rank: int, change: Tensor) -> bytes:
        """A client's update, whole. `change`: float32, in layout order. What error feedback leaves over is kept."""
        if not self._plan.feedback:
            return b"".join(self.codec.encode(lambda: iter([change]), rank))
        assert isinstance(self.codec, VectorUpdateCodec), "no other has error feedback"
        fed = self.codec.encode_fed(lambda: iter([change]), rank, self._number, self._left.get(client))
        self._left[client] = fed.left
        return b"".join(fed.pieces)

    def read(self, update: bytes, rank: int) -> Iterator[Tensor]:
        """What is added to the round's sum for it."""
        return self.codec.integers(update[: self.codec.header_bytes], [update[self.codec.header_bytes :]], rank)

    def go_on(self, total: IntegerSum) -> None:
        """To the next round. `total`: the sum of the one at hand."""
        self._number += 1
        shown = RoundShown(_WINDOW_S, self._layout.n_values, self.codec.update_rms(total))
        self._begin(self._section.after(self._plan, self._number, shown, codec_key(self._seed, self._number)))

    def _begin(self, plan: CodecPlan) -> None:
        self._plan = plan
        self.codec: UpdateCodec = codec_for(plan, self._grid, self._layout)
