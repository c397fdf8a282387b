"""Where and when devices are lost in a round, and for how long."""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from umbel.aggregation.run.report_times import Floats
from umbel.aggregation.secagg.turns import Phase
from umbel.sim.data.partition.partition import Indices
from umbel.sim.fleet.draws import normals, of_each, uniforms, words
from umbel.sim.fleet.presence import HOUR_S, Zones

Stages: TypeAlias = NDArray[np.int8]
NEVER = np.inf


class DeviceStage(IntEnum):
    """What a device did when it was lost.

    The last four are phases of secure rounds, in which it falls silent before its message. In a secure round `UPLOAD`
    is that of the masked input.
    """

    NONE = 0
    DOWNLOAD = 1
    TRAINING = 2
    UPLOAD = 3
    ADVERTISE_KEYS = 4
    SHARE_KEYS = 5
    CONSISTENCY_CHECK = 6
    UNMASKING = 7

    @property
    def silent_from(self) -> Phase | None:
        """The first phase of a secure round in which the device is silent.

        A device lost during its work may be silent even earlier; the time of its loss says so.
        """
        return _SILENT_FROM.get(self)


_SILENT_FROM = {
    DeviceStage.DOWNLOAD: Phase.MASKED_INPUT,
    DeviceStage.TRAINING: Phase.MASKED_INPUT,
    DeviceStage.UPLOAD: Phase.MASKED_INPUT,
    DeviceStage.ADVERTISE_KEYS: Phase.ADVERTISE_KEYS,
    DeviceStage.SHARE_KEYS: Phase.SHARE_KEYS,
    DeviceStage.CONSISTENCY_CHECK: Phase.CONSISTENCY_CHECK,
    DeviceStage.UNMASKING: Phase.UNMASKING,
}


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """How a round goes for devices, in seconds from its opening."""

    heard_s: Floats  # the device hears of the round
    fetched_s: Floats  # has the model
    trained_s: Floats  # has trained
    report_s: Floats  # its report has arrived

    def stage_at(self, seconds: Floats) -> Stages:
        """What each does at that moment; `NONE` once it has reported."""
        ends = np.stack([self.fetched_s, self.trained_s, self.report_s])
        passed = (seconds >= ends).sum(axis=0)
        stage: Stages = np.array(
            [DeviceStage.DOWNLOAD, DeviceStage.TRAINING, DeviceStage.UPLOAD, DeviceStage.NONE], np.int8
        )[passed]
        return stage


@dataclass(frozen=True, slots=True)
class Losses:
    """When devices are lost."""

    lost_s: Floats  # when it falls silent, in seconds from the round's opening; inf: never
    away_s: Floats  # for how long; inf: for good
    stage: Stages  # what it did then

    @property
    def back_s(self) -> Floats:
        return self.lost_s + self.away_s


@dataclass(frozen=True, slots=True)
class Dropouts:
    """How devices are lost. In a secure round no device returns, because its masks are never on disk."""

    seed: int
    zones: Zones
    per_round: Floats  # chance to be lost once in a round, of each device (`of_each`)
    per_s: Floats  # chance in a second at work
    by_hour: Floats  # factors of both chances by the hour of the device's own day: 24, or one
    weights: tuple[float, ...]  # of `DeviceStage` from `DOWNLOAD` on; plain rounds have the first three
    returns: float = 0.0  # share of the lost that come back
    away_s: float = 60.0  # median time away, log-normal
    away_spread: float = 1.0  # sigma

    def losses(
        self, devices: Indices, purpose: tuple[int, int], now: float, course: RoundTimes, secure: bool
    ) -> Losses:
        """The losses of these devices in one attempt. `purpose`: round and attempt; `now`: when it opens."""
        hours = (self.zones.local_s(devices, now) % (24 * HOUR_S) / HOUR_S).astype(np.int64)
        factors = of_each(self.by_hour, hours)
        lost_s, stage = self._in_stages(devices, purpose, factors, course, secure)
        bits = words(self.seed, devices, "lost at work", *purpose)
        rate = np.maximum(of_each(self.per_s, devices) * factors, 1e-300)
        at_work_s = -np.log(uniforms(bits)) / rate
        is_first = (at_work_s < lost_s) & (at_work_s < course.report_s)
        lost_s, stage = np.where(is_first, at_work_s, lost_s), np.where(is_first, course.stage_at(at_work_s), stage)
        return Losses(lost_s, self._away_s(devices, purpose, secure), stage.astype(np.int8))

    def _in_stages(
        self, devices: Indices, purpose: tuple[int, int], factors: Floats, course: RoundTimes, secure: bool
    ) -> tuple[Floats, Stages]:
        is_lost = uniforms(words(self.seed, devices, "lost", *purpose)) < of_each(self.per_round, devices) * factors
        weights = np.cumsum(self.weights if secure else self.weights[:3])
        drawn = uniforms(words(self.seed, devices, "lost in", *purpose)) * weights[-1]
        stage = np.where(is_lost, np.searchsorted(weights, drawn, side="right") + 1, 0).astype(np.int8)
        part = uniforms(words(self.seed, devices, "lost when", *purpose))
        zero, never = np.zeros(len(devices)), np.full(len(devices), NEVER)
        heard, fetched, trained, report = course.heard_s, course.fetched_s, course.trained_s, course.report_s
        begins = np.stack([never, zero, fetched, trained, zero, heard, report, report])
        lasts = np.stack([zero, fetched, trained - fetched, report - trained, zero, zero, zero, zero])
        column = np.arange(len(devices))
        return begins[stage, column] + part * lasts[stage, column], stage

    def _away_s(self, devices: Indices, purpose: tuple[int, int], secure: bool) -> Floats:
        """How long each would be away."""
        if secure or not self.returns:
            return np.full(len(devices), NEVER)
        is_back = uniforms(words(self.seed, devices, "returns", *purpose)) < self.returns
        away = normals(words(self.seed, devices, "away", *purpose))
        return np.where(is_back, self.away_s * np.exp(self.away_spread * away), NEVER)
