"""When devices are present, and when they leave: always, by the hour, while they charge, or as recorded.

Times are seconds from a midnight; the own day of a device begins by its time zone.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from umbel.aggregation.run.report_times import Floats
from umbel.sim.data.partition.partition import Indices
from umbel.sim.fleet.draws import daily_words, normals, of_each, uniforms, words

Flags: TypeAlias = NDArray[np.bool_]
HOUR_S, DAY_S = 3600.0, 86_400.0
_LOOKED_AHEAD_H = 25


class Presence(Protocol):
    """When devices are present."""

    def is_present(self, devices: Indices, now: float) -> Flags:
        """Whether each of these devices can be asked at that moment."""
        ...

    def leaves_s(self, devices: Indices, now: float, horizon_s: float) -> Floats:
        """In how many seconds each of these present devices leaves; inf if not before the horizon."""
        ...


class Always:
    """Devices are always present."""

    def is_present(self, devices: Indices, now: float) -> Flags:
        return np.ones(len(devices), np.bool_)

    def leaves_s(self, devices: Indices, now: float, horizon_s: float) -> Floats:
        return np.full(len(devices), np.inf)


@dataclass(frozen=True, slots=True)
class Zones:
    """The time zones of devices, evenly used; `hours`: ahead of the clock."""

    seed: int
    hours: tuple[float, ...] = (0.0,)

    def local_s(self, devices: Indices, now: float) -> Floats:
        """Seconds from a midnight, in each device's own time."""
        if len(self.hours) == 1:
            return np.full(len(devices), now + self.hours[0] * HOUR_S)
        chosen = (uniforms(words(self.seed, devices, "zone")) * len(self.hours)).astype(np.int64)
        return now + np.array(self.hours)[chosen] * HOUR_S


@dataclass(frozen=True, slots=True)
class Hours:
    """Devices are present by the hour of their own day.

    Each day a device has a rank between 0 and 1 and is present while the share is above its rank; so it comes once a
    day if the shares rise and fall once. A day begins when the fewest devices are present.
    """

    seed: int
    zones: Zones
    shares: Floats  # of devices that are present: 24, at whole hours, with straight lines between
    habit: float  # share of days on which the device has its usual rank
    factors: Floats  # of each device's share (`of_each`)

    def is_present(self, devices: Indices, now: float) -> Flags:
        local_s = self.zones.local_s(devices, now)
        present: Flags = self._rank(devices, local_s) < self._share(devices, local_s)
        return present

    def leaves_s(self, devices: Indices, now: float, horizon_s: float) -> Floats:
        """A device that stays for 24 hours does not leave before any horizon."""
        local_s = self.zones.local_s(devices, now)
        leaves_s = np.full(len(devices), np.inf)
        began_s, share, next_s = local_s, self._share(devices, local_s), np.floor(local_s / HOUR_S) * HOUR_S
        for _ in range(min(_LOOKED_AHEAD_H, int(horizon_s // HOUR_S) + 2)):
            rank = self._rank(devices, began_s)  # the same until the next whole hour
            next_s = next_s + HOUR_S
            next_share = self._share(devices, next_s)
            part = np.clip((share - rank) / np.where(share > next_share, share - next_share, 1.0), 0.0, 1.0)
            goes_s = np.where(
                rank >= share, began_s, np.where(rank >= next_share, began_s + part * (next_s - began_s), np.inf)
            )
            leaves_s = np.where(np.isinf(leaves_s), goes_s - local_s, leaves_s)
            began_s, share = next_s, next_share
        return np.where(leaves_s < horizon_s, leaves_s, np.inf)

    def _share(self, devices: Indices, local_s: Floats) -> Floats:
        shares = np.interp(local_s / HOUR_S, np.arange(24), self.shares, period=24)
        return np.minimum(shares * of_each(self.factors, devices), 1.0)

    def _rank(self, devices: Indices, local_s: Floats) -> Floats:
        days = np.floor((local_s - float(self.shares.argmin()) * HOUR_S) / DAY_S).astype(np.int64)
        of_day = uniforms(daily_words(self.seed, devices, days, "rank of the day"))
        if not self.habit:
            return of_day
        is_usual = uniforms(daily_words(self.seed, devices, days, "usual day")) < self.habit
        return np.where(is_usual, uniforms(words(self.seed, devices, "usual rank")), of_day)


@dataclass(frozen=True, slots=True)
class Charging:
    """Devices are present while they charge, once a day: from about the hour `plugged_at` of their own day, for about
    `hours`. `spread_h`: standard deviation of both, half of its variance between devices, half from day to day.
    """

    seed: int
    zones: Zones
    plugged_at: float
    hours: float
    spread_h: float

    def is_present(self, devices: Indices, now: float) -> Flags:
        present: Flags = self._ends_s(devices, self.zones.local_s(devices, now)) > 0
        return present

    def leaves_s(self, devices: Indices, now: float, horizon_s: float) -> Floats:
        left_s = np.maximum(self._ends_s(devices, self.zones.local_s(devices, now)), 0.0)
        return np.where(left_s < horizon_s, left_s, np.inf)

    def _ends_s(self, devices: Indices, local_s: Floats) -> Floats:
        """In how many seconds the current charging ends; not above 0 without one."""
        # Days begin at an hour at which no device plugs in.
        turn_s = (self.plugged_at - 12) * HOUR_S
        days = np.floor((local_s - turn_s) / DAY_S).astype(np.int64)
        ends_s = np.zeros(len(devices))
        for day in (days - 1, days):
            from_s, until_s = self._session(devices, day, turn_s)
            ends_s = np.where(from_s <= local_s, np.maximum(ends_s, until_s - local_s), ends_s)
        return ends_s

    def _session(self, devices: Indices, days: Indices, turn_s: float) -> tuple[Floats, Floats]:
        start_h = np.clip(12 + self._deviation(devices, days, "plugged at"), 0.0, 23.9)
        hours = np.clip(self.hours + self._deviation(devices, days, "charging for"), 0.1, 24.0)
        from_s = days * DAY_S + turn_s + start_h * HOUR_S
        return from_s, from_s + hours * HOUR_S

    def _deviation(self, devices: Indices, days: Indices, what: str) -> Floats:
        own, of_day = words(self.seed, devices, what), daily_words(self.seed, devices, days, what, "of the day")
        deviations: Floats = self.spread_h * np.sqrt(0.5) * (normals(own) + normals(of_day))
        return deviations


class Recorded:
    """Devices are present at recorded times, which repeat every `cycle_s`. Device d is the d-th of `n` recorded ones,
    which repeat after the last.

    `devices`, `from_s`, `until_s`: stretches of time, in order and disjoint for each device, between 0 and `cycle_s`.
    """

    def __init__(self, n: int, cycle_s: float, devices: Indices, from_s: Floats, until_s: Floats) -> None:
        self.n, self.cycle_s = n, cycle_s
        self._devices, self._from_s, self._until_s = devices, from_s, until_s
        self._keys = devices * cycle_s + from_s
        self._firsts = np.searchsorted(devices, np.arange(n))

    def is_present(self, devices: Indices, now: float) -> Flags:
        return self._left_s(devices, now) > 0

    def leaves_s(self, devices: Indices, now: float, horizon_s: float) -> Floats:
        left_s = np.maximum(self._left_s(devices, now), 0.0)
        # A device that is present at the end of the cycle and at its beginning stays.
        firsts = self._firsts[devices % self.n]
        goes_on = (now % self.cycle_s + left_s >= self.cycle_s) & (self._from_s[firsts] == 0)
        further_s = self._until_s[firsts]
        left_s = np.where(goes_on, np.where(further_s == self.cycle_s, np.inf, left_s + further_s), left_s)
        return np.where(left_s < horizon_s, left_s, np.inf)

    def _left_s(self, devices: Indices, now: float) -> Floats:
        """Until the end of each device's current stretch; 0 or less without one."""
        chosen, moment = devices % self.n, now % self.cycle_s
        at = np.searchsorted(self._keys, chosen * self.cycle_s + moment, side="right") - 1
        is_own = (at >= 0) & (self._devices[at] == chosen)
        return np.where(is_own, self._until_s[at] - moment, 0.0)
