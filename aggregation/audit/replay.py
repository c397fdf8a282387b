"""A committed round made again from its audit bundle, its updates and the model that it began with: the same bits.

Whoever has the files drives this: `fold` each update, in any order, then `require_sum`, then `next_master` and
`Layout.published` (or, where clients are sent changes, `publishing.py`), whose files must have the hashes of the
bundle's `model_out`.
"""

from collections.abc import Iterable

from torch import Tensor

from umbel.aggregation.audit.bundle import AuditFailed, Participant, RoundEnded, sum_sha256
from umbel.aggregation.codec.entropy.payload import Buffer
from umbel.aggregation.codec.update_codec import Part, UpdateCodec, codec_for
from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.model.layout import Layout, State
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.round import ranks_of
from umbel.aggregation.types import ClientId


class Replay:
    """One round being made again. Memory: the exact sum, 8 bytes a value. Everything here raises `AuditFailed`."""

    def __init__(self, ended: RoundEnded, layout: Layout) -> None:
        if ended.sum is None:
            raise AuditFailed(f"round {ended.round}, attempt {ended.attempt}, was abandoned: it made no model")
        if ended.plan.is_secure:
            raise AuditFailed(
                f"round {ended.round} was a secure one: nobody has its updates, so its sum can only be taken as signed"
            )
        self._ended, self._expected, self._layout = ended, ended.sum, layout
        self.codec: UpdateCodec = codec_for(ended.plan.codec, ended.grid, layout)
        self._total = self.codec.new_sum()
        self._ranks = ranks_of(ClientId(one.client) for one in ended.clients)

    def fold(self, one: Participant, header: bytes, pieces: Iterable[Buffer]) -> None:
        """Add an update that has the hash of its report: the first `codec.header_bytes`, then the rest, in pieces."""
        assert one.weight is not None, "only what was accepted is in the sum"
        try:
            self._total.add(self.codec.integers(header, pieces, self._rank(one)), one.weight)
        except (UpdateRefused, ValueError) as error:
            raise AuditFailed(f"the update of {one.client} could never be accepted: {error}") from error

    def require_sum(self) -> str:
        """The hash of the sum, which is the bundle's."""
        total, expected = self._total, self._expected
        if (total.n_folded, total.total_weight) != (expected.n_clients, expected.total_weight):
            folded = counted(total.n_folded, "update was", "updates were")
            raise AuditFailed(f"{folded} folded, the bundle's sum is of {expected.n_clients}")
        if (found := sum_sha256(total)) != expected.sha256:
            raise AuditFailed(f"the updates add up to {found[:16]}…, not to the bundle's sum {expected.sha256[:16]}…")
        if (rms := self.codec.update_rms(total)) != expected.update_rms:
            raise AuditFailed(f"the sum measures the updates as {rms}, the bundle says {expected.update_rms}")
        return found

    def next_master(self, master: State) -> dict[str, Tensor]:
        """The full-precision copy of the model that the round made, from the one that it began with."""
        try:
            parts = [Part(one.weight, self._rank(one)) for one in self._ended.accepted if one.weight is not None]
            mean = self.codec.mean(self._total, parts)
            return self._layout.add_mean(master, mean, self._ended.server_learning_rate)
        except (ValueError, KeyError, RuntimeError) as error:  # RuntimeError: torch's, of tensors of other shapes
            raise AuditFailed(f"no model can be made of the sum: {error}") from error

    def _rank(self, one: Participant) -> int:
        return self._ranks[ClientId(one.client)]
