"""How long a sum over all ranks takes, by algorithm: the textbook's models, and the fit of a link to measured times.

A message of m bytes takes L + m / B: L is the latency (alpha in the literature), and 1 / B the time of a byte (beta).
To add two vectors takes 1 / A for each byte (gamma). Links are full duplex, and each rank has one. A sum of n bytes
over P ranks, which all ranks get, then takes:

    parameter server        2 (P-1) (L + n/B) + (P-1) n/A                          one server, which is one of the ranks
    ring                    2 (P-1) L + 2 (P-1)/P n/B + (P-1)/P n/A                Patarasuk and Yuan 2009, section 3
    binomial tree           h (2 L + 2 n/B + n/A), h = ceil(log2 P)                Thakur et al. 2005, section 4.4
    recursive doubling      log2(P) (L + n/B + n/A)                                Thakur et al. 2005, section 4.5
    halving and doubling    2 log2(P) L + 2 (P-1)/P n/B + (P-1)/P n/A              Rabenseifner 2004; Thakur et al. 2005
    double binary tree      (k + e) (2 L + c n/(kB) + c n/(2kA))                   two ports; see below
    the same, one port      4 h L + 2 n/B + 2 sqrt(8 h L n/B) + n/A                Sanders, Speck and Träff 2009

The two in the middle are butterflies. If P is no power of two, they begin and end with one more message of the whole
vector, for the ranks beyond the largest power of two (Thakur et al. 2005, section 4.5). On two levels (Kielmann et al.
1999), trees add up on each machine, a ring adds up between one rank of each, and trees send the sum down.

The double tree sends each half of its vector up and down one tree, in k pieces. In the paper a rank has one port: in a
round it sends one piece and receives one. It needs two rounds for each level and each piece, which takes
(2 h + k) (L + n / (k B)) each way with k pieces in all, and is least for k = sqrt(2 h n / (L B)). A rank with a network
card of today sends both pieces of these two rounds at once: they share the bandwidth, but wait for the latency at the
same time. So in a round a rank sends and receives at most c = min(2, P-1) pieces of n / (2k) bytes. A tree whose left
subtrees have the ranks before a node, and whose right ones those after it, has the height floor(log2 P). The last of k
pieces arrives e = floor(log2 P) - 1 rounds after round k. The time is least for k = sqrt(e c n (2/B + 1/A) / (4 L)).

Often quoted forms without the factor P-1, such as 2 (L + n/B) for a parameter server, hold only if there are as many
servers as ranks, each for a part of the vector.

- Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1)
- Rabenseifner 2004, "Optimization of Collective Reduction Operations", ICCS
- Patarasuk, Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2)
- Sanders, Speck, Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
  Computing 35(12)
- Kielmann et al. 1999, "MagPIe: MPI's collective communication operations for clustered wide area systems", PPoPP
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

PIECES_MAX = 256
"""The most pieces of each half of a double tree's vector. Smaller pieces would mostly wait for their latency."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """What a rank's link can do. `adds_bytes_per_s`: how fast a rank adds one vector to another one."""

    latency_s: float
    bytes_per_s: float
    adds_bytes_per_s: float = math.inf

    def message_s(self, n_bytes: float) -> float:
        """Seconds of one message."""
        return self.latency_s + n_bytes / self.bytes_per_s

    def add_s(self, n_bytes: float) -> float:
        """Seconds to add one vector to another one."""
        return n_bytes / self.adds_bytes_per_s


CostModel: TypeAlias = Callable[[float, int, LinkModel], float]
"""The seconds of a sum of `n_bytes` over `n_ranks`, from 1, with the same `link` between any two. One rank: 0 s."""


def parameter_server(n_bytes: float, n_ranks: int, link: LinkModel) -> float:
    """One server, which is one of the ranks: its link carries the vector of every other rank in, and the sum out."""
    return (n_ranks - 1) * (2 * link.message_s(n_bytes) + link.add_s(n_bytes))


def ring(n_bytes: float, n_ranks: int, link: LinkModel) -> float:
    """A reduce-scatter and an all-gather around a ring, each in P-1 rounds of 1/P of the vector."""
    part = n_bytes / n_ranks
    return (n_ranks - 1) * (2 * link.message_s(part) + link.add_s(part))


def binomial_tree(n_bytes: float, n_ranks: int, link: LinkModel) -> float:
    """Up a binomial tree to one rank, and down again, with the whole vector at each level."""
    return _levels(n_ranks) * (2 * link.message_s(n_bytes) + link.add_s(n_bytes))


def recursive_doubling(n_bytes: float, n_ranks: int, link: LinkModel) -> float:
    """A butterfly for short vectors: in each round two ranks exchange the whole vector."""
    rounds = _power_below(n_ranks)
    return rounds * (link.message_s(n_bytes) + link.add_s(n_bytes)) + _beyond(n_bytes, n_ranks, link)


def halving_and_doubling(n_bytes: float, n_ranks: int, link: LinkModel) -> float:
    """A butterfly for long vectors: a reduce-scatter by halves, then an all-gather by doubling."""
    rounds = _power_below(n_ranks)
    share = 1 - 1 / (1 << rounds)
    return (
        2 * rounds * link.latency_s
        + share * (2 * n_bytes / link.bytes_per_s + link.add_s(n_bytes))
        + _beyond(n_bytes, n_ranks, link)
    )


def double_binary_tree(n_bytes: float, n_ranks: int, link: LinkModel) -> float:
    """Two binary trees, each for half of the vector, in pieces; a rank sends one piece at a time, as in the paper."""
    if n_ranks == 1:
        return 0.0
    height, bytes_s = _levels(n_ranks), n_bytes / link.bytes_per_s
    delay = 2 * height * link.latency_s
    return 2 * (delay + bytes_s + 2 * math.sqrt(delay * bytes_s)) + link.add_s(n_bytes)


def two_port_double_tree(n_bytes: float, n_ranks: int, link: LinkModel) -> float:
    """The same trees; a rank sends two pieces at a time, which share its bandwidth. With the best number of pieces."""
    if n_ranks == 1:
        return 0.0
    return _two_port_s(n_bytes, n_ranks, link, double_tree_pieces(n_bytes, n_ranks, link))


def double_tree_pieces(n_bytes: float, n_ranks: int, link: LinkModel) -> int:
    """The number of pieces of each half with which a double tree of two ports takes the least time, from 1 to
    `PIECES_MAX`. `n_ranks`: from 2.
    """
    halves_s = min(2, n_ranks - 1) / 2 * (2 * n_bytes / link.bytes_per_s + link.add_s(n_bytes))
    filling_s = (_power_below(n_ranks) - 1) * halves_s
    if not filling_s:
        return 1
    if filling_s >= 2 * link.latency_s * PIECES_MAX**2:
        return PIECES_MAX
    below = math.floor(math.sqrt(filling_s / (2 * link.latency_s)))
    return min(max(1, below), below + 1, key=lambda n_pieces: _two_port_s(n_bytes, n_ranks, link, n_pieces))


def _two_port_s(n_bytes: float, n_ranks: int, link: LinkModel, n_pieces: int) -> float:
    """The seconds of a double tree of two ports with this number of pieces of each half."""
    in_round = min(2, n_ranks - 1) * n_bytes / 2 / n_pieces
    rounds = n_pieces + _power_below(n_ranks) - 1
    return rounds * (2 * link.message_s(in_round) + link.add_s(in_round))


def two_level(n_bytes: float, n_hosts: int, n_on_host: int, inside: LinkModel, between: LinkModel) -> float:
    """Trees on each of `n_hosts` machines, whose links are `inside`, and a ring `between` one rank of each."""
    return binomial_tree(n_bytes, n_on_host, inside) + ring(n_bytes, n_hosts, between)


COST_MODELS: Mapping[str, CostModel] = MappingProxyType(
    {
        "ring": ring,
        "tree": binomial_tree,
        "double binary tree": two_port_double_tree,
        "one-port double binary tree": double_binary_tree,
        "recursive doubling": recursive_doubling,
        "halving and doubling": halving_and_doubling,
        "parameter server": parameter_server,
    }
)


@dataclass(frozen=True, slots=True)
class MessageTiming:
    """That `messages` one after another, with `n_bytes` in all, took so long."""

    messages: float
    n_bytes: float
    seconds: float


def ring_timing(n_bytes: float, n_ranks: int, seconds: float) -> MessageTiming:
    """What a measured ring of at least two ranks says of its link."""
    return MessageTiming(2 * (n_ranks - 1), 2 * (n_ranks - 1) / n_ranks * n_bytes, seconds)


def fitted(timings: Iterable[MessageTiming]) -> LinkModel:
    """The latency and bandwidth with the least squares of relative errors, sum of (messages L + n_bytes / B - t)^2 /
    t^2, so that small messages count as much as large ones. Neither is below zero.

    Raises `ValueError` unless there are two lengths at least.
    """
    rows = _rows(timings)
    latency_s, byte_s = _least_squares(rows)
    if latency_s < 0:
        return LinkModel(0.0, sum(b * b for _, b in rows) / sum(b for _, b in rows))
    if byte_s <= 0:
        return LinkModel(sum(m for m, _ in rows) / sum(m * m for m, _ in rows), math.inf)
    return LinkModel(latency_s, 1 / byte_s)


def bandwidth(timings: Iterable[MessageTiming]) -> float:
    """Bytes a second by the slope of the times alone: as `fitted`, but a latency below zero is possible. That is what
    the times of long messages look like if the first bytes of each are faster than the rest. Infinite if the times do
    not grow with the length.
    """
    _, byte_s = _least_squares(_rows(timings))
    return 1 / byte_s if byte_s > 0 else math.inf


def _rows(timings: Iterable[MessageTiming]) -> list[tuple[float, float]]:
    return [(one.messages / one.seconds, one.n_bytes / one.seconds) for one in timings]


def _least_squares(rows: list[tuple[float, float]]) -> tuple[float, float]:
    """L and 1/B that make the squares of m L + b / B - 1 over the rows (m, b) least."""
    mm, mb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    m, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = mm * bb - mb * mb
    if determinant <= 1e-9 * mm * bb:
        raise ValueError("a link is fitted to the times of messages of at least two different lengths")
    return (bb * m - mb * b) / determinant, (mm * b - mb * m) / determinant


def _levels(n_ranks: int) -> int:
    """ceil(log2 P)"""
    return (n_ranks - 1).bit_length()


def _power_below(n_ranks: int) -> int:
    """floor(log2 P)"""
    return n_ranks.bit_length() - 1


def _beyond(n_bytes: float, n_ranks: int, link: LinkModel) -> float:
    """The first and last message of the ranks beyond the largest power of two."""
    if n_ranks == 1 << _power_below(n_ranks):
        return 0.0
    return 2 * link.message_s(n_bytes) + link.add_s(n_bytes)
