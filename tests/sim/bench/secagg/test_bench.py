"""The bench of secure aggregation on small vectors: real rounds, honest bytes, and a picture."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from umbel.sim.bench.report import BenchRow, Report
from umbel.sim.bench.secagg.bench import MessageBytes, draw_secagg, formula_bytes, traffic, update_bytes
from umbel.sim.bench.secagg.cohort import keystream, mask_rows
from umbel.sim.bench.secagg.flower import flower_rows
from umbel.sim.bench.secagg.round import N_GONE, N, round_rows, share_rows


def test_the_formula_is_that_of_bonawitz_et_al() -> None:
    """2 n keys, 5n - 4 shares and the vector."""
    assert formula_bytes(500, 0, 23) == 2 * 500 * 32 + 2496 * 33
    assert formula_bytes(2, 1000, 16) - formula_bytes(2, 0, 16) == 2000


def test_traffic_is_the_length_of_every_message_but_the_update() -> None:
    n = 5
    dealt, held = 2 * 16 + 82, 2 * 16
    up = 132 + (4 + 32 + (n - 1) * dealt + held + 64) + 64 + 64 + (8 + 37 * n)
    down = (4 + 32 + 132 * n) + (4 + 4 * n + (n - 1) * dealt) + (4 + 4 * n) + (4 + 68 * n)
    assert traffic(n) == MessageBytes(up, down)


def test_an_update_takes_its_bits_a_value() -> None:
    at_16, at_8 = update_bytes(10, 100_000, 16), update_bytes(10, 100_000, 8)
    assert at_16 - at_8 == pytest.approx(100_000, rel=0.03)  # whole blocks of the rotation


def test_masks_stand_against_as_much_keystream() -> None:
    rows = mask_rows(quick=True, n_values=2000)
    assert [row.against for row in rows[:2]] == ["AES-256-CTR of the same 0 MB"] * 2
    assert len(rows) == 6
    assert all(row.ours > 0 and row.theirs > 0 for row in rows)


@pytest.mark.parametrize("n_bytes", [0, 1, 16, 100, 8192])
def test_a_keystream_of_any_length_can_be_made(n_bytes: int) -> None:
    keystream(n_bytes, 4096)()


def test_the_share_step_and_the_roster_are_measured_apart() -> None:
    share, roster = share_rows(k=5)
    assert share.promise is not None
    assert share.ours > 0
    assert roster.ours > 0
    assert roster.promise is None


@pytest.mark.nightly
@pytest.mark.slow
def test_a_whole_round_is_summed_rightly_while_it_is_measured() -> None:
    """It asserts so itself, of the coordinator's sum against the plain one."""
    found = round_rows(quick=True, n_values=1000)
    assert [row.unit for row in found.rows] == ["ms", "ms", "ms", "s", "MB"]
    assert f"{N - N_GONE} of {N} clients" in found.rows[3].what
    assert all("masks" in note for note in found.notes)


@pytest.mark.slow
def test_the_peer_is_measured_where_it_is_installed() -> None:
    rows = flower_rows(repetitions=1, n_values=1000)
    assert len(rows) in (0, 4)
    assert all(row.ratio < 1 for row in rows)


def test_the_picture_shows_every_time_and_what_is_sent(tmp_path: Path) -> None:
    rows = (
        BenchRow("masks", 1.0, "a keystream", 0.8, "ms"),
        BenchRow("coordinator", 0.9, "a keystream", 0.5, "s"),
        BenchRow("mask step", 60.0, "Flower's SecAgg+", 700.0, "ms"),
        BenchRow("one of 100 clients, 1,000,000 values, 23 bits: sent", 2.9, "float32, when", 4.0, "MB"),
    )
    draw_secagg(tmp_path / "new" / "secagg.png", Report("secagg", rows))
    picture = imread(tmp_path / "new" / "secagg.png")
    assert picture.shape[0] > 500
    assert picture.std() > 0.05, "something is drawn"
