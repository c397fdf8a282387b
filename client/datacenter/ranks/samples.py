"""Hashes of a client's training samples, by which ranks compare their data.

Each rank hashes some of its samples, spread evenly: all of them might take hours to read. Samples that augmentation
draws anew each time have no two hashes alike, and are not compared; nor are clients other than `TorchClient`, and
tables of few categories, whose samples are often equal.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from umbel.client.app import Client
from umbel.client.datacenter.ranks.group import Group, GroupError
from umbel.client.training.trainer import TorchClient
from umbel.client.user_code import where_raised

_SAME_MAX = 64  # samples of ranks that must have the same: shares and orders differ in nearly all of them
_HASH_BYTES = 8
_READ_TWICE = 16  # samples: if one has another hash the second time, they are drawn anew each time
_DISTINCT_MIN = 0.9  # below it, as in tables of few categories, equal samples say nothing
_READ, _BROKEN = b"\0", b"\1"  # how a rank's message begins: hashes follow, or words about a broken sample


class _BrokenSample(Exception):
    """A sample that cannot be read: its index, a space, and why."""


def gathered_hashes(group: Group, app: Client, n_max: int) -> list[list[bytes]]:
    """Of each rank, the hashes of at most `n_max` samples; none where samples cannot be compared.

    Raises `GroupError` on all ranks if a sample of one cannot be read.
    """
    try:
        mine = _READ + b"".join(_hashes(app, n_max))
    except _BrokenSample as error:
        mine = _BROKEN + str(error).encode()
    with group.waiting_for("the hashes of training samples"):
        said = group.gather(mine)
    for rank, data in enumerate(said):
        if data.startswith(_BROKEN):
            place, _, why = data[1:].decode().partition(" ")
            raise GroupError(
                f"sample {place} of the training data of {group.names.of(rank)} cannot be read: {why}. Mend this "
                "sample, or leave it out of the data"
            )
    return [[data[i : i + _HASH_BYTES] for i in range(1, len(data), _HASH_BYTES)] for data in said]


def require_same_samples(group: Group, app: Client) -> None:
    """Raise `GroupError` on all ranks if the ranks of one client have different training samples."""
    first, *others = gathered_hashes(group, app, _SAME_MAX)
    for rank, hashes in enumerate(others, start=1):
        if first and hashes and hashes != first:
            raise GroupError(
                f"{group.names.of(rank)} has other training samples than {group.names.of(0)}. The ranks of a client "
                "take parts of the same batches, so give each of them all samples of the client, in one order, and no "
                "sampler of its own"
            )


def _hashes(app: Client, n_max: int) -> list[bytes]:
    """Of some training samples; empty if the client is no `TorchClient`, or its data have no lengths and indices."""
    data = app.train_data if isinstance(app, TorchClient) else None
    places: Sequence[int] | None = None
    if isinstance(data, DataLoader):
        places, data = _places_of(data.sampler), data.dataset
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return []
    indexed: Any = data
    places = range(len(indexed)) if places is None else places
    n_hashed = min(len(places), n_max)
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
