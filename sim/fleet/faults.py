"""Corrupt and malicious devices: which they are, and what they send."""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.seeds import derive_seed
from umbel.sim.data.partition.partition import Indices
from umbel.sim.fleet.draws import uniforms, words
from umbel.sim.fleet.section import CorruptSection, MaliciousSection

Kinds: TypeAlias = NDArray[np.int8]


class Fault(IntEnum):
    """What is wrong with a device's work."""

    NONE = 0
    NAN = 1  # one value of the update is NaN
    GARBAGE = 2  # the bytes are random
    LENGTH = 3  # there are too few or too many bytes
    SCALED = 4  # the update is multiplied by a factor
    SIGN_FLIP = 5  # by a negative factor
    NOISE = 6  # the update is noise
    LABEL_FLIP = 7  # the device trains honestly on wrong labels

    @classmethod
    def named(cls, name: str) -> "Fault":
        """By its name in an experiment's file."""
        return cls[name.upper().replace("-", "_")]


@dataclass(frozen=True, slots=True)
class Faults:
    """Which devices have which fault. A device keeps its kind; a corrupt one shows it only in some rounds."""

    seed: int
    corrupt: CorruptSection
    malicious: MaliciousSection

    def of(self, devices: Indices, number: int, attempt: int) -> Kinds:
        """What is wrong with each device's work in one attempt: int8, of `Fault`."""
        drawn = uniforms(words(self.seed, devices, "fault"))
        corrupt = drawn < self.corrupt.share
        malicious = ~corrupt & (drawn < self.corrupt.share + self.malicious.share)
        kinds = np.where(corrupt, self._kinds(devices, self.corrupt.kinds), Fault.NONE)
        shows = uniforms(words(self.seed, devices, "fault shows", number, attempt)) < self.corrupt.per_round
        kinds = np.where(corrupt & ~shows, Fault.NONE, kinds)
        return np.where(malicious, self._kinds(devices, self.malicious.kinds), kinds).astype(np.int8)

    def spoil(self, values: Tensor, kinds: Kinds, devices: Indices, number: int, attempt: int) -> None:
        """Apply these faults to updates, in place. `values`: float32 (k, n_values), one row a device.

        The result for a device does not depend on the block. A coordinator refuses `GARBAGE` and `LENGTH` unread, and
        `LABEL_FLIP` applies to data (`flipped_labels`).
        """
        bits = words(derive_seed(self.seed, "spoil"), devices, number, attempt)
        for row in np.flatnonzero(kinds != Fault.NONE):
            self._spoil_one(values[int(row)], Fault(int(kinds[row])), int(bits[row]))

    def _spoil_one(self, update: Tensor, fault: Fault, bits: int) -> None:
        if fault is Fault.NAN and len(update):
            update[bits % len(update)] = torch.nan
        elif fault is Fault.SCALED:
            update.mul_(self.malicious.scale)
        elif fault is Fault.SIGN_FLIP:
            update.mul_(-self.malicious.scale)
        elif fault is Fault.NOISE:
            norm = torch.linalg.vector_norm(update, dtype=torch.float64)
            generator = torch.Generator(device=update.device).manual_seed(bits >> 1)
            update.normal_(generator=generator)
            update.mul_(self.malicious.scale * norm / torch.linalg.vector_norm(update, dtype=torch.float64))

    def _kinds(self, devices: Indices, names: tuple[str, ...]) -> Indices:
        kinds = np.array([Fault.named(name) for name in names], np.int64)
        chosen = (uniforms(words(self.seed, devices, "fault kind")) * len(kinds)).astype(np.int64)
        result: Indices = kinds[chosen]
        return result


def flipped_labels(labels: Tensor, n_classes: int) -> Tensor:
    """Class c becomes class n_classes - 1 - c, as in Tolpegin et al. 2020 (arXiv:2007.08432)."""
    return n_classes - 1 - labels
