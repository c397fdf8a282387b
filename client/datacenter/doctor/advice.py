"""The part of a step that takes most time, and the `every` and codec that suit a job. Pure.

A step with a sum after it takes t; without the sum t_alone; without the sum and with one repeated batch t_synthetic:

    communication = 1 - t_alone / t        input = 1 - t_synthetic / t_alone

With a sum only after `every` steps, the share of the time in which a rank trains (its compute utilisation) is

    every t_alone / (every t_alone + t_sum)

A trial may show less than this, because ranks wait for each other, or share what a sum needs. Then t_sum is what the
trial has shown, and the advice is made anew.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from umbel.client.datacenter.loops.attach import CodecName

TARGET = 0.9
"""The compute utilisation to reach."""
CODECS: tuple[CodecName, ...] = ("float32", "8bit", "4bit", "2bit")  # by their bits
RARE = 32  # steps between two means of 2 bits, at least: it is for rare means
_SHORT = 0.9  # of what was predicted: a trial that reaches less refutes it
_RISE = 1.05  # of what a trial has reached: less is noise
_ABOUT_AS_FEW = 1.25  # up to this multiple, more steps than those of another codec count as about as few
Bottleneck: TypeAlias = Literal["communication", "input", "compute"]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step on the slowest rank."""

    normal_s: float  # with a sum after the step
    alone_s: float  # without a sum
    synthetic_s: float | None  # without a sum, with one repeated batch; None: it could not be measured

    @property
    def communication_share(self) -> float:
        """Of a step with a sum."""
        return max(0.0, 1 - self.alone_s / self.normal_s)

    @property
    def input_share(self) -> float | None:
        """Of a step without a sum."""
        return None if self.synthetic_s is None else max(0.0, 1 - self.synthetic_s / self.alone_s)

    @property
    def parts(self) -> Mapping[Bottleneck, float]:
        """The shares of a step with a sum; together 1."""
        alone = 1 - self.communication_share
        of_input = alone * (self.input_share or 0.0)
        return {"communication": self.communication_share, "input": of_input, "compute": alone - of_input}

    @property
    def bound(self) -> Bottleneck:
        """The part that takes most of a step."""
        parts = self.parts
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True, slots=True)
class Advice:
    """How often to add up, and in how many bits."""

    every: int  # steps between two sums
    codec: CodecName
    utilisation: float  # the predicted share of the time in which a rank trains


@dataclass(frozen=True, slots=True)
class RefutedAdvice:
    """An advice that did not come true."""

    advice: Advice
    measured: float  # the share of the time in which a rank trained


def utilisation(every: int, alone_s: float, sum_s: float) -> float:
    """The share of the time in which a rank trains."""
    return every * alone_s / (every * alone_s + sum_s)


def least_every(alone_s: float, sum_s: float) -> int:
    """The fewest steps between two sums that reach `TARGET`."""
    return max(1, math.ceil(TARGET / (1 - TARGET) * sum_s / alone_s * (1 - 1e-9)))


def advised(alone_s: float, sums: Mapping[CodecName, float]) -> Advice:
    """Choose the codec with the fewest steps between two sums; of codecs with about as few, the one with most bits.

    `alone_s`: seconds of a step without a sum. `sums`: seconds of a sum by codec.
    """
    steps: dict[CodecName, int] = {codec: least_every(alone_s, sum_s) for codec, sum_s in sums.items()}
    if "2bit" in steps:
        steps["2bit"] = max(RARE, steps["2bit"])
    fewest = min(steps.values())
    codec: CodecName = next(one for one in CODECS if one in steps and steps[one] <= _ABOUT_AS_FEW * fewest)
    return Advice(steps[codec], codec, utilisation(steps[codec], alone_s, sums[codec]))


def falls_short(measured: float, predicted: float) -> bool:
    """Whether a trial refutes a prediction. Both are shares of the time in which a rank trains."""
    return measured < _SHORT * predicted


def rises(before: float, after: float) -> bool:
    """Whether a second trial, with more steps between two sums, has reached clearly more than the first one."""
    return after > _RISE * before


def cost_of_sum(every: int, alone_s: float, measured: float) -> float:
    """The seconds of a sum and all waits beside it. `measured`: the utilisation of `every` steps and a sum; over 0."""
    return every * alone_s * (1 / measured - 1)


def advised_again(refuted: RefutedAdvice, alone_s: float, sums: Mapping[CodecName, float]) -> Advice:
    """The advice that follows if each sum takes longer than `sums` says, by as much as that of the refuted advice did.
    `alone_s` and `sums`: as for `advised`.
    """
    tried = refuted.advice
    longer_s = max(0.0, cost_of_sum(tried.every, alone_s, refuted.measured) - sums[tried.codec])
    longer: dict[CodecName, float] = {codec: took + longer_s for codec, took in sums.items()}
    return advised(alone_s, longer)
