"""Makes a committed round's model again, from its audit bundle, its updates and the model before: the same bits.

The caller has the files. It calls `fold` for each update, in any order, then `require_sum`, then `write_model`. The
files of that model must have the hashes in the bundle's `model_out`.
"""

from collections.abc import Iterable

from umbel.aggregation.algorithms.fednova import effective_steps, weighted_steps
from umbel.aggregation.algorithms.qfedavg import step_factor
from umbel.aggregation.audit.bundle import AuditFailed, Participant, RoundEnded
from umbel.aggregation.audit.chain import fair_report_of, steps_done_of
from umbel.aggregation.codec.entropy.payload import Buffer
from umbel.aggregation.codec.update_codec import UpdateCodec, codec_for
from umbel.aggregation.downlink.publishing import Publication, write_next_master
from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import ServerStep, write_next
from umbel.aggregation.model.state import Values
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.codec import Part
from umbel.aggregation.plans.round import ranks_of
from umbel.aggregation.types import ClientId
from umbel.aggregation.update.grid import sum_sha256


class Replay:
    """Replays one round. It holds the exact sum, 8 bytes a value. Every method raises `AuditFailed`.

    `aggregation`: that section of the run file.
    """

    def __init__(self, ended: RoundEnded, layout: Layout, aggregation: AggregationSection) -> None:
        if ended.sum is None:
            raise AuditFailed(
                f"round {ended.round}, attempt {ended.attempt}, made no model, so there is nothing to replay"
            )
        if ended.plan.is_secure:
            raise AuditFailed(
                f"round {ended.round} was a secure round: its updates were masked, so it cannot be replayed. Only the "
                "signature of its bundle can be checked"
            )
        self._ended, self._expected, self._layout = ended, ended.sum, layout
        self.step = ServerStep.at_rate(
            ended.server_learning_rate,
            (aggregation, ended.training),
            _factor(ended),
            _total_weight(ended),
        )
        self.codec: UpdateCodec = codec_for(ended.plan.codec, ended.grid, layout)
        self._total = self.codec.new_sum()
        self._ranks = ranks_of(ClientId(one.client) for one in ended.clients)

    def fold(self, one: Participant, header: bytes, pieces: Iterable[Buffer]) -> None:
        """Add an update that has the hash of its report: its first `codec.header_bytes`, then the rest in pieces."""
        assert one.weight is not None, "only accepted updates are in the sum"
        try:
            self._total.add(self.codec.integers(header, pieces, self._rank(one)), one.weight)
        except (UpdateRefused, ValueError) as error:
            raise AuditFailed(
                f"the update of {one.client} is invalid, so it cannot have been accepted: {error}"
            ) from error

    def require_sum(self) -> str:
        """Check that the updates add up to the bundle's sum; return its hash."""
        total, expected = self._total, self._expected
        if (total.n_folded, total.total_weight) != (expected.n_clients, expected.total_weight):
            raise AuditFailed(
                f"the replayed sum has {counted(total.n_folded, 'update')} of weight {total.total_weight} together, "
                f"but the bundle's sum has {expected.n_clients} of weight {expected.total_weight}"
            )
        if (found := sum_sha256(total)) != expected.sha256:
            raise AuditFailed(
                f"the updates add up to a sum with the hash {found[:16]}…, but the bundle's sum has the hash "
                f"{expected.sha256[:16]}…"
            )
        if (rms := self.codec.update_rms(total)) != expected.update_rms:
            raise AuditFailed(
                f"the updates have the root mean square {rms}, not {expected.update_rms} as in the bundle"
            )
        return found

    def write_model(self, start: Values, master: Values, public: Values, change_step: float | None) -> None:
        """Write the model that the round made: its master copy to `master`, the published model to `public`.

        `start`: the master copy before. `change_step`: of the run file; where it is set, `public` holds the published
        model before and is moved.
        """
        layout = self._layout
        parts = [Part(one.weight, self._rank(one)) for one in self._ended.accepted if one.weight is not None]
        try:
            mean = self.codec.mean(self._total, parts)
            if change_step is None:
                write_next(layout, start, mean, self.step, public, master)
            else:
                length = write_next_master(layout, start, mean, self.step, master, public, change_step)
                Publication(layout, length, master, public).move()
        except (ValueError, KeyError, RuntimeError) as error:  # RuntimeError: torch's, for tensors of other shapes
            raise AuditFailed(f"no model can be made of the sum: {error}") from error

    def _rank(self, one: Participant) -> int:
        return self._ranks[ClientId(one.client)]


def _factor(ended: RoundEnded) -> float:
    """FedNova's tau_eff or q-FedAvg's c, by what the clients have reported; 1 under other algorithms.

    Raises `AuditFailed`.
    """
    if (terms := ended.training.fair_terms) is not None and ended.accepted:
        return step_factor([fair_report_of(one) for one in ended.accepted], terms)
    if not ended.training.is_normalised:
        return 1.0
    counted = weighted_steps((one.weight or 0, steps_done_of(one)) for one in ended.accepted)
    return effective_steps(counted, _total_weight(ended))


def _total_weight(ended: RoundEnded) -> int:
    return sum(one.weight or 0 for one in ended.accepted)
