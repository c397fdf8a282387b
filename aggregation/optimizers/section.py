"""The section [aggregation] of a run file: how updates become the next model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from umbel.aggregation.canonical import later
from umbel.aggregation.plans.schedule import RatePlan, RateSchedule
from umbel.aggregation.types import RATE_MAX, RATE_MIN, require_within

ServerOptimizerName: TypeAlias = Literal["sgd", "momentum", "nesterov", "adagrad", "adam", "yogi", "lars", "lamb"]
SERVER_RATE_MAX = 1e38  # float32's range; a step that leaves the model's own is refused when it is made
_BETA_MAX = 0.999999
_CORRECTION_FROM_MAX = 1000
_Names: TypeAlias = tuple[ServerOptimizerName, ...]
_OF_MOMENTUM: _Names = ("momentum", "nesterov", "lars")
_ADAPTIVE: _Names = ("adagrad", "adam", "yogi", "lamb")
_ADAPTIVE_RATE = 0.01  # their steps are about as long as the rate, whatever the change
# Each key, the optimizers that read it, and its default.
_KEYS: dict[str, tuple[_Names, float]] = {
    "momentum": (_OF_MOMENTUM, 0.9),
    "beta1": (_ADAPTIVE, 0.9),
    "beta2": (("adam", "yogi", "lamb"), 0.99),
    "tau": (_ADAPTIVE, 1e-3),
    "trust": (("lars",), 1e-3),
    "v0": (("adagrad", "adam", "yogi"), 0.0),  # `of` has its default
}


@dataclass(frozen=True, slots=True)
class AggregationSection:
    """`optimizer`: of the server. The keys after it are None if the run file leaves them out; `of` has their defaults.

    Reddi et al. 2021 use beta1 0.9, beta2 0.99 and tau 1e-3 in most of their experiments; for Adagrad beta1 0.
    """

    server_learning_rate: float | None = None  # 1 is FedAvg; None: 1, and 0.01 for adagrad, adam, yogi and lamb
    max_abs: float = 64.0
    sample_count_max: int = 1 << 20
    optimizer: ServerOptimizerName = later("sgd")
    momentum: float | None = later(None)
    beta1: float | None = later(None)
    beta2: float | None = later(None)
    tau: float | None = later(None)  # added to the root of the second moment, so that small ones make no long steps
    trust: float | None = later(None)  # of "lars": the length of a step in norms of the tensor, at the rate 1
    v0: float | None = later(None)  # the second moment's first value; None: tau^2, and 0 with bias_correction
    bias_correction: bool = later(False)  # of "adam"
    bias_correction_from: int = later(1)  # the exponent of the betas in the correction of the first step
    schedule: RateSchedule = later(factory=RateSchedule)  # of `server_learning_rate`
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if isinstance(table := cast(object, self.schedule), Mapping):  # of a run file in an audit bundle
            object.__setattr__(self, "schedule", RateSchedule(**cast(Mapping[str, Any], table)))
        if self.optimizer not in (known := get_args(ServerOptimizerName)):
            raise ValueError(f"optimizer must be {_either(known)}, not {self.optimizer!r:.40}")
        if self.server_learning_rate is None:
            object.__setattr__(self, "server_learning_rate", _ADAPTIVE_RATE if self.optimizer in _ADAPTIVE else 1.0)
        if self._has_schedule:
            require_within(self._rate, "server_learning_rate with [aggregation.schedule]", RATE_MIN, RATE_MAX)
        require_within(self._rate, "server_learning_rate", RATE_MIN, SERVER_RATE_MAX)
        for key, (names, _) in _KEYS.items():
            if getattr(self, key) is None:
                continue
            if self.optimizer not in names:
                raise ValueError(
                    f'`{key}` is for optimizer = {_either(names)}, not for "{self.optimizer}": leave it out'
                )
            require_within(getattr(self, key), key, 0.0 if key != "tau" else 1e-12, _MOST[key])
        if self.bias_correction and self.optimizer != "adam":
            raise ValueError('`bias_correction` is for optimizer = "adam": leave it out')
        if self.bias_correction_from != 1 and not self.bias_correction:
            raise ValueError("`bias_correction_from` is for bias_correction = true: leave it out")
        require_within(self.bias_correction_from, "bias_correction_from", 1, _CORRECTION_FROM_MAX)

    def of(self, key: str) -> float:
        """The value of a key of the optimizer, or its default."""
        given: float | None = getattr(self, key)
        if given is not None:
            return given
        if key == "v0":
            return 0.0 if self.bias_correction else self.of("tau") ** 2
        return 0.0 if (key, self.optimizer) == ("beta1", "adagrad") else _KEYS[key][1]

    @property
    def remembers(self) -> bool:
        """Whether a step depends on the ones before, so that the optimizer's slots lie beside the model."""
        return self.optimizer != "sgd"

    @property
    def is_plain(self) -> bool:
        """Whether the mean change of a round is the step, as in FedAvg."""
        return not self.remembers and self._rate == 1.0 and not self._has_schedule

    def rate(self, number: int, n_rounds: int, target: int) -> float:
        """The server's rate in round `number`, from 1, of `n_rounds`. `target`: of the round's plan, in reports."""
        return self._rates(n_rounds, target).rate(number) if self._has_schedule else self._rate

    def gives(self, rate: float, number: int, n_rounds: int, target: int) -> bool:
        """Whether `rate` returns this, on whatever machine it was computed."""
        if self._has_schedule:
            return self._rates(n_rounds, target).gives(rate, number)
        return rate == self._rate

    @property
    def _rate(self) -> float:
        assert self.server_learning_rate is not None, "filled in at the start"
        return self.server_learning_rate

    @property
    def _has_schedule(self) -> bool:
        return self.schedule != RateSchedule()

    def _rates(self, n_rounds: int, target: int) -> RatePlan:
        return RatePlan(self.schedule, self._rate, n_rounds, target)


_MOST = {"momentum": _BETA_MAX, "beta1": _BETA_MAX, "beta2": _BETA_MAX, "tau": 1e3, "trust": 1e3, "v0": 1e6}


def _either(names: tuple[str, ...]) -> str:
    *first, last = (f'"{name}"' for name in names)
    return f"{', '.join(first)} or {last}" if first else last
