"""Whether the ranks train on different samples: the most frequent mistake is that each of them has all the data.

Each rank hashes some of its training samples, spread evenly. (All of them might take hours to read.) Ranks that share
data share hashes: of shards of a million samples each that are the same in another order, 5,000 hashed ones share
about 25. Samples that augmentation draws anew each time have no two hashes alike, and are
not compared; nor are clients other than `TorchClient`, and tables of few categories, whose samples are often equal.
A run that goes on compares the hashes with those of before: other data would make another model than the run's record
says.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from umbel.client.app import Client
from umbel.client.datacenter.ranks.group import Group, GroupError
from umbel.client.training.trainer import TorchClient
from umbel.client.user_code import where_raised

SAMPLES_MAX = 5_000
_READ_TWICE = 16  # samples: if one has another hash the second time, they are drawn anew each time
SHARED_MAX = 0.1  # of a rank's samples: natural duplicates are fewer
_DISTINCT_MIN = 0.9  # below it, as in tables of few categories, equal samples say nothing
_COMMON_MIN = 10  # hashes: fewer may be alike by chance where not all samples were hashed
_HASH_BYTES = 8


_READ, _BROKEN = b"\0", b"\1"  # how a rank's message begins: hashes follow, or words about a broken sample


class _BrokenSample(Exception):
    """A sample that cannot be read: its index, a space, and why."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The training data of a rank, for the summary. `sha256`: of the hashed samples; empty if none can be read."""

    samples: int
    hashed: int
    sha256: str


def compared_shards(group: Group, app: Client, counts: Sequence[int], *, may_share: bool) -> list[Shard]:
    """The shards of all ranks. `counts`: the samples of each.

    Raises `GroupError` on all ranks if a sample of one cannot be read, and if two ranks share much of what was hashed,
    unless they may.
    """
    try:
        mine = _READ + b"".join(_hashes(app))
    except _BrokenSample as error:
        mine = _BROKEN + str(error).encode()
    with group.waiting_for("the hashes of training samples"):
        said = group.gather(mine)
    for rank, data in enumerate(said):
        if data.startswith(_BROKEN):
            place, _, why = data[1:].decode().partition(" ")
            raise GroupError(
                f"sample {place} of the training data of rank {rank} cannot be read: {why}. Mend this sample, or leave "
                "it out of the data"
            )
    by_rank = [[data[i : i + _HASH_BYTES] for i in range(1, len(data), _HASH_BYTES)] for data in said]
    if not may_share:
        _require_different([set(one) for one in by_rank], counts)
    return [
        Shard(count, len(one), hashlib.sha256(b"".join(one)).hexdigest() if one else "")
        for count, one in zip(counts, by_rank, strict=True)
    ]


def changed_data(before: Sequence[Shard], now: Sequence[Shard]) -> list[int]:
    """The ranks whose data are not what they were. With another number of ranks every rank has another share, and
    nothing is compared.
    """
    if len(before) != len(now):
        return []
    return [rank for rank, (one, other) in enumerate(zip(before, now, strict=True)) if one != other]


def _require_different(by_rank: Sequence[set[bytes]], counts: Sequence[int]) -> None:
    for rank, mine in enumerate(by_rank):
        for other, theirs in enumerate(by_rank[:rank]):
            share = _share(len(mine & theirs), len(mine), len(theirs), counts[other])
            if share > SHARED_MAX:
                raise GroupError(
                    f"about {share:.0%} of the training samples of rank {rank} are on rank {other} too: give each rank "
                    "its own share, such as by `make_client(number, of)`, or pass --shared-data if they are to train "
                    "on the same"
                )


def _share(n_common: int, n_mine: int, n_theirs: int, count: int) -> float:
    """The share of one rank's samples that are on another, of which `n_theirs` of `count` samples were hashed.

    A sample that both have is among their hashed ones with a probability of `n_theirs` / `count`, unless both have
    their samples in the same order.
    """
    if not n_common or (n_common < _COMMON_MIN and n_theirs < count):
        return 0.0
    return min(1.0, n_common / n_mine * count / n_theirs)


def _hashes(app: Client) -> list[bytes]:
    """Of some training samples; empty if the client is no `TorchClient`, or its data have no lengths and indices."""
    data = app.train_data if isinstance(app, TorchClient) else None
    places: Sequence[int] | None = None
    if isinstance(data, DataLoader):
        places, data = _places_of(data.sampler), data.dataset
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return []
    indexed: Any = data
    places = range(len(indexed)) if places is None else places
    n_hashed = min(len(places), SAMPLES_MAX)
    chosen = [places[i * len(places) // n_hashed] for i in range(n_hashed)]
    found = [_hash_of(indexed, place) for place in chosen]
    is_lasting = all(_hash_of(indexed, place) == one for place, one in zip(chosen[:_READ_TWICE], found, strict=False))
    return found if is_lasting and len(set(found)) > _DISTINCT_MIN * n_hashed else []


def _hash_of(data: Any, place: int) -> bytes:
    """Raises `_BrokenSample`."""
    try:
        return _hash(data[place])
    except Exception as error:
        raise _BrokenSample(f"{place} {where_raised(error)}") from error


def _places_of(sampler: object) -> Sequence[int] | None:
    """Which samples of its data set a loader takes; None: all, or unknown before it draws them."""
    match sampler:
        case DistributedSampler():
            return list(sampler)
        case SubsetRandomSampler():
            return list(sampler.indices)
        case RandomSampler() | SequentialSampler():
            return None
        case _:
            return []  # of one's own: to ask it might change what it draws later


def _hash(sample: object) -> bytes:
    digest = hashlib.sha256()
    _feed(digest, sample)
    return digest.digest()[:_HASH_BYTES]


def _feed(digest: Any, part: object) -> None:
    match part:
        case torch.Tensor():
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        case np.ndarray():
            digest.update(f"{part.dtype}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).tobytes())
        case Mapping():
            for name, one in part.items():
                digest.update(str(name).encode())
                _feed(digest, one)
        case list() | tuple():
            for one in part:
                _feed(digest, one)
        case _:
            digest.update(repr(part).encode())
