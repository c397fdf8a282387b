"""The run file's section [codec], checked, and the codec plan of each round that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from umbel.aggregation.codec.step import (
    ERROR_MAX,
    ERROR_MIN,
    STEP_MAX,
    STEP_MIN,
    RoundShown,
    coarsest_step,
    first_plan,
    next_plan,
    step_for,
)
from umbel.aggregation.plans.codec import Codec, CodecPlan, Parameter
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import NORM_MAX, NORM_MIN, require_within

if TYPE_CHECKING:
    from umbel.aggregation.codec.vectors.codec import VectorCodec


Name = Literal[
    "float32", "integer", "auto", "eden", "sign", "ternary", "qsgd", "topk", "mask", "lowrank", "planes"
]  # fmt: skip
_STEP, _FIRST_NORM, _ERROR = 0.5, 1.0, 0.01
_WARM_UP_ROUNDS_MAX = 1_000_000
MOMENTUM_MAX = 0.999
_WARM_UP_SHARES = (1 / 4, 1 / 16, 1 / 64, 0.004, 0.001)  # sparsity of 75, 93.75, 98.4375, 99.6 and 99.9 %
_OF_VECTORS = ("clip_norm", "error_feedback")
_WHY_NOT_SUMMABLE: Mapping[Codec, str] = MappingProxyType(
    {
        Codec.FLOAT32: "sums of float32 depend on their order, so a mask could not be removed exactly",
        Codec.INTEGER: "its integers are sent entropy coded, and coded bytes cannot be added",
        Codec.EDEN: "each client has its own rotation and its own scales, so their values cannot be added",
        Codec.SIGN: "each client has its own scales for positive and negative values, so signs cannot be added",
        Codec.TERNARY: "each client has its own scales, and levels of different scales cannot be added",
        Codec.QSGD: "each client scales its levels by its own norms and compresses them, so they cannot be added",
        Codec.TOPK: "each client chooses its own coordinates, so the same position stands for different weights",
        Codec.PLANES: "compressed bytes cannot be added, and their length differs from client to client",
        Codec.MASK: "with bfloat16 each client rounds for itself, and a sum of rounded values is not exact in bfloat16",
    }
)


def why_not_summable(plan: CodecPlan) -> str:
    """Why sums of this plan's payloads, position by position, cannot be decoded; empty if they can.

    They can if the codec is linear: then it sends a float32 vector, which can be put on a step as a weight change is.
    """
    codec = _vector_codec(plan)
    return "" if codec is not None and codec.is_linear else _WHY_NOT_SUMMABLE[plan.codec]


def require_codec(plan: CodecPlan) -> None:
    """Raise `ValueError` for parameters that the plan's codec does not take, and for combinations that cannot work."""
    codec, name = _vector_codec(plan), plan.codec.name.lower()
    if codec is None:
        return
    if plan.feedback and not codec.is_contraction:
        raise ValueError(
            f"error_feedback does not work with these settings of {name}: the codec's error can be larger than the "
            "update, so it would grow from round to round. Leave error_feedback out, or set name to "
            '"topk", "sign" or "planes", or to "mask" or "lowrank" with mode = "structured"'
        )
    if plan.momentum is None:
        return
    if not plan.feedback or plan.codec is not Codec.TOPK:
        raise ValueError(
            'momentum needs name = "topk" and error_feedback = true, because it corrects the residual of error '
            "feedback (deep gradient compression)"
        )
    require_within(plan.momentum, "momentum", 0, MOMENTUM_MAX)


def _vector_codec(plan: CodecPlan) -> VectorCodec | None:
    """The plan's codec of vectors; None for float32 and integer, which have no parameters to check."""
    if plan.codec in (Codec.FLOAT32, Codec.INTEGER):
        return None
    # This imports torch, which takes seconds: reading a run file must not need it for float32 and integer.
    from umbel.aggregation.codec.vectors.registry import vector_codec

    return vector_codec(plan.codec, plan.parameters)


def codec_key(seed: int, number: int) -> int:
    """The key of all random numbers that a codec draws in one round."""
    return derive_seed(seed, "codec", number)


@dataclass(frozen=True, slots=True)
class CodecSection:
    """How updates are encoded. None is the codec's default. A key that the codec does not take is refused.

    The keys below `error` are the parameters of the codecs in `vectors/`, each documented in its codec's file.
    """

    name: Name | None = None  # None: "integer" with secure aggregation, else "float32"; `RunFile` fills it in
    step: float | None = None  # of "integer", in root mean squares of an update
    first_norm: float | None = None  # the expected L2 norm of an update in the first round
    clip_norm: float | None = None  # the greatest L2 norm of an update
    error: float | None = None  # of "auto": the greatest error of one update, as a share of its energy
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
        if self.name is not None:
            self._check_name(self.name)
        for name, least, most in (
            ("step", STEP_MIN, STEP_MAX),
            ("first_norm", NORM_MIN, NORM_MAX),
            ("error", ERROR_MIN, ERROR_MAX),
            ("warm_up_rounds", 1, _WARM_UP_ROUNDS_MAX),
        ):
            if (value := getattr(self, name)) is not None and not least <= value <= most:
                raise ValueError(f"`{name}` must lie between {least:g} and {most:g}, not {value!r:.40}")
        require_codec(self.first(1, 0))  # refuses a section that no round can be planned with

    def _check_name(self, name: str) -> None:
        """Raise `ValueError` for an unknown name, and for a key that the codec of this name does not take."""
        if name not in get_args(Name):  # an auditor reads it from a bundle, without pydantic
            raise ValueError(f"name must be one of {', '.join(get_args(Name))}, not {name!r:.40}")
        for one in fields(self):
            if one.name not in ("name", *self._keys) and getattr(self, one.name) != one.default:
                takes = ", ".join(self._keys) or "no other key"
                raise ValueError(f'name = "{name}" does not take the key {one.name}; it takes {takes}')

    @property
    def codec(self) -> Codec:
        """The codec with this name; float32 without one. "auto" is the integer codec, with a step that it finds."""
        name = self.name or "float32"
        return Codec.INTEGER if name == "auto" else Codec[name.upper()]

    def first(self, n_values: int, key: int) -> CodecPlan:
        """The codec plan of a run's first round. `n_values`: of the model."""
        if self.codec is Codec.FLOAT32:
            return CodecPlan()
        if self.codec is not Codec.INTEGER:
            how = {"feedback": self.error_feedback, "momentum": self.momentum}
            return CodecPlan(self.codec, 0.0, key, self.clip_norm, self._parameters(1), **how)  # type: ignore[arg-type]
        norm = _FIRST_NORM if self.first_norm is None else self.first_norm
        norm = norm if self.clip_norm is None else min(norm, self.clip_norm)
        return first_plan(step=self.step_asked, norm=norm, n_values=n_values, key=key, clip_norm=self.clip_norm)

    def after(self, before: CodecPlan, number: int, shown: RoundShown, key: int) -> CodecPlan:
        """The codec plan of round `number`. `shown`: of the round of training before it."""
        if self.codec is Codec.FLOAT32:
            return before
        if self.codec is not Codec.INTEGER:
            return replace(before, key=key, parameters=self._parameters(number))
        step = step_for(before, shown, self.step_asked) if self.name == "auto" else self.step_asked
        return next_plan(before, step=step, update_rms=shown.update_rms, key=key)

    @property
    def _keys(self) -> tuple[str, ...]:
        """The keys that this codec takes beside the name."""
        if self.codec is Codec.FLOAT32:
            return ()
        if self.codec is Codec.INTEGER:
            return ("error" if self.name == "auto" else "step", "first_norm", "clip_norm")
        more = ("momentum", "warm_up_rounds") if self.codec is Codec.TOPK else ()
        return (*_parameters_of(self.codec), *_OF_VECTORS, *more)

    @property
    def step_asked(self) -> float:
        """The integer codec's step that the run file asks for, in root mean squares of an update."""
        if self.name == "auto":
            return coarsest_step(_ERROR if self.error is None else self.error)
        return _STEP if self.step is None else self.step

    def _parameters(self, number: int) -> Mapping[str, Parameter]:
        """The codec's parameters in round `number`."""
        defaults = _parameters_of(self.codec)
        given = {name: getattr(self, name) for name in defaults}
        set_here = {name: value for name, value in given.items() if value is not None}
        if self.warm_up_rounds is not None:
            share = set_here.get("share", defaults["share"])
            set_here["share"] = max(share, warm_up_share(number - 1, self.warm_up_rounds))
        return set_here


def warm_up_share(n_rounds_before: int, rounds_a_stage: int = 1) -> float:
    """The share of coordinates to send with deep gradient compression: 1/4 at first, 1/1000 from the fifth stage on."""
    return _WARM_UP_SHARES[min(n_rounds_before // rounds_a_stage, len(_WARM_UP_SHARES) - 1)]


def _parameters_of(codec: Codec) -> Mapping[str, Any]:
    """The parameters of a codec of vectors, with their defaults."""
    from umbel.aggregation.codec.vectors.registry import defaults_of  # lazily, as above

    return defaults_of(codec)
