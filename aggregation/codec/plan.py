"""What a round says of how its updates are written; and how the integer codec's step follows from the round before.

The step of the integer codec is `step` (of the run file) times the root mean square of one client's update, as the
round before measured it: the error of one update is then about step^2 / 12 of its energy. The first round takes the
norm that the run file expects. So the step is public before anyone trains, and no client chooses it. It grows fourfold
a round at most: one client with an update far beyond the others' must not make the next round useless.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from umbel.aggregation.codec.feedback import MomentumCorrection
from umbel.aggregation.codec.vectors.registry import Parameter, vector_codec
from umbel.aggregation.update.wire import Codec

STEP_MIN, STEP_MAX = 2.0**-8, 16.0
GROWTH_MAX = 4.0
NORM_MIN, NORM_MAX = 2.0**-60, 2.0**60
_RATE_MIN, _RATE_MAX = 2.0**-100, 2.0**100  # of levels per unit: far from where float32 ends


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """How the updates of a round are written. The default is float32, which no bytes are saved by.

    `key`: of all that is drawn by chance; `clip_norm`: the greatest L2 norm of an update, None without one. The integer
    codec's: `inverse_step`, levels per unit of a weight, a float32. The others': their `parameters` (`registry.py`);
    `feedback`: what was not sent is added to the next change (`feedback.py`), with `momentum` as in deep gradient
    compression, if that is not None.
    """

    codec: Codec = Codec.FLOAT32
    inverse_step: float = 0.0
    key: int = 0
    clip_norm: float | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict[str, Parameter])
    feedback: bool = False
    momentum: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.key < 1 << 63:
            raise ValueError(f"key must lie between 0 and 2^63 - 1, not {self.key}")
        if self.clip_norm is not None and not NORM_MIN <= self.clip_norm <= NORM_MAX:
            raise ValueError(f"clip_norm must lie between 2^-60 and 2^60, not {self.clip_norm!r}")
        match self.codec:
            case Codec.FLOAT32 | Codec.INTEGER:
                if self.parameters or self.feedback or self.momentum is not None:
                    raise ValueError(f"{self.codec.name.lower()} takes no parameters, error feedback or momentum")
            case _:
                self._check_vector()
        if self.codec is Codec.INTEGER and not self._has_step():
            raise ValueError(f"inverse_step must be a float32 between 2^-100 and 2^100, not {self.inverse_step!r}")

    def at_step(self, step: float) -> CodecPlan:
        """The same codec with this step, in units of a weight; as near as float32 and the bounds allow."""
        inverse = 1.0 / min(max(step, 1.0 / _RATE_MAX), 1.0 / _RATE_MIN)
        return replace(self, inverse_step=as_float32(min(max(inverse, _RATE_MIN), _RATE_MAX)))

    def scale(self, norm: float) -> float:
        """What to multiply an update of this L2 norm by, so that it is within `clip_norm`: 1 if it is."""
        return 1.0 if self.clip_norm is None or norm <= self.clip_norm else self.clip_norm / norm

    @property
    def words(self) -> str:
        """For people: `integer, step 0.00012`; `topk, share 0.01, error feedback`."""
        said = [f"step {1 / self.inverse_step:.3g}"] if self.codec is Codec.INTEGER else []
        said += [f"{name} {value}" for name, value in self.parameters.items()]
        said += [] if self.clip_norm is None else [f"clip_norm {self.clip_norm:g}"]
        said += ["error feedback"] if self.feedback else []
        said += [] if self.momentum is None else [f"momentum {self.momentum:g}"]
        return ", ".join([self.codec.name.lower(), *said])

    def _has_step(self) -> bool:
        return _RATE_MIN <= self.inverse_step <= _RATE_MAX and as_float32(self.inverse_step) == self.inverse_step

    def _check_vector(self) -> None:
        """Raise `ValueError` for parameters that the codec does not take, and for combinations that cannot work."""
        if self.codec is Codec.MASKED:
            raise ValueError("masked updates hold the integers of the integer codec: plan that, and a secure round")
        name, codec = self.codec.name.lower(), vector_codec(self.codec, self.parameters)
        if self.feedback and not codec.is_contraction:
            raise ValueError(
                f"error feedback needs a codec that never moves away from what it is given; {name}, as it is set here, "
                "does, to be right on average, so that what is left over would grow from round to round. Leave "
                'error_feedback out, or take "topk", "sign", "planes", or a structured "mask" or "lowrank"'
            )
        if self.momentum is None:
            return
        if not self.feedback or self.codec is not Codec.TOPK:
            raise ValueError(
                'momentum corrects what waits to be sent (deep gradient compression): it needs name = "topk" and '
                "error_feedback = true"
            )
        MomentumCorrection(self.momentum)


def first_plan(*, step: float, norm: float, n_values: int, key: int, clip_norm: float | None) -> CodecPlan:
    """The integer codec of a run's first round. `norm`: what an update's L2 norm is expected to be."""
    plan = CodecPlan(Codec.INTEGER, 1.0, key, clip_norm)
    return plan.at_step(step * norm / math.sqrt(max(n_values, 1)))


def next_plan(before: CodecPlan, *, step: float, update_rms: float | None, key: int) -> CodecPlan:
    """The integer codec of the round after a round whose updates had this root mean square; None: it is not known."""
    plan = replace(before, key=key)
    if not update_rms:
        return plan
    return plan.at_step(min(step * update_rms, GROWTH_MAX / before.inverse_step))


def as_float32(value: float) -> float:
    """The nearest float32. Raises `OverflowError` beyond its range."""
    nearest: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return nearest
