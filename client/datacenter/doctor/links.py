"""Latency and bandwidth: of sums over all ranks, and of messages between two, so that a slow link or host is found."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from umbel.aggregation.collective.cost_models import LinkModel, MessageTiming, bandwidth, fitted, ring_timing
from umbel.client.datacenter.doctor.facts import RankFacts, named
from umbel.client.datacenter.doctor.timing import now, time_of
from umbel.client.datacenter.ranks.group import Group, lost_ranks_named
from umbel.client.findings import ClientFinding, passed, skipped, warned

SUM_BYTES = tuple(4096 * 4**k for k in range(7))  # 4 KiB to 16 MiB
_SUM_S_MAX, _SUM_BUDGET_S = 1.0, 0.5  # of one sum; of all sums of one length
_RANKS_MAX, _HOSTS_MAX = 8, 12  # up to these numbers, the links between each two are measured
_PAIRS_BUDGET_S, _MESSAGE_S_MAX = 30.0, 0.3
_MESSAGE_BYTES_MAX, _MESSAGE_BYTES_MIN = 8 << 20, 1 << 10
_REPEATS, _SHORT_REPEATS = 5, 25
_SLOW, _FAR = 2.0, 3.0  # times slower than the better links, and times their latency
_FAR_S = 5e-3  # and by so much, for less is noise of the processors

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PairLink:
    """The link between two ranks."""

    ranks: Pair
    link: LinkModel
    is_inside: bool  # whether both ranks are on one host


@dataclass(frozen=True, slots=True)
class RankNetwork:
    """What was measured between the ranks of a job."""

    sums: Mapping[int, float]  # seconds of an all-reduce over all ranks, by bytes
    of_sums: LinkModel | None  # fitted to these, as the sums of a ring; None for one rank
    pairs: tuple[PairLink, ...]

    def usual(self, *, inside: bool) -> LinkModel | None:
        """The median link inside of hosts, or between them; None if there is none."""
        links = [one.link for one in self.pairs if one.is_inside == inside]
        if not links:
            return None
        return LinkModel(median(one.latency_s for one in links), median(one.bytes_per_s for one in links))


_TIMINGS = TypeAdapter(dict[str, list[tuple[int, float]]])


def measured_network(group: Group, hosts: Sequence[str]) -> RankNetwork:
    """Measure sums and messages. `hosts`: of each rank. Returns the same on every rank."""
    if group.size == 1:
        return RankNetwork({}, None, ())
    sums = _sums(group)
    of_sums = fitted(ring_timing(n_bytes, group.size, seconds) for n_bytes, seconds in sums.items())
    pairs = pairs_to_measure(hosts)
    mine = {f"{a} {b}": times for (a, b), times in _messages(group, pairs, of_sums).items()}
    times = dict[str, list[tuple[int, float]]]()
    for one in group.gather(_TIMINGS.dump_json(mine)):
        times |= _TIMINGS.validate_json(one)
    found = {pair: link_of(times[f"{pair[0]} {pair[1]}"]) for pair in pairs}
    return RankNetwork(sums, of_sums, tuple(PairLink(one, link, _inside(one, hosts)) for one, link in found.items()))


def link_of(times: Sequence[tuple[int, float]]) -> LinkModel:
    """The link of single messages. `times`: seconds by bytes, of the shortest message first.

    The bandwidth is the slope of the longer ones, and the latency that of the shortest one. (One line through all would
    be too flat: a switch or a cloud's limiter lets the first bytes of a message through at full speed.)
    """
    (n_bytes, shortest_s), *longer = times
    bytes_per_s = bandwidth(MessageTiming(1, n, s) for n, s in longer)
    if bytes_per_s == math.inf:
        return fitted(MessageTiming(1, n, s) for n, s in times)
    return LinkModel(max(0.0, shortest_s - n_bytes / bytes_per_s), bytes_per_s)


def pairs_to_measure(hosts: Sequence[str]) -> list[Pair]:
    """Each two of few ranks. Of many: the first ranks of each two hosts (of many hosts: of neighbours and their
    neighbours in a circle), and neighbours on each host.
    """
    if len(hosts) <= _RANKS_MAX:
        return list(combinations(range(len(hosts)), 2))
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    firsts = [ranks[0] for ranks in by_host.values()]
    n = len(firsts)
    if n <= _HOSTS_MAX:
        between = list(combinations(firsts, 2))
    else:
        between = [_ordered(firsts[i], firsts[(i + step) % n]) for step in (1, 2) for i in range(n)]
    return between + [pair for ranks in by_host.values() for pair in pairwise(ranks)]


def slow_links(links: Sequence[PairLink]) -> list[PairLink]:
    """The links that are much slower than the better ones of their kind (inside of hosts, or between them): than the
    upper quartile, because one slow rank of three makes two links of three slow.
    """
    found = list[PairLink]()
    for kind in (True, False):
        own = [one for one in links if one.is_inside == kind]
        if len(own) < 2:
            continue
        fast = sorted((one.link.bytes_per_s for one in own), reverse=True)[(len(own) - 1) // 4]
        near = sorted(one.link.latency_s for one in own)[(len(own) - 1) // 4]
        far = max(_FAR * near, near + _FAR_S)
        found += [one for one in own if one.link.bytes_per_s * _SLOW < fast or one.link.latency_s > far]
    return found


def findings_of(network: RankNetwork, facts: Sequence[RankFacts]) -> Iterator[ClientFinding]:
    """The measured figures, and each slow link or host."""
    if network.of_sums is None:
        yield skipped("network", "there is only one rank: start more with torchrun --nproc-per-node")
        return
    lengths = f"{len(network.sums)} lengths up to {sized(max(network.sums))}"
    yield passed("sums", f"all_reduce over {len(facts)} ranks, {lengths}: {figures(network.of_sums)}")
    for inside, where in ((True, "inside a host"), (False, "between hosts")):
        if (usual := network.usual(inside=inside)) is not None:
            n = sum(one.is_inside == inside for one in network.pairs)
            yield passed("links", f"{n} {where}; the median: {figures(usual)}")
    yield from _slow(network, facts)


def _slow(network: RankNetwork, facts: Sequence[RankFacts]) -> Iterator[ClientFinding]:
    slow = slow_links(network.pairs)
    unnamed = list(slow)
    for rank in range(len(facts)):
        own = [one for one in network.pairs if rank in one.ranks]
        if len(own) > 1 and all(one in slow for one in own):
            worst = min((one.link for one in own), key=lambda link: link.bytes_per_s)
            said = f"all {len(own)} links of {named(rank, facts)} are slow, down to {figures(worst)}"
            yield warned("slow host", said, _remedy(own))
            unnamed = [one for one in unnamed if one not in own]
    for one in unnamed:
        a, b = (named(rank, facts) for rank in one.ranks)
        usual = network.usual(inside=one.is_inside)
        others = "" if usual is None else f", and the median is {figures(usual)}"
        yield warned("slow link", f"between {a} and {b}: {figures(one.link)}{others}", _remedy([one]))


def _remedy(links: Sequence[PairLink]) -> str:
    if all(one.is_inside for one in links):
        what = "see whether other programs use these processors, and measure again when none does"
    else:
        what = "look at its cable, its switch port and its other traffic"
    return f"{what}; all sums wait for the slowest link"


def figures(link: LinkModel) -> str:
    """Latency and bandwidth in words."""
    return f"latency {seconds(link.latency_s)}, {rate(link.bytes_per_s)}"


def rate(bytes_per_s: float) -> str:
    """A bandwidth in bits, as networks have them."""
    megabits = bytes_per_s * 8 / 1e6
    return f"{megabits / 1000:.3g} Gbit/s" if megabits >= 1000 else f"{megabits:.3g} Mbit/s"


def seconds(value: float) -> str:
    """A short time in a unit that suits it."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def sized(n_bytes: float) -> str:
    """A length in a unit that suits it."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.3g} {unit}"
    return f"{n_bytes:.0f} bytes"


def _sums(group: Group) -> dict[int, float]:
    found = dict[int, float]()
    for n_bytes in SUM_BYTES:
        if len(found) > 1 and 4 * found[n_bytes // 4] > _SUM_S_MAX:
            break
        values = torch.zeros(n_bytes // 4, device=group.wire)
        found[n_bytes] = time_of(group, lambda: dist.all_reduce(values, group=group.process_group), _SUM_BUDGET_S)  # noqa: B023 - it is called here
    return found


def _messages(group: Group, pairs: Sequence[Pair], of_sums: LinkModel) -> dict[Pair, list[tuple[int, float]]]:
    """Seconds of messages by bytes, of the pairs that this rank is the first of. One pair after another."""
    a_message_s = min(_MESSAGE_S_MAX, _PAIRS_BUDGET_S / (2 * _REPEATS * 1.4 * len(pairs)))
    longest = int(min(_MESSAGE_BYTES_MAX, max(64 * _MESSAGE_BYTES_MIN, a_message_s * of_sums.bytes_per_s)))
    lengths = [_MESSAGE_BYTES_MIN, longest // 4, longest // 2, longest]
    found = dict[Pair, list[tuple[int, float]]]()
    for pair in pairs:
        if group.rank in pair:
            times = [(n_bytes, _message_s(group, pair, n_bytes)) for n_bytes in lengths]
            if group.rank == pair[0]:
                found[pair] = times
        with lost_ranks_named():
            dist.barrier(group.process_group)
    return found


def _message_s(group: Group, pair: Pair, n_bytes: int) -> float:
    """Half of the median time of a message there and back."""
    values = torch.zeros(n_bytes, dtype=torch.uint8, device=group.wire)
    is_first, other = group.rank == pair[0], pair[1] if group.rank == pair[0] else pair[0]
    took = list[float]()
    with lost_ranks_named():
        for _ in range(1 + (_SHORT_REPEATS if n_bytes == _MESSAGE_BYTES_MIN else _REPEATS)):
            began = now(group)
            for sends in (is_first, not is_first):
                if sends:
                    dist.send(values, group=group.process_group, group_dst=other)
                else:
                    dist.recv(values, group=group.process_group, group_src=other)
            took.append(now(group) - began)
    return median(took[1:]) / 2


def _inside(pair: Pair, hosts: Sequence[str]) -> bool:
    return hosts[pair[0]] == hosts[pair[1]]


def _ordered(a: int, b: int) -> Pair:
    return min(a, b), max(a, b)
