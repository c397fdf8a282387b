"""What a client is asked to do with the model in one round: work, optimizer, learning rate, and options of the run."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias, get_args

from umbel.aggregation.algorithms.names import Algorithm, ControlVariate
from umbel.aggregation.algorithms.qfedavg import FairTerms
from umbel.aggregation.canonical import EXACT_MAX, later
from umbel.aggregation.plans.proximal import MU_STEP, MU_STEP_MIN, MuRule, MuState
from umbel.aggregation.plans.schedule import RatePlan, RateSchedule
from umbel.aggregation.types import LOCAL_MAX, RATE_MAX, RATE_MIN, require_within

OptimizerName = Literal["sgd", "adam", "adamw", "lars", "lamb", "muon"]
Option: TypeAlias = bool | int | float | str
OPTIONS_MAX, OPTION_CHARS_MAX, OPTIONS_CHARS_MAX = 64, 1024, 16_384
PERSONAL = "personal."  # the prefix of metrics of a client's own model, after its training
GAMMA = "gamma"  # the metric of `inexactness`
CLIP_NORM_MIN, CLIP_NORM_MAX = 1e-12, 1e12
TOTAL_SAMPLES_MAX = 1 << 40
_EPOCH_STEPS = 10
_WITH_MOMENTUM = ("sgd", "lars")  # optimizers whose momentum is a key of the run file
_OF_ALL_CLIENTS = ("feddyn", "scaffold")  # whose server remembers a mean over all clients, of any round
Q_MAX, LOSS_MAX_LEAST, LOSS_MAX_MOST, LIPSCHITZ_MAX = 16.0, 1e-6, 1e6, 1e12
_OPTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class TrainingTerms:
    """What a client is asked to do with the model: `local_epochs` or `local_steps`; by default, one epoch.

    `proximal_mu`: FedProx's mu (Li et al. 2020, eq. 2): the local objective gains mu/2 * ||w - w_global||^2.
    `evaluate`: first measure the round's model on the client's own held-out data. `momentum`: of "sgd" and "lars".
    `clip_norm`: the greatest L2 norm of a step's gradient, FedProx's term included; None: not clipped. `algorithm`:
    "fedprox" is "fedavg" with a `proximal_mu`; either name does for it.
    """

    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int = 32
    learning_rate: float = 0.01
    proximal_mu: float = 0.0
    evaluate: bool = False
    optimizer: OptimizerName = later("sgd")
    momentum: float = later(0.0)
    weight_decay: float = later(0.0)
    clip_norm: float | None = later(None)
    options: Mapping[str, Option] = later(factory=dict)  # the run file's own keys for the sites' code
    evaluate_after: bool = later(False)  # measure each client's own model after its training (personalised evaluation)
    algorithm: Algorithm = later("fedavg")
    total_samples: int | None = later(None)  # of "feddyn" and "scaffold": of all clients of the run together
    control_variate: ControlVariate = later("change")  # of "scaffold"
    q: float | None = later(None)  # of "qfedavg", as the next two: how much more clients with a greater loss count
    loss_max: float | None = later(None)  # greater losses count as this one
    lipschitz: float | None = later(None)  # L; None: 1 / learning_rate
    inexactness: bool = later(False)  # measure how exactly each client has minimized FedProx's local objective
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a run file with an unknown key is refused at the rim

    def __post_init__(self) -> None:
        if self.local_epochs is not None and self.local_steps is not None:
            raise ValueError("set either local_epochs or local_steps, not both")
        if self.local_epochs is None and self.local_steps is None:
            object.__setattr__(self, "local_epochs", 1)
        for name in ("local_epochs", "local_steps", "batch_size"):
            if (value := getattr(self, name)) is not None:
                require_within(value, name, 1, LOCAL_MAX)
        require_within(self.learning_rate, "learning_rate", RATE_MIN, RATE_MAX)
        require_within(self.proximal_mu, "proximal_mu", 0, RATE_MAX)
        require_within(self.momentum, "momentum", 0.0, 0.999999)
        require_within(self.weight_decay, "weight_decay", 0.0, RATE_MAX)
        if self.clip_norm is not None:
            require_within(self.clip_norm, "clip_norm", CLIP_NORM_MIN, CLIP_NORM_MAX)
        if self.momentum and self.optimizer not in _WITH_MOMENTUM:
            raise ValueError(
                f'momentum is of optimizer = "sgd" and "lars", not of "{self.optimizer}": leave momentum out'
            )
        self._require_algorithm()
        require_options(self.options)

    @property
    def remembers_drift(self) -> bool:
        """Whether each client keeps a pull from round to round (`feddyn.py`)."""
        return self.algorithm == "feddyn"

    @property
    def has_control(self) -> bool:
        """Whether the model travels with a control variate for each weight (`scaffold.py`)."""
        return self.algorithm == "scaffold"

    @property
    def control_scale(self) -> float:
        """By which changes of control variates are multiplied on their way up: the rate times the steps of a round. A
        pass over the data counts as `_EPOCH_STEPS` steps, because the coordinator does not know how many it has.
        """
        n_steps = self.local_steps or (self.local_epochs or 1) * _EPOCH_STEPS
        return self.learning_rate * n_steps

    def why_not_masked(self, minimum_work: float) -> str:
        """Why a secure round must not have these terms; empty if it may. `minimum_work`: of its plan.

        Under SCAFFOLD the coordinator sees two sums of one cohort. By option II a client sends -c - (y - x) / (K eta)
        beside its change y - x: if all K are equal, the second sum follows from the first, and tells nothing more. By
        option I it sends g_i(x) - c_i. Where all clients but one take one step over all of their samples, the two sums
        show how the batches of this one differ; and the c_i of a cohort of which one client has taken part before are
        this client's.
        """
        if not self.has_control:
            return ""
        if self.control_variate == "gradient":
            return (
                'control_variate = "gradient" sends a second vector whose sum can show a single client\'s gradient and '
                "what it has kept of earlier rounds: leave it out, and set local_steps; or choose another algorithm in "
                "[training]"
            )
        if self.local_steps is not None and minimum_work >= 1:
            return ""
        return (
            'algorithm = "scaffold" sends each change a second time, divided by the client\'s steps, so the two sums '
            "would show the change of a client whose number of steps differs: set local_steps in the place of "
            "local_epochs, and leave out minimum_work"
        )

    @property
    def adapts_mu(self) -> bool:
        """Whether FedProx's mu follows the training loss (`proximal.py`)."""
        return False

    @property
    def is_normalised(self) -> bool:
        """Whether clients divide their changes by the steps that they have done (`fednova.py`)."""
        return self.algorithm == "fednova"

    def share_of_all(self, total_weight: int) -> float:
        """The share of all clients' samples that is in a mean of this total weight; 1 if it does not matter.

        It may be above 1 if `total_samples` is too small. That does not change where a run comes to rest: the server's
        mean over all clients is then a multiple of the true one, and zero where that is.
        """
        return 1.0 if self.total_samples is None else total_weight / self.total_samples

    @property
    def fair_terms(self) -> FairTerms | None:
        """By what clients count more under q-FedAvg (`qfedavg.py`); None under other algorithms."""
        if self.q is None or self.loss_max is None:
            return None
        return FairTerms(self.q, self.loss_max, self.lipschitz or 1.0 / self.learning_rate)

    def _require_fair_terms(self) -> None:
        """Raise `ValueError` for keys of q-FedAvg that are missing, out of bounds, or of another algorithm."""
        keys = {"q": self.q, "loss_max": self.loss_max, "lipschitz": self.lipschitz}
        if self.algorithm != "qfedavg":
            if given := [key for key, value in keys.items() if value is not None]:
                raise ValueError(f'{given[0]} is for algorithm = "qfedavg", not for "{self.algorithm}": leave it out')
            return
        if self.q is None or self.loss_max is None:
            raise ValueError(
                'algorithm = "qfedavg" needs q, such as 1, and loss_max, the greatest loss that counts: about twice '
                "the loss of the first model"
            )
        require_within(self.q, "q", 0.0, Q_MAX)
        require_within(self.loss_max, "loss_max", LOSS_MAX_LEAST, LOSS_MAX_MOST)
        if self.lipschitz is not None:
            require_within(self.lipschitz, "lipschitz", RATE_MIN, LIPSCHITZ_MAX)

    def _require_algorithm(self) -> None:
        """Raise `ValueError` for an algorithm that is unknown, or that the other terms contradict."""
        if self.algorithm not in (known := get_args(Algorithm)):
            raise ValueError(f"algorithm must be one of {', '.join(known)}, not {self.algorithm!r:.40}")
        if self.algorithm in ("fedprox", "feddyn") and not (self.proximal_mu or self.adapts_mu):
            other = ", or adaptive_mu = true" if self.algorithm == "fedprox" else ""
            raise ValueError(f'algorithm = "{self.algorithm}" needs proximal_mu: set it, to 0.01 for example{other}')
        if (self.algorithm in _OF_ALL_CLIENTS) is (self.total_samples is None):
            raise ValueError(
                f'algorithm = "{self.algorithm}" needs total_samples, the number of samples of all clients of the run '
                "together; an estimate will do"
                if self.total_samples is None
                else f'total_samples is for algorithm = "feddyn" and "scaffold", not for "{self.algorithm}": leave it '
                "out"
            )
        if self.total_samples is not None:
            require_within(self.total_samples, "total_samples", 1, TOTAL_SAMPLES_MAX)
        self._require_fair_terms()
        if self.control_variate not in (known := get_args(ControlVariate)):
            raise ValueError(f"control_variate must be one of {', '.join(known)}, not {self.control_variate!r:.40}")
        if self.control_variate != "change" and not self.has_control:
            raise ValueError(f'control_variate is for algorithm = "scaffold", not for "{self.algorithm}": leave it out')
        if self.inexactness and (self.remembers_drift or self.has_control):
            raise ValueError(
                "inexactness = true measures FedProx's local objective, to which algorithm = "
                f'"{self.algorithm}" adds what clients keep of earlier rounds: leave inexactness out'
            )
        if self.is_normalised or self.has_control:
            self._require_plain_sgd()

    def _require_plain_sgd(self) -> None:
        """Raise `ValueError` for terms under which a change is not the rate times the sum of the steps' gradients."""
        others: list[tuple[str, float | None]] = [("proximal_mu", self.proximal_mu), ("momentum", self.momentum)]
        others += [("clip_norm", self.clip_norm)] if self.has_control else []
        for key, value in others:
            if value:
                raise ValueError(
                    f'algorithm = "{self.algorithm}" is for plain SGD, whose steps all count alike: leave {key} out'
                )
        if self.optimizer != "sgd":
            raise ValueError(
                f'algorithm = "{self.algorithm}" is for optimizer = "sgd", not for "{self.optimizer}": leave optimizer '
                "out"
            )


@dataclass(frozen=True, slots=True)
class TrainingPlan(TrainingTerms):
    """The terms of one round. `learning_rate` and `proximal_mu` are those of this round."""

    rate_plan: RatePlan | None = later(None)  # what `learning_rate` follows from; None: it is the run file's own
    mu_rule: MuRule | None = later(None)  # what `proximal_mu` follows from; None: it is the run file's own

    @property
    def adapts_mu(self) -> bool:
        return self.mu_rule is not None

    def with_mu(self, state: MuState | None) -> "TrainingPlan":
        """The plan with the mu of its round (`RoundPlan.mu`); None: mu does not adapt."""
        return self if state is None else replace(self, proximal_mu=state.proximal_mu)


@dataclass(frozen=True, slots=True)
class TrainingSection(TrainingTerms):
    """The section [training] of a run file: the terms of every round, and how the learning rate and mu change.

    `adaptive_mu`: whether FedProx's mu follows the training loss (`proximal.py`), from `proximal_mu` on in steps of
    `mu_step`; None: 0.1. `mu_max`: mu never rises above it; None: no bound.
    """

    schedule: RateSchedule = later(factory=RateSchedule)
    adaptive_mu: bool = later(False)
    mu_step: float | None = later(None)
    mu_max: float | None = later(None)

    def __post_init__(self) -> None:
        TrainingTerms.__post_init__(self)  # `super()` does not work in a class with slots
        if self.adaptive_mu and self.algorithm != "fedprox":
            raise ValueError(
                f'adaptive_mu is for algorithm = "fedprox", not for "{self.algorithm}": set algorithm = "fedprox", or '
                "leave adaptive_mu out"
            )
        for name in ("mu_step", "mu_max"):
            if (value := getattr(self, name)) is None:
                continue
            if not self.adaptive_mu:
                raise ValueError(f"{name} has an effect only with adaptive_mu = true: set it, or leave {name} out")
            require_within(value, name, MU_STEP_MIN, RATE_MAX)
        if self.mu_max is not None and self.proximal_mu > self.mu_max:
            raise ValueError(
                f"mu begins with a proximal_mu of {self.proximal_mu:g}, which is above mu_max, {self.mu_max:g}: lower "
                "proximal_mu, or raise mu_max"
            )

    @property
    def adapts_mu(self) -> bool:
        return self.adaptive_mu

    @property
    def mu_rule(self) -> MuRule | None:
        """How mu adapts; None if it does not."""
        step = MU_STEP if self.mu_step is None else self.mu_step
        most = RATE_MAX if self.mu_max is None else self.mu_max
        return MuRule(self.proximal_mu, step, most) if self.adaptive_mu else None

    def plan(self, number: int, n_rounds: int, target: int) -> TrainingPlan:
        """The plan of round `number`, from 1, of `n_rounds`. `target`: of that round, in reports.

        An adaptive mu is not known yet: `TrainingPlan.with_mu` sets it.
        """
        terms = {key.name: getattr(self, key.name) for key in fields(TrainingTerms)}
        plan = TrainingPlan(**terms, mu_rule=self.mu_rule)
        if self.schedule == RateSchedule():
            return plan
        rates = RatePlan(self.schedule, self.learning_rate, n_rounds, target)
        return replace(plan, learning_rate=rates.rate(number), rate_plan=rates)


def require_options(options: Mapping[str, Option]) -> None:
    """Raise `ValueError` for too many or too long options, a bad name, or a value that is no finite JSON scalar."""
    if len(options) > OPTIONS_MAX:
        raise ValueError(f"options must have at most {OPTIONS_MAX} keys, not {len(options)}")
    n_chars = 0
    for name, value in options.items():
        if not _OPTION_NAME.fullmatch(name):
            raise ValueError(
                f"the option name {name[:80]!r} must be 1 to 63 letters, digits, '_', '.' or '-', and begin with a "
                "letter or '_'"
            )
        _require_option(name, value)
        n_chars += len(name) + (len(value) if isinstance(value, str) else 8)
    if n_chars > OPTIONS_CHARS_MAX:
        raise ValueError(f"options must have at most {OPTIONS_CHARS_MAX} characters in all, not {n_chars}")


def _require_option(name: str, value: object) -> None:
    match value:
        case bool():
            return
        case str() if unprintable := next((one for one in value if not (one.isprintable() or one in "\n\t")), ""):
            raise ValueError(f"the option {name} must have no control characters, such as {unprintable!r}")
        case str() if len(value) > OPTION_CHARS_MAX:
            raise ValueError(f"the option {name} must have at most {OPTION_CHARS_MAX} characters, not {len(value)}")
        case int() if abs(value) > EXACT_MAX:
            raise ValueError(f"the option {name} must lie within +-(2^53 - 1), not {value!r:.40}")
        case float() if not math.isfinite(value):
            raise ValueError(f"the option {name} must be finite, not {value}")
        case str() | int() | float():
            return
        case _:
            raise ValueError(f"the option {name} must be a text, a number, true or false, not {value!r:.40}")
