"""Error feedback: the part of a change that a lossy codec did not send is added to the next change.

Karimireddy, Rebjock, Stich and Jaggi: Error feedback fixes SignSGD and other gradient compression schemes (ICML 2019),
algorithm 2. The idea is from Seide et al. (2014). With the weight change delta and the residual e,

    p = delta + e;    send C(p);    e' = p - C(p).

So nothing is lost: after any number of rounds, all payloads and the residual add up to all changes.

Lin, Han, Mao, Wang and Dally: Deep gradient compression (ICLR 2018), section 3, also accumulates velocity (momentum
correction). Then a coordinate that waits long has moved as far as momentum would have moved it:

    g = delta min(1, C / ||delta||)                local clipping: the paper's threshold divided by sqrt(N), N clients;
    u' = m u + g;    v' = v + u';    send C(v');    u and v become 0 where it was sent (momentum factor masking)

It sends more coordinates in the first rounds (`section.warm_up_share`).

Codecs have no state; error feedback has. The state belongs to a version of the model. It is used only with the change
of the next version, and dropped if the client has missed a version, because by then it points away from the other
clients' models. These functions change nothing in place: the caller keeps the old state until the round is committed.
The payload of an abandoned round is not in the model, so the next attempt must begin with the same state.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from umbel.aggregation.codec.vectors.codec import CodecContext, VectorCodec, require_encodable


@dataclass(frozen=True, slots=True)
class Residual:
    """The part of a weight change that was not sent."""

    version: int  # of the model that the change was made from
    values: Tensor  # float32, one for each coordinate
    velocity: Tensor | None = None  # u of deep gradient compression; None in plain error feedback

    def to_tensors(self) -> dict[str, Tensor]:
        """For a safetensors file."""
        tensors = {"version": torch.tensor(self.version, dtype=torch.int64), "residual": self.values}
        return tensors if self.velocity is None else {**tensors, "velocity": self.velocity}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Residual":
        """The inverse of `to_tensors`. Raises `ValueError` for other tensors."""
        if not {"version", "residual"} <= set(tensors) <= {"version", "residual", "velocity"}:
            raise ValueError(
                f"not a state of error feedback: it contains the tensors {sorted(tensors)}; it must contain version "
                "and residual, and may contain velocity"
            )
        version, values, velocity = tensors["version"], tensors["residual"], tensors.get("velocity")
        if version.dtype != torch.int64 or version.dim() or int(version) < 0:
            raise ValueError("not a state of error feedback: its version must be one int64 of at least 0")
        for vector in (values, velocity):
            if vector is not None and not _is_change(vector, values.numel()):
                raise ValueError("not a state of error feedback: its vectors must be finite float32 of one length")
        return cls(int(version), values, velocity)


@dataclass(frozen=True, slots=True)
class SentPayload:
    """A payload or a whole update, and the residual to keep once the round has been committed."""

    pieces: tuple[bytes, ...]
    left: Residual


def send(
    codec: VectorCodec,
    change: Tensor,
    context: CodecContext,
    version: int,
    before: Residual | None,
    momentum: float | None = None,
) -> SentPayload:
    """Encode the clipped change of model `version` plus the last residual.

    `momentum`: m of deep gradient compression, for a codec that sends some of the coordinates (`TopK`); the rounding
    error of a sent value stays in v. Raises `ValueError` for values that cannot be encoded.
    """
    require_encodable(change, context)
    kept = _kept(before, context, version)
    if momentum is not None and kept is not None and kept.velocity is not None:
        change = change + kept.velocity.to(change.device) * momentum
    wanted = change if kept is None else change + kept.values.to(change.device)
    pieces = tuple(codec.encode(wanted, context))
    decoded = torch.cat([torch.empty(0), *codec.decode(pieces, context)])  # as the coordinator will decode it
    velocity = None if momentum is None else torch.where(decoded == 0, change.cpu(), 0.0)
    return SentPayload(pieces, Residual(version, wanted.cpu() - decoded, velocity))


def _kept(before: Residual | None, context: CodecContext, version: int) -> Residual | None:
    """The residual, if it is from the version just before and of this model's size."""
    if before is None or before.version + 1 != version or before.values.numel() != context.n_values:
        return None
    return before


def _is_change(vector: Tensor, n_values: int) -> bool:
    return vector.dtype == torch.float32 and vector.shape == (n_values,) and bool(vector.isfinite().all())
