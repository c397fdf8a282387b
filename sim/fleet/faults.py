"""Devices that send rubbish, and devices that want to harm the model: which, and what becomes of their updates."""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.sample_order import Words
from umbel.aggregation.seeds import derive_seed
from umbel.sim.data.partition.partition import Indices
from umbel.sim.fleet.draws import uniforms, words
from umbel.sim.fleet.section import CorruptSection, MaliciousSection

Kinds: TypeAlias = NDArray[np.int8]


class Fault(IntEnum):
    """What is wrong with a device's work, if anything.

    `NAN`: one value of its update is none; `GARBAGE`: the bytes that it sends are any bytes; `LENGTH`: they are too few
    or too many; `SCALED`: its update is some times as long; `SIGN_FLIP`: that, the other way; `NOISE`: it is noise;
    `LABEL_FLIP`: it trains honestly, on wrong labels.
    """

    NONE = 0
    NAN = 1
    GARBAGE = 2
    LENGTH = 3
    SCALED = 4
    SIGN_FLIP = 5
    NOISE = 6
    LABEL_FLIP = 7

    @classmethod
    def named(cls, name: str) -> "Fault":
        """By its name in an experiment's file."""
        return cls[name.upper().replace("-", "_")]


@dataclass(frozen=True, slots=True)
class Faults:
    """Who does what. A device is of one kind for good; a corrupt one shows it in some rounds only."""

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
        """Make of updates what these devices make of them, in place. `values`: float32 (k, n_values), one row a device.

        The same device in the same attempt does the same to the same update, in whatever block it comes. `GARBAGE` and
        `LENGTH` are of bytes: `spoiled_bytes`; `LABEL_FLIP` of data: `flipped_labels`.
        """
        bits = self._bits(devices, number, attempt)
        for row in np.flatnonzero(kinds != Fault.NONE):
            self._spoil_one(values[int(row)], Fault(int(kinds[row])), int(bits[row]))

    def spoiled_bytes(self, body: bytes, kind: Fault, device: int, number: int, attempt: int) -> bytes:
        """What a device sends in the place of these bytes: others for `GARBAGE` and `LENGTH`, else the same."""
        bits = int(self._bits(np.array([device], np.int64), number, attempt)[0])
        if kind is Fault.GARBAGE:
            return np.random.default_rng(bits).bytes(len(body))
        if kind is Fault.LENGTH:
            n_bytes = bits % (2 * len(body) + 2)
            n_bytes += n_bytes == len(body)
            return (body + bytes(len(body) + 2))[:n_bytes]
        return body

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

    def _bits(self, devices: Indices, number: int, attempt: int) -> Words:
        return words(derive_seed(self.seed, "spoil"), devices, number, attempt)


def flipped_labels(labels: Tensor, n_classes: int) -> Tensor:
    """Class c taken for class n_classes - 1 - c, as Tolpegin et al. 2020 (arXiv:2007.08432) and others poison data."""
    return n_classes - 1 - labels
