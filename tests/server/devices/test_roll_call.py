"""A site that has fallen away is told of: in the round under way and in the records of those it is missing from."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import Device, House, Json, LateClock, house, run_file, small_state
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.types import ClientId
from umbel.server.devices.clients import NAMED_MAX, absent_from
from umbel.server.store.waiters import FleetMember

LAYOUT = Layout.of_state(small_state())


def member(name: str, samples: int, seen_at: float = 10.0, until: float = 20.0) -> FleetMember:
    return FleetMember(ClientId(name), samples, seen_at, until, seen_at)


def test_who_is_asked_who_waits_and_who_has_come_since_is_not_absent() -> None:
    fleet = [
        member("asked", 1),
        member("waits", 2, until=110.0),
        member("came-since", 4, seen_at=101.0),
        member("no", 8),
    ]
    absent = absent_from(fleet, {ClientId("asked")}, 100.0, ())
    assert (absent.clients, absent.samples, [one.client for one in absent.named]) == (1, 8, ["no"])


def test_sites_that_coverage_names_are_named_first_then_those_with_the_most_samples() -> None:
    fleet = [member(f"h{number}", number) for number in range(20)]
    absent = absent_from(fleet, (), 100.0, {ClientId("h3")})
    assert (absent.clients, absent.samples) == (20, 190)
    assert [one.client for one in absent.named] == ["h3", "h19", "h18", "h17", "h16"][:NAMED_MAX]


async def part_of(it: House, devices: list[Device]) -> Json:
    """A round of these; what is shown of it while it is open."""
    values = torch.ones(LAYOUT.n_values)
    first, second = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
    shown = await it.progress()
    assert first["round"] == second["round"]
    await asyncio.gather(*(device.take_part(LAYOUT, values) for device in devices))
    return dict(shown["live"])


@pytest.mark.usefixtures("any_database")
def test_a_client_that_was_here_and_is_gone_is_told_of_until_it_is_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(run_file(count=2, target=2, minimum=2), small_state())
            *others, gone = await it.devices(3)
            assert (await gone.check_in(LAYOUT, 0.0)).status_code == 200
            clock.late_s += 60.0
            live = await part_of(it, others)
            assert (live["absent"]["clients"], live["absent"]["named"][0]["client"]) == (1, "d2")
            assert (await it.http.delete("/v1/admin/clients/d2", headers=it.admin)).status_code == 204
            await part_of(it, others)
            first, second = await it.ended(2)
            assert (first["absent"]["clients"], first["absent"]["samples"]) == (1, 10)
            assert second["absent"]["clients"] == 0

    asyncio.run(scenario())
