"""The capacity page is what the capacity model says, and the model says what it must."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.repository import ROOT
from tests.sim.bench.coordinator.capacity import BUSY, MEASURED, Fleet, need

PAGE = ROOT / "docs" / "explanation" / "scale.md"


def table_row(devices: int) -> tuple[str, ...]:
    fleet = Fleet(devices)
    found = need(fleet, MEASURED)
    return (
        f"{devices:,}",
        f"{found.check_ins_per_s:,.0f}",
        f"{found.cpu_cores:.2f}",
        str(found.replicas),
        f"{found.rows_per_s:,.0f}",
        f"{found.database_share:.1%}",
        f"{found.database_bytes / 1e9:.2f} GB",
        found.saturates_first,
    )


@pytest.mark.parametrize("devices", [10_000, 100_000, 1_000_000, 10_000_000])
def test_the_page_has_what_the_model_says(devices: int) -> None:
    cells = [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in PAGE.read_text().splitlines()]
    assert table_row(devices) in cells, " | ".join(table_row(devices))


def test_the_page_names_every_cost() -> None:
    named = set(re.findall(r"`([a-z_]+)`", PAGE.read_text()))
    assert {name for name in type(MEASURED).__dataclass_fields__ if name.endswith("_s")} <= named


@given(st.integers(1, 10**8), st.floats(1.0, 5.0))
def test_more_devices_and_a_higher_peak_never_need_less(devices: int, peak: float) -> None:
    fleet = Fleet(devices, peak=peak)
    more = need(replace(fleet, devices=2 * devices), MEASURED)
    assert more.replicas >= need(fleet, MEASURED).replicas >= 2, "one may die"
    assert more.cpu_cores <= BUSY * (more.replicas - 1) + 1e-9


def test_large_models_without_links_load_the_replicas() -> None:
    fleet = Fleet(10_000, model_bytes=1e9, update_bytes=1e9, cohort=1000, round_every_s=600.0)
    through, around = need(replace(fleet, links=False), MEASURED), need(fleet, MEASURED)
    assert through.links > around.links
    assert "database" not in through.saturates_first
