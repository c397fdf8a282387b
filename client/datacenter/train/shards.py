"""Whether the ranks train on different samples: the most frequent mistake is that each of them has all the data.

Ranks that share data share hashes of samples (`samples.py`): of shards of a million samples each that are the same in
another order, 5,000 hashed ones share about 25. A run that goes on compares the hashes with those of before: other data
would make another model than the run's record says.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from umbel.client.app import Client
from umbel.client.datacenter.ranks.group import Group, GroupError
from umbel.client.datacenter.ranks.names import RankNames
from umbel.client.datacenter.ranks.samples import gathered_hashes

SAMPLES_MAX = 5_000
SHARED_MAX = 0.1  # of a rank's samples: natural duplicates are fewer
_COMMON_MIN = 10  # hashes: fewer may be alike by chance where not all samples were hashed


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
    by_rank = gathered_hashes(group, app, SAMPLES_MAX)
    if not may_share:
        _require_different([set(one) for one in by_rank], counts, group.names)
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


def _require_different(by_rank: Sequence[set[bytes]], counts: Sequence[int], names: RankNames) -> None:
    for rank, mine in enumerate(by_rank):
        for other, theirs in enumerate(by_rank[:rank]):
            share = _share(len(mine & theirs), len(mine), len(theirs), counts[other])
            if share > SHARED_MAX:
                raise GroupError(
                    f"about {share:.0%} of the training samples of {names.of(rank)} are on {names.of(other)} too: give "
                    f"each {names.noun} its own share, such as by `make_client(number, of)`, or pass --shared-data if "
                    "they are to train on the same"
                )


def _share(n_common: int, n_mine: int, n_theirs: int, count: int) -> float:
    """The share of one rank's samples that are on another, of which `n_theirs` of `count` samples were hashed.

    A sample that both have is among their hashed ones with a probability of `n_theirs` / `count`, unless both have
    their samples in the same order.
    """
    if not n_common or (n_common < _COMMON_MIN and n_theirs < count):
        return 0.0
    return min(1.0, n_common / n_mine * count / n_theirs)
