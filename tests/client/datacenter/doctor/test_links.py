"""Links as they are measured in a real group, which of them are slow, and which are measured at all."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.aggregation.collective.ranks import in_ranks
from umbel.aggregation.collective.cost_models import LinkModel
from umbel.client.datacenter.doctor.facts import RankFacts
from umbel.client.datacenter.doctor.links import (
    SUM_BYTES,
    Pair,
    PairLink,
    RankNetwork,
    findings_of,
    link_of,
    measured_network,
    pairs_to_measure,
    rate,
    seconds,
    sized,
    slow_links,
)
from umbel.client.datacenter.ranks.group import Group

HERE = "tests.client.datacenter.doctor.test_links"
FAST, SLOW, FAR = LinkModel(1e-4, 1e9), LinkModel(1e-4, 1e8), LinkModel(0.05, 1e9)


def links(n_ranks: int, odd: dict[Pair, LinkModel], is_inside: bool = False) -> tuple[PairLink, ...]:
    pairs = pairs_to_measure([str(rank) for rank in range(n_ranks)])
    return tuple(PairLink(pair, odd.get(pair, FAST), is_inside) for pair in pairs)


def said(n_ranks: int, odd: dict[Pair, LinkModel]) -> list[str]:
    facts = [RankFacts(f"host-{rank}", {}, "processor", 0, 8) for rank in range(n_ranks)]
    network = RankNetwork({4096: 0.001, 16384: 0.002}, FAST, links(n_ranks, odd))
    return [f"{one.check}: {one.verdict}: {one.found}" for one in findings_of(network, facts)]


def test_one_slow_link_is_named() -> None:
    assert [one.ranks for one in slow_links(links(4, {(1, 3): SLOW}))] == [(1, 3)]
    assert [one.ranks for one in slow_links(links(4, {(1, 3): FAR}))] == [(1, 3)]
    assert said(4, {(1, 3): SLOW})[2:] == [
        "slow link: warning: between rank 1 (on host-1) and rank 3 (on host-3): latency 0.1 ms, 800 Mbit/s, and the "
        "median is latency 0.1 ms, 8 Gbit/s"
    ]


@pytest.mark.parametrize("n_ranks", [3, 4, 8])
def test_a_host_with_slow_links_alone_is_named_in_place_of_its_links(n_ranks: int) -> None:
    odd = {pair: SLOW for pair in pairs_to_measure(["h"] * n_ranks) if 1 in pair}
    found = said(n_ranks, odd)[2:]
    n = n_ranks - 1
    assert found == [
        f"slow host: warning: all {n} links of rank 1 (on host-1) are slow, down to latency 0.1 ms, 800 Mbit/s"
    ]


def test_two_slow_hosts_are_both_named() -> None:
    odd = {pair: SLOW for pair in pairs_to_measure(["h"] * 8) if {1, 2} & {*pair}}
    found = said(8, odd)[2:]
    assert [one.partition(" are slow")[0] for one in found] == [
        f"slow host: warning: all 7 links of rank {rank} (on host-{rank})" for rank in (1, 2)
    ]


def test_links_that_differ_a_little_are_not_slow() -> None:
    assert not slow_links(links(4, {(0, 1): LinkModel(4e-3, 0.6e9)}))
    assert not slow_links(links(2, {}))


def test_links_inside_of_hosts_are_not_compared_with_those_between_them() -> None:
    inside = PairLink((0, 1), LinkModel(1e-6, 1e11), True)
    assert not slow_links([inside, PairLink((2, 3), LinkModel(1e-6, 1e11), True), *links(3, {})])


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_slow_link_inside_a_host_is_no_matter_of_cables(is_inside: bool) -> None:
    facts = [RankFacts("h", {}, "processor", rank, 8) for rank in range(4)]
    network = RankNetwork({4096: 0.001}, FAST, links(4, {(1, 3): SLOW}, is_inside))
    (found,) = (one for one in findings_of(network, facts) if one.check == "slow link")
    assert ("processors" in found.advice, "cable" in found.advice) == (is_inside, not is_inside)


def test_few_ranks_are_measured_each_with_each_and_many_by_their_hosts() -> None:
    assert pairs_to_measure(["a", "a", "b"]) == [(0, 1), (0, 2), (1, 2)]
    by_hosts = pairs_to_measure([host for host in "abc" for _ in range(4)])
    assert by_hosts[:3] == [(0, 4), (0, 8), (4, 8)]
    assert by_hosts[3:6] == [(0, 1), (1, 2), (2, 3)]
    assert len(by_hosts) == 3 + 9
    many = pairs_to_measure([f"h{host}" for host in range(100)])
    assert len(many) == len(set(many)) == 200
    assert all(a < b for a, b in many)


def test_a_link_whose_first_bytes_are_faster_has_the_bandwidth_of_the_rest() -> None:
    burst, bytes_per_s = 65_536, 1e7
    times = [(n, 0.002 + max(n / 1e9, (n - burst) / bytes_per_s)) for n in (1024, 500_000, 1_000_000, 2_000_000)]
    found = link_of(times)
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-6)
    assert found.latency_s == pytest.approx(0.002, rel=0.1)


def test_times_that_do_not_grow_make_no_link_that_is_infinitely_fast() -> None:
    assert link_of([(1024, 1e-4), (10_000, 3e-3), (20_000, 2e-3), (40_000, 1e-3)]).bytes_per_s < 1e9


def test_numbers_have_units_that_suit_them() -> None:
    assert [rate(1e6), rate(1.25e8), rate(1e10)] == ["8 Mbit/s", "1 Gbit/s", "80 Gbit/s"]
    assert [seconds(2.5), seconds(0.00012)] == ["2.5 s", "0.12 ms"]
    assert [sized(12), sized(4096), sized(4 << 20), sized(3e9)] == ["12 bytes", "4.1 KB", "4.19 MB", "3 GB"]


def network(group: dist.ProcessGroup) -> dict[str, Tensor]:
    mine = Group(dist.get_rank(group), dist.get_world_size(group), torch.device("cpu"), group)
    found = measured_network(mine, ["a", "a", "b"])
    assert found.of_sums is not None
    numbers = [found.of_sums.latency_s, found.of_sums.bytes_per_s, *found.sums.values()]
    numbers += [number for one in found.pairs for number in (one.link.latency_s, one.link.bytes_per_s)]
    kinds = json.dumps([[*one.ranks, one.is_inside] for one in found.pairs])
    return {"numbers": torch.tensor(numbers, dtype=torch.float64), "kinds": torch.tensor(list(kinds.encode()))}


@pytest.mark.slow
def test_all_ranks_come_to_the_same_network(tmp_path: Path) -> None:
    by_rank = in_ranks(f"{HERE}:network", 3, tmp_path)
    for one in by_rank:
        assert torch.equal(one["numbers"], by_rank[0]["numbers"])
        assert json.loads(bytes(one["kinds"].tolist())) == [[0, 1, True], [0, 2, False], [1, 2, False]]
    latency_s, bytes_per_s, *times = by_rank[0]["numbers"].tolist()
    assert latency_s >= 0
    assert bytes_per_s > 0
    assert min(times[: len(SUM_BYTES) - 4]) > 0


def test_one_rank_has_no_network() -> None:
    alone = RankNetwork({}, None, ())
    (found,) = findings_of(alone, [RankFacts("h", {}, "processor", 0, 1)])
    assert (found.check, found.verdict) == ("network", "skipped")
