"""The sections of a run file, with their defaults and bounds. docs/reference/run-file.md explains every key."""

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from umbel.aggregation.canonical import later
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.types import OVER_SELECTION_MAX, ROUNDS_MAX, TARGET_MAX, require_window, require_within

OVERRIDES_MAX = 100
OVER_SELECTION = 1.3
SHARE_MIN = 1e-6
CANARY_CLIENTS = 3
WAIT_FOR_ALL_S, WAIT_FOR_ALL_MAX_S = 300.0, 86400.0
CHANGE_STEP_MIN, CHANGE_STEP_MAX = 2.0**-8, 2.0
_ROUNDS = re.compile(r"[1-9][0-9]{0,5} rounds?")


@dataclass(frozen=True, slots=True)
class RoundsSection:
    """How rounds are run; see `RoundPlan`."""

    count: int
    target: int
    minimum: int = 1
    over_selection: float | None = None  # None: `OVER_SELECTION`, or less if masks allow no more; `RunFile` fills it in
    window_s: float = 600.0
    weighting: Weighting = Weighting.SAMPLES
    self_tuning: bool = False
    window_min_s: float = 0.0
    attempts_max: int | None = None
    wait_for_all_s: float | None = later(None)  # None: `WAIT_FOR_ALL_S` if updates are masked, else 0
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        require_within(self.count, "count", 1, ROUNDS_MAX)
        require_within(self.target, "target", 1, TARGET_MAX)
        require_within(self.minimum, "minimum", 1, TARGET_MAX)
        require_within(self.asked_share, "over_selection", 1, OVER_SELECTION_MAX)
        require_window(self.window_s)
        if not 0 <= self.window_min_s <= self.window_s:
            raise ValueError(f"window_min_s must lie between 0 and window_s = {self.window_s}, not {self.window_min_s}")
        if self.self_tuning and self.weighting is not Weighting.SAMPLES:
            raise ValueError(
                'self_tuning = true and weighting = "proportional" cannot go together, because self-tuning counts '
                'clients and proportional weighting counts draws: use weighting = "samples", or self_tuning = false'
            )
        if self.attempts_max is not None:
            require_within(self.attempts_max, "attempts_max", 1, ROUNDS_MAX)
        if self.wait_for_all_s is not None:
            require_within(self.wait_for_all_s, "wait_for_all_s", 0, WAIT_FOR_ALL_MAX_S)

    @property
    def asked_share(self) -> float:
        """How many clients are asked for each report of the target."""
        return OVER_SELECTION if self.over_selection is None else self.over_selection


@dataclass(frozen=True, slots=True)
class DownlinkSection:
    """What clients fetch of a new model: all of it, or the change from a recent version that they have."""

    name: Literal["model", "change"] = "model"
    step: float = (
        1.0  # of changes, in root mean squares of what changes (`publishing.py`); beyond 2 the error would grow
    )
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        require_within(self.step, "step", CHANGE_STEP_MIN, CHANGE_STEP_MAX)
        if self.name == "model" and self.step != 1.0:
            raise ValueError('`step` has an effect only with name = "change": set name = "change", or leave `step` out')

    @property
    def change_step(self) -> float | None:
        """The step of changes; None without changes."""
        return self.step if self.name == "change" else None


@dataclass(frozen=True, slots=True)
class EvaluationSection:
    """Rounds in which clients that did not train measure the model."""

    every: int  # after every this many rounds of training
    clients: int  # reports at which such a round closes
    window_s: float | None = None  # None: that of the round of training before it
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        require_within(self.every, "every", 1, ROUNDS_MAX)
        require_within(self.clients, "clients", 1, TARGET_MAX)
        if self.window_s is not None:
            require_window(self.window_s)


@dataclass(frozen=True, slots=True)
class CanarySection:
    """A few clients try round 1 with a share of its local steps; the run begins if enough of them pass."""

    clients: int | None = None  # None: three, or all that round 1 asks; `RunFile` fills it in
    minimum: int | None = None  # that must pass; None: more than half, so that one broken site does not hold up others
    share: float = 0.01  # of the local steps
    window_s: float | None = None  # None: that of round 1
    on_failure: Literal["pause", "stop", "widen"] = "pause"  # a paused run tries other clients when it is resumed
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        if self.clients is not None:
            require_within(self.clients, "clients", 1, TARGET_MAX)
            if not 1 <= self.n_least <= self.n_asked:
                raise ValueError(f"minimum must lie between 1 and clients = {self.clients}, not {self.minimum}")
        require_within(self.share, "share", SHARE_MIN, 1.0)
        if self.window_s is not None:
            require_window(self.window_s)

    @property
    def n_asked(self) -> int:
        assert self.clients is not None, "the run file has filled it in"
        return self.clients

    @property
    def n_least(self) -> int:
        return self.n_asked // 2 + 1 if self.minimum is None else self.minimum


@dataclass(frozen=True, slots=True)
class RetentionSection:
    """What is kept of a run."""

    versions: int | Literal["all"] = "all"  # the newest model versions, beside version 0 and the best
    updates: str = "none"  # clients' updates after their round: "none", those of the last "N rounds", or "all"
    per_site_metrics: bool = later(False)  # each client's metrics in the rounds' records
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        if self.versions != "all":
            require_within(self.versions, 'versions, if not "all",', 1, ROUNDS_MAX)
        if self.updates not in ("none", "all") and not _ROUNDS.fullmatch(self.updates):
            raise ValueError(
                f'updates must be "none", "all" or a number of rounds such as "3 rounds", not {self.updates[:40]!r}'
            )

    @property
    def n_versions(self) -> int | None:
        """None: all."""
        return None if self.versions == "all" else self.versions

    @property
    def n_update_rounds(self) -> int | None:
        """The number of newest rounds whose updates are kept; None: all."""
        if self.updates == "all":
            return None
        return 0 if self.updates == "none" else int(self.updates.split()[0])


@dataclass(frozen=True, slots=True)
class Override:
    """Other values of [rounds] and [training] for some rounds; None: no change.

    Steps take the place of epochs, and epochs of steps.
    """

    first_round: int
    last_round: int | None = None  # None: the run's last
    target: int | None = None
    minimum: int | None = None
    over_selection: float | None = None
    window_s: float | None = None
    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    proximal_mu: float | None = None
    evaluate: bool | None = None
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        if self.first_round < 1 or (self.last_round is not None and self.last_round < self.first_round):
            last = "the last" if self.last_round is None else self.last_round
            raise ValueError(
                f"first_round of an override must be at least 1, and at most last_round; this override "
                f"covers {self.first_round} to {last}"
            )
        if self.local_epochs is not None and self.local_steps is not None:
            raise ValueError("set either local_epochs or local_steps in an override, not both")
        self._check_numbers()
        if not (self.of(RoundsSection) or self.of(TrainingPlan)):
            raise ValueError(
                f"the override from round {self.first_round} on changes nothing; set a key in it, or leave it out"
            )

    def _check_numbers(self) -> None:
        """Raise `ValueError` for a number that no round may have, even if a later override replaces it."""
        rounds: dict[str, Any] = {"count": 1, "target": 1, **self.of(RoundsSection)}
        RoundsSection(**rounds)
        TrainingPlan(**self.of(TrainingPlan))

    def covers(self, number: int) -> bool:
        return self.first_round <= number and (self.last_round is None or number <= self.last_round)

    def of(self, section: type[RoundsSection | TrainingPlan]) -> dict[str, Any]:
        """The keys that it sets in one section of the run file."""
        values = {key.name: getattr(self, key.name) for key in fields(section) if hasattr(self, key.name)}
        return {name: value for name, value in values.items() if value is not None}
