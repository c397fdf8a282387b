"""The doctor between network namespaces whose links have a known bandwidth; needs root, `ip` and `tc`."""

import json
from typing import Any

import pytest

from tests.client.datacenter.doctor.shaped import CAN_SHAPE, namespaces, ranks_behind, ranks_in
from umbel.client.datacenter.doctor.algorithms import algorithms
from umbel.sim.bench.collective.hosts import address
from umbel.sim.bench.collective.links import with_rate

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.realtime,
    pytest.mark.skipif(not CAN_SHAPE, reason="needs root, ip and tc"),
]
DOCTOR = ("-m", "umbel", "doctor", "--distributed", "--json")
MEGABITS = 50.0  # few enough that no processor is slower
HEADERS = 0.955  # of the bytes on a link, what is not a header


def examined(n: int, slower: dict[tuple[int, int], float] | None = None) -> dict[str, Any]:
    with namespaces(n, MEGABITS, slower) as names:
        first, *others = ranks_in(names, DOCTOR)
    assert [one.returncode for one in (first, *others)] == [0] * n, first.stderr
    assert not any(one.stdout for one in others)
    found: dict[str, Any] = json.loads(first.stdout)
    return found


def test_bandwidths_are_those_of_the_links_and_sums_take_as_long_as_predicted() -> None:
    found = examined(3)
    for one in found["network"]["pairs"]:
        assert one["link"]["bytes_per_s"] * 8e-6 == pytest.approx(HEADERS * MEGABITS, rel=0.15)
    assert found["network"]["of_sums"]["bytes_per_s"] * 8e-6 == pytest.approx(HEADERS * MEGABITS, rel=0.2)
    measured = {one["algorithm"]: one for one in found["sums"]["times"] if one["measured_s"] is not None}
    assert measured.keys() == {"all_reduce", *algorithms((), 1)} - {"two-level"}
    for one in measured.values():
        assert one["measured_s"] == pytest.approx(one["predicted_s"], rel=0.25), one


def test_a_sum_on_two_levels_takes_as_long_as_predicted() -> None:
    with with_rate(2, MEGABITS) as link:
        prefixes = [link.prefix(host) for host in (0, 0, 1, 1)]
        first, *others = ranks_behind(prefixes, address(0), DOCTOR)
    assert [one.returncode for one in (first, *others)] == [0] * 4, first.stderr
    found = json.loads(first.stdout)
    assert [one["host"] for one in found["ranks"]] == ["umbel-0", "umbel-0", "umbel-1", "umbel-1"]
    measured = {one["algorithm"]: one for one in found["sums"]["times"]}
    two_level = measured["two-level"]
    assert two_level["measured_s"] == pytest.approx(two_level["predicted_s"], rel=0.25)
    assert two_level["measured_s"] < measured["ring"]["measured_s"], "less passes between the hosts"


def test_one_slow_link_is_named_and_no_other() -> None:
    found = examined(4, {(1, 3): MEGABITS / 5})
    said = [one["found"] for one in found["findings"] if one["check"] in ("slow link", "slow host")]
    assert len(said) == 1, said
    assert said[0].startswith("between rank 1 (on ")
    assert " and rank 3 (on " in said[0]
