"""What becomes of each device of a cohort in one attempt at a round: when it finishes each stage, or is lost.

A device hears of its work after a round trip, fetches the model, trains, uploads, reports. It trains as the SDK does
(`client/training/trainer.py`): at least one step, until all are done or the next would leave less of the window than
`client/wire/timing.py` reserves for the upload. Arrays have one entry a device.
"""

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from umbel.aggregation.run.report_times import Floats
from umbel.aggregation.secagg.turns import Phase
from umbel.client.wire.timing import GROWTH, MEASURED_S_MIN, SAFETY, retry_s
from umbel.sim.data.partition.partition import Indices
from umbel.sim.fleet.draws import normals, of_each, uniforms, words
from umbel.sim.fleet.faults import Fault, Kinds
from umbel.sim.fleet.presence import HOUR_S, Zones

Stages: TypeAlias = NDArray[np.int8]
Flags: TypeAlias = NDArray[np.bool_]
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


@dataclass(frozen=True, slots=True)
class CohortAsk:
    """What the devices of a cohort are asked in one attempt. Bytes are int64, (k,), or (1,) if equal for all."""

    steps: Indices  # int64 (k,), of each device, at least 1
    batch_size: int  # samples in a step
    down_bytes: Indices  # of the model, or of the change that a device fetches
    update_bytes: Indices
    window_s: float
    secure: bool = False
    update_bytes_max: int | None = None  # the greatest length of an update, if it differs from `update_bytes`


@dataclass(frozen=True, slots=True)
class LineRates:
    """The lines of devices in this attempt: bytes per second, and seconds of a round trip."""

    down: Floats
    up: Floats
    up_expected: Floats  # what a device measured when it last sent an update
    latency_s: Floats


@dataclass(frozen=True, slots=True)
class Spent:
    """Of each device, until some moment: bytes both ways, and seconds at work."""

    bytes_down: Indices
    bytes_up: Indices
    busy_s: Floats


@dataclass(frozen=True, slots=True)
class Fates:
    """What becomes of each device, in the cohort's order. Times are seconds from the round's opening; inf is never.

    A report may come after the window or the round has closed; the caller says until when a device worked (`spent`). A
    device that is lost at `DeviceStage.CONSISTENCY_CHECK` or `UNMASKING` has reported.
    """

    devices: Indices
    ask: CohortAsk
    lines: LineRates = field(repr=False)
    fetched_s: Floats  # when it has the model
    step_s: Floats  # how long a step takes
    trained_s: Floats  # when it begins to upload
    steps_done: Indices  # 0 if it does not report
    report_s: Floats  # when its report arrives
    lost_s: Floats  # when it falls silent
    back_s: Floats  # when it is back and resumes its work
    stage: Stages  # what it did when it was lost: int8, of `DeviceStage`
    fault: Kinds  # what is wrong with its work: int8, of `Fault`
    noticed_s: float = NEVER  # so long after a loss the coordinator no longer waits for the device

    @property
    def silent_s(self) -> Floats:
        """When the coordinator no longer waits for a device, unless it has reported or is back before; inf is never."""
        silent_s = self.lost_s + self.noticed_s
        return np.where(silent_s < np.minimum(self.back_s, self.report_s), silent_s, NEVER)

    def spent(self, until_s: float | Floats = NEVER) -> Spent:
        """The cost until then, or in all. `until_s`: when devices were told to stop, of each or of all."""
        until = np.minimum(until_s, np.where(np.isinf(self.report_s), self._given_up_s, self.report_s))
        at_work_s, is_up = self._at_work_s(until), until > self.trained_s
        lines, ask = self.lines, self.ask
        down_s = at_work_s - 2 * lines.latency_s
        begun_s = self._at_work_s(np.where(is_up, self.trained_s, 0.0))
        up_s = np.where(is_up, at_work_s - begun_s - lines.latency_s, 0.0)
        down, up = _moved(down_s * lines.down, ask.down_bytes), _moved(up_s * lines.up, ask.update_bytes)
        has_reported = (until >= self.report_s) & np.isfinite(self.trained_s)
        return Spent(
            np.where(has_reported, ask.down_bytes, down), np.where(has_reported, ask.update_bytes, up), at_work_s
        )

    def declining(self, who: Flags) -> "Fates":
        """The same if these devices decline the work when they hear of it: they fetch nothing, and their answer comes a
        round trip later. Those that are lost before they hear of it say nothing. `who`: bool (k,).
        """
        leave = who & self.hears
        return replace(
            self,
            fetched_s=np.where(leave, NEVER, self.fetched_s),
            trained_s=np.where(leave, NEVER, self.trained_s),
            steps_done=np.where(leave, 0, self.steps_done),
            report_s=np.where(leave, 2 * self.lines.latency_s, self.report_s),
            lost_s=np.where(leave, NEVER, self.lost_s),
            back_s=np.where(leave, NEVER, self.back_s),
            stage=np.where(leave, DeviceStage.NONE, self.stage).astype(np.int8),
            fault=np.where(leave, Fault.NONE, self.fault).astype(np.int8),
        )

    @property
    def hears(self) -> Flags:
        """Which devices hear of the round, because they are not lost before: bool (k,)."""
        return self.lost_s > self.lines.latency_s

    @property
    def _given_up_s(self) -> Floats:
        """When a device that does not report ends its work: it is lost, or has no model by the window's end."""
        return np.where(self.back_s < self.ask.window_s, self.ask.window_s, np.minimum(self.lost_s, self.ask.window_s))

    def _at_work_s(self, until_s: Floats) -> Floats:
        """Seconds until then, without those away."""
        is_lost = until_s > self.lost_s
        return np.where(is_lost, self.lost_s + np.where(until_s > self.back_s, until_s - self.back_s, 0.0), until_s)


def undisturbed(ask: CohortAsk, lines: LineRates, step_s: Floats) -> tuple[RoundTimes, Indices]:
    """How the round goes without losses, and how many steps each device does."""
    fetched_s = _fetched_s(ask, lines)
    steps = _steps_that_fit(training_room_s(ask, lines), step_s, ask.steps)
    trained_s = fetched_s + steps * step_s
    report_s = trained_s + 2 * lines.latency_s + ask.update_bytes / lines.up
    return RoundTimes(lines.latency_s, fetched_s, trained_s, report_s), steps


def reserve_s(ask: CohortAsk, lines: LineRates) -> Floats:
    """What each device reserves of the window for its upload: `Bandwidth.reserve_s` of the SDK, for all at once.

    All devices have sent an update before. They expect the line of that time, and an update 1.5 times as long.
    """
    longest = ask.update_bytes if ask.update_bytes_max is None else np.array([ask.update_bytes_max])
    expected = np.minimum(GROWTH * ask.update_bytes, longest)
    transfer_s = _transfer_s(expected, ask.update_bytes, lines.up_expected, lines.latency_s)
    return np.minimum(SAFETY * transfer_s + retry_s(ask.window_s), ask.window_s / 2)


def _transfer_s(n_bytes: Floats | Indices, measured_bytes: Indices, rate: Floats, latency_s: Floats) -> Floats:
    """How long `n_bytes` take by the measured transfer, round trip included; 0 without a measurement."""
    measured_s = np.maximum(measured_bytes / rate + latency_s, MEASURED_S_MIN)
    return np.where(measured_bytes > 0, n_bytes * measured_s / np.maximum(measured_bytes, 1), 0.0)


def disturbed(
    ask: CohortAsk, lines: LineRates, step_s: Floats, course: RoundTimes, losses: Losses
) -> tuple[RoundTimes, Indices]:
    """How the round goes with these losses. `course`: how it goes without them.

    A device that comes back resumes: with the bytes that it had, after the last step that it had finished. A device
    that does not report has 0 steps, and inf for its report.
    """
    _, n_undisturbed = undisturbed(ask, lines, step_s)
    back_s, away_s = losses.back_s, losses.away_s
    in_download = losses.stage == DeviceStage.DOWNLOAD
    fetched_s = course.fetched_s + np.where(in_download, away_s, 0.0)
    # Steps done before the loss, then the steps that still fit.
    in_training = losses.stage == DeviceStage.TRAINING
    n_before = np.where(in_training, np.floor((losses.lost_s - fetched_s) / step_s), 0.0)
    n_before = np.clip(n_before, 0, ask.steps - 1).astype(np.int64)
    resumed_s = np.where(in_training, back_s, fetched_s)
    fits = _steps_that_fit(_training_ends_s(ask, lines) - resumed_s, step_s, ask.steps - n_before)
    is_late = in_download | in_training
    steps = np.where(is_late, n_before + fits, n_undisturbed)
    trained_s = np.where(is_late, resumed_s + fits * step_s, course.trained_s)
    in_upload = losses.stage == DeviceStage.UPLOAD
    report_s = trained_s + (course.report_s - course.trained_s) + np.where(in_upload, away_s, 0.0)
    is_gone = np.isin(losses.stage, _NO_REPORT) & ~(back_s < ask.window_s)
    has_model = fetched_s < ask.window_s  # without it the device gives up
    is_gone |= ~has_model
    trained_s = np.where(is_gone & ~(has_model & (trained_s <= losses.lost_s)), NEVER, trained_s)
    return RoundTimes(course.heard_s, fetched_s, trained_s, np.where(is_gone, NEVER, report_s)), np.where(
        is_gone, 0, steps
    )


_NO_REPORT = (
    DeviceStage.DOWNLOAD,
    DeviceStage.TRAINING,
    DeviceStage.UPLOAD,
    DeviceStage.ADVERTISE_KEYS,
    DeviceStage.SHARE_KEYS,
)


def training_room_s(ask: CohortAsk, lines: LineRates) -> Floats:
    """How long each can train in the window without a loss; below 0 if its model comes too late."""
    return _training_ends_s(ask, lines) - _fetched_s(ask, lines)


def without_partial_work(ask: CohortAsk, course: RoundTimes, steps: Indices) -> tuple[RoundTimes, Indices]:
    """The same if devices send all of their work or nothing."""
    is_part = steps < ask.steps
    trained_s, report_s = (np.where(is_part, NEVER, times) for times in (course.trained_s, course.report_s))
    return RoundTimes(course.heard_s, course.fetched_s, trained_s, report_s), np.where(is_part, 0, steps)


def _fetched_s(ask: CohortAsk, lines: LineRates) -> Floats:
    return 2 * lines.latency_s + ask.down_bytes / lines.down


def _training_ends_s(ask: CohortAsk, lines: LineRates) -> Floats:
    return ask.window_s - reserve_s(ask, lines)


def _steps_that_fit(seconds: Floats, step_s: Floats, steps: Indices) -> Indices:
    """How many of these steps fit into `seconds`; at least one."""
    return np.clip(np.floor(seconds / step_s), 1, steps).astype(np.int64)


def _moved(n_bytes: Floats, all_bytes: Indices) -> Indices:
    return np.floor(np.clip(n_bytes, 0.0, all_bytes) + 1e-6).astype(np.int64)
