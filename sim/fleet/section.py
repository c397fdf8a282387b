"""The section `[fleet]` of an experiment's file: what its devices are like.

```toml
[fleet]
partial_work = true     # false: a device that cannot do all its steps in time sends nothing
notices_lost = false    # true: the coordinator notices when a device is lost, and does not wait until the window's end
waiting = 1.5           # of more than 1000 devices, at most this many times the cohort wait for a round
zones = [-5, 1, 9]      # devices live evenly in these time zones, in hours ahead of the clock

[fleet.speed]
step_s = 0.1            # median seconds that a step takes; or samples_per_s
spread = 0.5            # between devices: log-normal, sigma of the logarithm; or
tail = 1.2              # a Pareto law with this exponent and that median: the smaller, the heavier
jitter = 0.1            # of one device from round to round: log-normal

[fleet.stragglers]      # in addition to devices that are slow by the above
share = 0.5             # of the cohort, rounded to whole devices, that is too slow for its work
work = [0.05, 0.95]     # share of a straggler's steps that fits into the window, drawn evenly between these

[fleet.network]
down_bytes_per_s = 4e6  # medians
up_bytes_per_s = 1e6
spread = 0.6            # between devices; 0: all alike
jitter = 0.2
latency_s = 0.05        # of a round trip
phones = "device_network/speed_distri.json"  # instead of the first four: measured phones, in the folder of data

[fleet.hours]           # devices are present by the hour of their own day
night = 0.9             # share of them at `quiet_hour`
day = 0.2               # twelve hours later; a cosine between the two
quiet_hour = 3.0
by_hour = [...]         # or 24 shares, one for each whole hour from midnight on, with straight lines between
habit = 0.5             # share of days on which a device keeps its usual hours; 0: each day is drawn anew

[fleet.charging]        # or: present while they charge, once a day
plugged_at = 22.5       # hour of their own day
hours = 7.0
spread_h = 1.5          # of both, between devices and days alike

[fleet.presence]        # or: present as a file says
file = "presence.csv"   # docs/reference/traces.md
cycle_s = 604800        # the file repeats after this many seconds; default: after its last stretch

[fleet.dropouts]
per_round = 0.05        # chance that a device is lost in a round
per_hour = 0.0          # and the chance for each hour at work
by_hour = [...]         # 24 factors of both, by the hour of the device's own day
download = 1.0          # weights: in which step the devices of `per_round` are lost
training = 8.0
upload = 1.0            # in a secure round, the masked input
advertise_keys = 1.0    # in secure rounds only, as are the three that follow
share_keys = 1.0
consistency_check = 1.0
unmasking = 1.0
returns = 0.0           # share of the lost that come back and resume their work
away_s = 60.0           # median time that they are away
away_spread = 1.0       # log-normal

[fleet.corrupt]
share = 0.01            # of devices
kinds = ["nan", "garbage", "length"]
per_round = 1.0         # chance that such a device sends invalid data in a round

[fleet.malicious]
share = 0.05
kinds = ["scaled"]      # "sign-flip", "noise", "label-flip"
scale = 10.0            # factor of "scaled" and "sign-flip"; for "noise", its norm divided by the update's
```

`recorded = "trace.json"` replaces speed, network, presence and drop-outs: devices are like those of a production run.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from umbel.aggregation.canonical import later
from umbel.aggregation.round.pace import MARGIN
from umbel.aggregation.types import LINE_RATE_MAX, LINE_RATE_MIN, SECONDS_MAX, require_within

SPREAD_MAX = 5.0
FACTOR_MAX = 1e6
TAIL_MIN, TAIL_MAX = 0.1, 100.0
ZONES_MAX = 48
_SHARE = (0.0, 1.0)
_STEP_S, _SPEED_SPREAD = 0.1, 0.5
_DOWN, _UP, _LINE_SPREAD, _LINE_JITTER = 4e6, 1e6, 0.6, 0.2
Corruption = Literal["nan", "garbage", "length"]
Malice = Literal["scaled", "sign-flip", "noise", "label-flip"]


@dataclass(frozen=True, slots=True)
class SpeedSection:
    """How fast devices train: either `step_s` or `samples_per_s`, and either `spread` or `tail`. Both have defaults."""

    step_s: float | None = None
    samples_per_s: float | None = None
    spread: float | None = None
    tail: float | None = None
    jitter: float = 0.1
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if self.step_s is not None and self.samples_per_s is not None:
            raise ValueError("set either step_s or samples_per_s, not both")
        if self.spread is not None and self.tail is not None:
            raise ValueError("set either `spread` (log-normal) or `tail` (Pareto), not both")
        _require_within(self, step_s=(1e-9, SECONDS_MAX), samples_per_s=(1e-9, 1e12))
        _require_within(self, spread=(0.0, SPREAD_MAX), tail=(TAIL_MIN, TAIL_MAX), jitter=(0.0, SPREAD_MAX))

    @property
    def median_s(self) -> float:
        """Of a step, or of a sample where `samples_per_s` is set."""
        if self.samples_per_s is not None:
            return 1 / self.samples_per_s
        return _STEP_S if self.step_s is None else self.step_s

    @property
    def between(self) -> float:
        """Sigma of the log-normal distribution between devices."""
        return _SPEED_SPREAD if self.spread is None else self.spread


@dataclass(frozen=True, slots=True)
class StragglersSection:
    """How many devices of each round are too slow for all of their work, and how much of it they can do."""

    share: float
    work: tuple[float, float] = (0.05, 0.95)
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        require_within(self.share, "share", 0.0, 1.0)
        least, most = self.work
        require_within(most, "the second number of `work`", 0.0, 1.0)
        require_within(least, "the first number of `work`", 0.0, most)


@dataclass(frozen=True, slots=True)
class NetworkSection:
    """How fast connections are. None: 4 MB/s down, 1 MB/s up, spread 0.6, jitter 0.2, or as the phones of `phones`."""

    down_bytes_per_s: float | None = None
    up_bytes_per_s: float | None = None
    spread: float | None = None
    jitter: float | None = None
    latency_s: float = 0.05
    phones: str | None = None
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        own = ("down_bytes_per_s", "up_bytes_per_s", "spread", "jitter")
        if self.phones is not None and (named := [name for name in own if getattr(self, name) is not None]):
            raise ValueError(f"the key `phones` already sets the speed of connections; leave out {' and '.join(named)}")
        rates, spreads = (LINE_RATE_MIN, LINE_RATE_MAX), (0.0, SPREAD_MAX)
        _require_within(self, down_bytes_per_s=rates, up_bytes_per_s=rates, spread=spreads, jitter=spreads)
        require_within(self.latency_s, "latency_s", 0.0, SECONDS_MAX)

    @property
    def down(self) -> float:
        return _DOWN if self.down_bytes_per_s is None else self.down_bytes_per_s

    @property
    def up(self) -> float:
        return _UP if self.up_bytes_per_s is None else self.up_bytes_per_s

    @property
    def between(self) -> float:
        return _LINE_SPREAD if self.spread is None else self.spread

    @property
    def within(self) -> float:
        return _LINE_JITTER if self.jitter is None else self.jitter


@dataclass(frozen=True, slots=True)
class HoursSection:
    """The share of devices that is present at each hour of their own day, 0 to 1."""

    night: float = 0.9
    day: float = 0.2
    quiet_hour: float = 3.0
    by_hour: tuple[float, ...] = ()
    habit: float = 0.5
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        _require_within(self, night=_SHARE, day=_SHARE, habit=_SHARE, quiet_hour=(0.0, 24.0))
        _require_hours(self.by_hour, 1.0)

    @property
    def shares(self) -> tuple[float, ...]:
        """At the 24 whole hours from midnight on."""
        if self.by_hour:
            return self.by_hour
        middle, swing = (self.night + self.day) / 2, (self.night - self.day) / 2
        return tuple(middle + swing * math.cos((hour - self.quiet_hour) / 24 * math.tau) for hour in range(24))


@dataclass(frozen=True, slots=True)
class ChargingSection:
    """Devices are present while they charge: once a day from about `plugged_at`, for about `hours`."""

    plugged_at: float = 22.5
    hours: float = 7.0
    spread_h: float = 1.5
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        _require_within(self, plugged_at=(0.0, 24.0), hours=(0.1, 20.0), spread_h=(0.0, 6.0))


@dataclass(frozen=True, slots=True)
class PresenceSection:
    """Devices are present as a file says, which repeats every `cycle_s`."""

    file: str
    cycle_s: float | None = None
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        _require_within(self, cycle_s=(1.0, SECONDS_MAX))


@dataclass(frozen=True, slots=True)
class DropoutsSection:
    """How devices are lost, and whether they come back."""

    per_round: float = 0.0
    per_hour: float = 0.0
    by_hour: tuple[float, ...] = ()
    download: float = 1.0
    training: float = 8.0
    upload: float = 1.0
    advertise_keys: float = 1.0
    share_keys: float = 1.0
    consistency_check: float = 1.0
    unmasking: float = 1.0
    returns: float = 0.0
    away_s: float = 60.0
    away_spread: float = 1.0
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        _require_within(self, per_round=_SHARE, per_hour=(0.0, FACTOR_MAX))
        _require_hours(self.by_hour, FACTOR_MAX)
        _require_within(self, **dict.fromkeys(("download", "training", "upload", *_SECURE_ONLY), (0.0, FACTOR_MAX)))
        if not sum(self.plain_weights):
            raise ValueError("at least one of `download`, `training` and `upload` must be above 0")
        _require_within(self, returns=_SHARE, away_s=(1e-3, SECONDS_MAX), away_spread=(0.0, SPREAD_MAX))

    @property
    def plain_weights(self) -> tuple[float, ...]:
        return self.download, self.training, self.upload

    @property
    def secure_weights(self) -> tuple[float, ...]:
        return *self.plain_weights, *(getattr(self, name) for name in _SECURE_ONLY)


_SECURE_ONLY = ("advertise_keys", "share_keys", "consistency_check", "unmasking")


@dataclass(frozen=True, slots=True)
class CorruptSection:
    """Devices that send invalid data: a share of them, evenly of these kinds."""

    share: float
    kinds: tuple[Corruption, ...] = ("nan", "garbage", "length")
    per_round: float = 1.0
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        require_within(self.share, "share", 0.0, 1.0)
        _require_kinds(self.kinds)
        require_within(self.per_round, "per_round", 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class MaliciousSection:
    """Devices that want to harm the model, in every round: a share of them, evenly of these kinds."""

    share: float
    kinds: tuple[Malice, ...] = ("scaled",)
    scale: float = 10.0
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        require_within(self.share, "share", 0.0, 1.0)
        _require_kinds(self.kinds)
        require_within(self.scale, "scale", 0.0, FACTOR_MAX)


@dataclass(frozen=True, slots=True)
class FleetSection:
    """The whole section. `hours`, `charging` and `presence` exclude each other; default: devices are always present."""

    waiting: float = MARGIN
    zones: tuple[float, ...] = (0.0,)
    speed: SpeedSection | None = None
    network: NetworkSection | None = None
    hours: HoursSection | None = None
    charging: ChargingSection | None = None
    presence: PresenceSection | None = None
    dropouts: DropoutsSection | None = None
    corrupt: CorruptSection = field(default_factory=lambda: CorruptSection(0.0))
    malicious: MaliciousSection = field(default_factory=lambda: MaliciousSection(0.0))
    recorded: str | None = None
    stragglers: StragglersSection | None = None
    partial_work: bool = True
    notices_lost: bool = later(False)
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        require_within(self.waiting, "waiting", 1.0, 1000.0)
        if not 1 <= len(self.zones) <= ZONES_MAX:
            raise ValueError(f"`zones` must name 1 to {ZONES_MAX} time zones, not {len(self.zones)}")
        for zone in self.zones:
            require_within(zone, "a time zone", -24.0, 24.0)
        named = [name for name in ("hours", "charging", "presence") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"only one rule can say when devices are present: keep one of {' and '.join(named)}")
        if self.recorded is not None:
            named += [name for name in ("speed", "network", "dropouts") if getattr(self, name) is not None]
            if named:
                raise ValueError(
                    f"the trace in `recorded` already says how devices behave; leave out {' and '.join(named)}"
                )
        if self.corrupt.share + self.malicious.share > 1:
            raise ValueError("the shares of corrupt and malicious devices add up to more than 1; lower one")


def _require_within(section: object, **bounds: tuple[float, float]) -> None:
    """Raise `ValueError` unless each of these fields that is set lies within its bounds."""
    for name, (least, most) in bounds.items():
        if (value := getattr(section, name)) is not None:
            require_within(value, name, least, most)


def _require_hours(values: tuple[float, ...], most: float) -> None:
    """Raise `ValueError` unless there is a number for each hour of the day, or none."""
    if len(values) not in (0, 24):
        raise ValueError(f"by_hour needs 24 numbers, one for each hour from midnight on, not {len(values)}")
    for hour, value in enumerate(values):
        require_within(value, f"by_hour at {hour} o'clock", 0.0, most)


def _require_kinds(kinds: tuple[str, ...]) -> None:
    if not kinds or len(set(kinds)) < len(kinds):
        raise ValueError("`kinds` must name at least one kind, and no kind twice")
