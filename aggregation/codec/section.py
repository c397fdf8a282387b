"""What the run file's [codec] says, checked; and the codec of each round that follows from it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from umbel.aggregation.codec.combinations import require_codec
from umbel.aggregation.codec.feedback import warm_up_share
from umbel.aggregation.codec.plan import STEP_MAX, STEP_MIN, first_plan, next_plan
from umbel.aggregation.codec.rate import ERROR_MAX, ERROR_MIN, RoundShown, coarsest_step, step_for
from umbel.aggregation.codec.vectors.registry import parameters_of
from umbel.aggregation.codec.vectors.topk import TopK
from umbel.aggregation.plans.codec import Codec, CodecPlan, Parameter
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import NORM_MAX, NORM_MIN

Name = Literal[
    "float32", "integer", "auto", "eden", "sign", "ternary", "qsgd", "topk", "mask", "lowrank", "planes"
]  # fmt: skip
_STEP, _FIRST_NORM, _ERROR = 0.5, 1.0, 0.01
_WARM_UP_ROUNDS_MAX = 1_000_000
_OF_VECTORS = ("clip_norm", "error_feedback")


def codec_key(seed: int, number: int) -> int:
    """What all that a codec draws by chance in one round is keyed by."""
    return derive_seed(seed, "codec", number)


@dataclass(frozen=True, slots=True)
class CodecSection:
    """How updates are written. None: as the codec has it by default; a key that is not the codec's is refused.

    `error`: for "auto", the greatest error of one update, a share of its energy. The other keys: `plan.py`, and the
    file of the codec with this name.
    """

    name: Name = "float32"
    step: float | None = None
    first_norm: float | None = None
    clip_norm: float | None = None
    error: float | None = None
    bits: int | None = None
    levels: int | None = None
    share: float | None = None
    every: int | None = None
    rank: int | None = None
    mode: Literal["structured", "sketched"] | None = None
    precision: Literal["float32", "bfloat16"] | None = None
    clip_sigmas: float | None = None
    error_feedback: bool = False
    momentum: float | None = None
    warm_up_rounds: int | None = None
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if self.name not in get_args(Name):  # an auditor reads it from a bundle, past pydantic
            raise ValueError(f"name must be one of {', '.join(get_args(Name))}, not {self.name!r:.40}")
        for one in fields(self):
            if one.name not in ("name", *self._keys) and getattr(self, one.name) != one.default:
                takes = ", ".join(self._keys) or "no other key"
                raise ValueError(f'{one.name} is not for name = "{self.name}", which takes {takes}')
        for name, least, most in (
            ("step", STEP_MIN, STEP_MAX),
            ("first_norm", NORM_MIN, NORM_MAX),
            ("error", ERROR_MIN, ERROR_MAX),
            ("warm_up_rounds", 1, _WARM_UP_ROUNDS_MAX),
        ):
            if (value := getattr(self, name)) is not None and not least <= value <= most:
                raise ValueError(f"{name} must lie between {least:g} and {most:g}, not {value!r:.40}")
        require_codec(self.first(1, 0))  # refuses what no round could be planned with

    @property
    def codec(self) -> Codec:
        """Which codec it is; "auto" is the integer codec at a step that it finds."""
        return Codec.INTEGER if self.name == "auto" else Codec[self.name.upper()]

    def first(self, n_values: int, key: int) -> CodecPlan:
        """The codec of a run's first round. `n_values`: of the model."""
        if self.codec is Codec.FLOAT32:
            return CodecPlan()
        if self.codec is not Codec.INTEGER:
            how = {"feedback": self.error_feedback, "momentum": self.momentum}
            return CodecPlan(self.codec, 0.0, key, self.clip_norm, self._parameters(1), **how)  # type: ignore[arg-type]
        norm = _FIRST_NORM if self.first_norm is None else self.first_norm
        norm = norm if self.clip_norm is None else min(norm, self.clip_norm)
        return first_plan(step=self.step_asked, norm=norm, n_values=n_values, key=key, clip_norm=self.clip_norm)

    def after(self, before: CodecPlan, number: int, shown: RoundShown, key: int) -> CodecPlan:
        """The codec of round `number`. `shown`: what the round of training before it has shown."""
        if self.codec is Codec.FLOAT32:
            return before
        if self.codec is not Codec.INTEGER:
            return replace(before, key=key, parameters=self._parameters(number))
        step = step_for(before, shown, self.step_asked) if self.name == "auto" else self.step_asked
        return next_plan(before, step=step, update_rms=shown.update_rms, key=key)

    @property
    def _keys(self) -> tuple[str, ...]:
        """What may be set beside the name."""
        if self.name == "float32":
            return ()
        if self.codec is Codec.INTEGER:
            return ("error" if self.name == "auto" else "step", "first_norm", "clip_norm")
        more = ("momentum", "warm_up_rounds") if self.codec is Codec.TOPK else ()
        return (*parameters_of(self.codec), *_OF_VECTORS, *more)

    @property
    def step_asked(self) -> float:
        """The integer codec's step as it is asked for, in units of an update's root mean square."""
        if self.name == "auto":
            return coarsest_step(_ERROR if self.error is None else self.error)
        return _STEP if self.step is None else self.step

    def _parameters(self, number: int) -> Mapping[str, Parameter]:
        """The codec's parameters in round `number`."""
        given = {name: getattr(self, name) for name in parameters_of(self.codec)}
        set_here = {name: value for name, value in given.items() if value is not None}
        if self.warm_up_rounds is not None:
            share = set_here.get("share", TopK().share)
            set_here["share"] = max(share, warm_up_share(number - 1, self.warm_up_rounds))
        return set_here
