"""Feature skew: clients whose inputs differ though their labels need not.

*Noise.* Li, Diao, Chen and He 2021, "Federated Learning on Non-IID Data Silos: An Experimental Study"
(arXiv:2102.02079), noise-based feature imbalance: the i-th of N clients, from 1, adds Gaussian noise of mean 0 and of
variance `variance` * i / N to each value of its inputs. (Their program uses that number as the standard deviation, and
draws new noise whenever a sample is read; here a client's data stay the same.)

*Rotation.* Images turned anticlockwise by a multiple of an angle: client k, from 0, by (k mod `turns`) * `angle`
degrees. With 90 degrees and 4 turns it is the rotated MNIST of Ghosh, Chung, Yin and Ramchandran 2020, "An Efficient
Framework for Clustered Federated Learning" (arXiv:2006.04088).
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from umbel.aggregation.types import require_within
from umbel.sim.data.partition.partition import Indices, Transform, require_option

Kind: TypeAlias = Literal["noise", "rotation"]
VARIANCE_MAX = 1e12
ANGLE_MIN, FULL_TURN, QUARTER_TURN = 0.01, 360.0, 90.0
TURNS_MAX = 36_000


@dataclass(frozen=True, slots=True)
class FeaturesSection:
    """How clients' inputs differ."""

    kind: Kind
    variance: float | None = None  # of the last client's noise
    angle: float | None = None  # in degrees
    turns: int | None = None  # how many multiples of the angle there are, 0 included; None: up to a full turn
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        require_option("kind", "noise", self.kind, "variance", self.variance)
        require_option("kind", "rotation", self.kind, "angle", self.angle)
        if self.variance is not None:
            require_within(self.variance, "variance", 0.0, VARIANCE_MAX)
        if self.angle is not None:
            require_within(self.angle, "angle", ANGLE_MIN, FULL_TURN)
        if self.turns is not None:
            require_option("kind", "rotation", self.kind, "turns", self.turns)
            require_within(self.turns, "turns", 1, TURNS_MAX)

    @property
    def n_angles(self) -> int:
        """How many clients in a row have different angles."""
        assert self.angle is not None, "the section has checked it"
        return max(1, math.floor(FULL_TURN / self.angle)) if self.turns is None else self.turns


def transform_of(section: FeaturesSection, n_clients: int, seed: int) -> Transform:
    """The transform of a section. `seed`: 64 bits."""
    if section.variance is not None:
        return GrowingNoise(section.variance, n_clients, seed)
    assert section.angle is not None, "the section has checked it"
    return Rotation(section.angle, section.n_angles)


@dataclass(frozen=True, slots=True)
class GrowingNoise:
    """Gaussian noise whose variance grows with the number of the client, up to `variance`.

    Each client draws from its own stream, keyed by the seed and its number, and from another for its held-back data.
    """

    variance: float
    n_clients: int
    seed: int

    def __call__(self, inputs: Tensor, clients: Indices, starts: Indices, *, are_held_back: bool) -> Tensor:
        if not inputs.is_floating_point():
            raise ValueError(f"noise needs floating-point inputs; these inputs are {inputs.dtype}")
        noise = np.empty((len(inputs), math.prod(inputs.shape[1:])), dtype=np.float32)
        counter = np.array([0, 0, 0, int(are_held_back)], dtype=np.uint64)
        for client, first, end in zip(clients.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            key = np.array([self.seed, client], dtype=np.uint64)
            np.random.Generator(np.random.Philox(counter=counter, key=key)).standard_normal(
                dtype=np.float32, out=noise[first:end]
            )
        deviations = np.sqrt(self.variance * (clients + 1) / self.n_clients).astype(np.float32)
        noise *= np.repeat(deviations, np.diff(starts))[:, None]
        return inputs.add_(torch.from_numpy(noise).view(inputs.shape))


@dataclass(frozen=True, slots=True)
class Rotation:
    """Square images, (n, side, side), (n, channels, side, side) or (n, side * side), turned by a multiple of `angle`.

    Quarter turns move pixels; others are bilinear, with 0 outside the image.
    """

    angle: float
    n_angles: int

    def __call__(self, inputs: Tensor, clients: Indices, starts: Indices, *, are_held_back: bool) -> Tensor:
        images = _as_images(inputs)
        multiples = np.repeat(clients % self.n_angles, np.diff(starts))
        for multiple in np.unique(multiples).tolist():
            of_these = torch.from_numpy(np.flatnonzero(multiples == multiple))
            images[of_these] = turned(images[of_these], multiple * self.angle)
        return inputs


def turned(images: Tensor, degrees: float) -> Tensor:
    """Images (n, channels, side, side), turned anticlockwise."""
    quarters, rest = divmod(degrees, QUARTER_TURN)
    if rest == 0:
        return torch.rot90(images, int(quarters), dims=(-2, -1))
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    backwards = torch.tensor([[[cos, -sin, 0.0], [sin, cos, 0.0]]], dtype=images.dtype)
    grid = nn.functional.affine_grid(backwards, [1, *images.shape[1:]], align_corners=False)
    return nn.functional.grid_sample(images, grid.expand(len(images), -1, -1, -1), align_corners=False)


def _as_images(inputs: Tensor) -> Tensor:
    """A view (n, channels, side, side). Raises `ValueError` for inputs that are no square images."""
    side = math.isqrt(inputs.shape[1]) if inputs.dim() == 2 else inputs.shape[-1]
    images = inputs.unflatten(1, (side, side)) if inputs.dim() == 2 and side * side == inputs.shape[1] else inputs
    if not inputs.is_floating_point() or images.dim() not in (3, 4) or images.shape[-2:] != (side, side):
        raise ValueError(
            f"only square images of floating-point numbers can be rotated, not inputs of shape "
            f'{tuple(inputs.shape[1:])} and dtype {inputs.dtype}; use features of kind = "noise", or other data'
        )
    return images.unsqueeze(1) if images.dim() == 3 else images
