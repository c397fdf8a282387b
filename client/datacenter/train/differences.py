"""How long the ranks' updates of a round are, and how well they agree.

The names are those of a simulation's `[measure]`: u_i is the update of rank i, as it was before the codec, and m is the
weighted mean of all. Workers of DiLoCo agree less the longer they train alone (Douillard et al. 2023, section 3.1).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from umbel.aggregation.model.next_model import HasMean
from umbel.client.datacenter.ranks.group import Group


@dataclass(frozen=True, slots=True)
class RankUpdates:
    """By rank; None for a rank without an update."""

    update_norms: tuple[float | None, ...]  # |u_i|, L2
    update_cosines: tuple[float | None, ...]  # of the angle between u_i and m; 0 for an update of zeros

    @property
    def update_norm(self) -> float | None:
        """The mean over the ranks that have one."""
        return _mean(self.update_norms)

    @property
    def update_cosine(self) -> float | None:
        """The mean over the ranks that have one."""
        return _mean(self.update_cosines)


def compared(group: Group, update: Iterator[Tensor] | None, mean: HasMean) -> RankUpdates:
    """Compare each rank's update with the mean, in one pass over both. Called by all ranks together.

    `update`: this rank's, float32 in consecutive pieces; None if it has none.
    """
    found = None if update is None else _norm_and_cosine(update, mean)
    by_rank = [json.loads(one) or (None, None) for one in group.gather(json.dumps(found).encode())]
    norms, cosines = zip(*by_rank, strict=True)
    return RankUpdates(norms, cosines)


def _norm_and_cosine(update: Iterator[Tensor], mean: HasMean) -> tuple[float, float]:
    place, own, of_mean, both = 0, 0.0, 0.0, 0.0
    for piece in update:
        values = piece.to("cpu", torch.float64)
        others = mean.mean_slice(place, place + len(values))
        place += len(values)
        own += float(values @ values)
        of_mean += float(others @ others)
        both += float(values @ others)
    lengths = math.sqrt(own) * math.sqrt(of_mean)
    return math.sqrt(own), both / lengths if lengths else 0.0


def _mean(values: tuple[float | None, ...]) -> float | None:
    found = [one for one in values if one is not None]
    return sum(found) / len(found) if found else None
