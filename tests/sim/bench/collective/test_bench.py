"""The report of `umbel bench collective`: what it promises, on which links, and what it says without any."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from umbel.sim.bench.collective.bench import CollectiveReport, Timed, links_of, rates_of, rows_of
from umbel.sim.bench.collective.job import (
    BF16,
    FLOAT32,
    METHODS,
    OURS_4BIT,
    OURS_8BIT,
    OURS_FLOAT32,
    POWER_1,
    POWER_4,
    HookAnswer,
    MethodRun,
)
from umbel.sim.bench.collective.links import Loopback
from umbel.sim.bench.collective.losses import FASHION, PLAYS, loss_note, loss_rows
from umbel.sim.commands import bench_app

N = 1_000_000
STEPS_S = {FLOAT32: 0.4, BF16: 0.2, POWER_1: 0.03, POWER_4: 0.04, OURS_FLOAT32: 0.41, OURS_8BIT: 0.2, OURS_4BIT: 0.14}
SHARES = {FLOAT32: 1.05, BF16: 0.52, POWER_1: 0.01, POWER_4: 0.02, OURS_FLOAT32: 1.05, OURS_8BIT: 0.27, OURS_4BIT: 0.14}
LEAST_S = {method: seconds / 2 for method, seconds in STEPS_S.items()} | {OURS_4BIT: 0.1}
AT_100 = Timed("100 Mbit/s", 2, 100.0, 0.0, N, STEPS_S, LEAST_S, dict.fromkeys(METHODS.values(), 0.02), SHARES)
AT_40_MS = replace(AT_100, title="100 Mbit/s, 40 ms round trip", round_trip_ms=40.0)


def promised(timed: Timed) -> dict[tuple[str, str], tuple[str | None, bool | None]]:
    return {(row.what, row.against): (row.hold, row.holds) for row in rows_of(timed) if row.hold is not None}


def test_at_100_mbit_s_four_bits_are_to_be_2_8_times_as_fast_as_float32_and_1_4_times_as_bf16() -> None:
    sent = {
        ("100 Mbit/s: sent in a step, umbel 8bit", "4n"): ("<= 0.27", True),
        ("100 Mbit/s: sent in a step, umbel 4bit", "4n"): ("<= 0.135", False),
    }
    what = "100 Mbit/s: step, umbel 4bit"
    steps = {
        (what, "torch float32"): ("<= 0.357", True),
        (what, "torch bf16"): ("<= 0.714", True),
    }
    assert promised(AT_100) == steps | sent
    slower = promised(replace(AT_100, steps_s={**STEPS_S, OURS_4BIT: 0.15}))
    assert [slower[one][1] for one in steps] == [False, False]


def test_with_40_ms_four_bits_are_to_be_1_3_times_as_fast_as_powersgd() -> None:
    what = "100 Mbit/s, 40 ms round trip: step, umbel 4bit"
    assert promised(AT_40_MS)[what, "torch PowerSGD rank 4"] == ("<= 0.769", False)
    fast = replace(AT_40_MS, steps_s={**STEPS_S, POWER_4: 0.2})
    assert promised(fast)[what, "torch PowerSGD rank 4"] == ("<= 0.769", True)
    assert (what, "torch float32") not in promised(AT_40_MS)


def test_nothing_is_promised_of_other_rates_and_other_numbers_of_ranks() -> None:
    assert set(promised(replace(AT_100, mbit_s=1000.0))) == set(promised(AT_100)) - {
        ("100 Mbit/s: step, umbel 4bit", "torch float32"),
        ("100 Mbit/s: step, umbel 4bit", "torch bf16"),
    }
    assert promised(replace(AT_100, n_ranks=4)) == {}


def test_every_rival_has_a_row_also_where_it_wins_and_so_has_the_limit() -> None:
    ratios = {row.against: row.ratio for row in rows_of(AT_100) if row.what == "100 Mbit/s: step, umbel 4bit"}
    # 2 (P - 1) / P x 4n bytes are 4 MB for two ranks: 0.32 s.
    assert ratios == {
        "torch float32": pytest.approx(0.35),
        "torch bf16": pytest.approx(0.7),
        "torch PowerSGD rank 1": pytest.approx(14 / 3),
        "torch PowerSGD rank 4": pytest.approx(3.5),
        "float32's bytes alone at this rate": pytest.approx(0.14 / 0.32),
    }
    assert replace(AT_100, n_ranks=4).limit_s == pytest.approx(0.48)
    without = [row.against for row in rows_of(replace(AT_100, mbit_s=None))]
    assert "float32's bytes alone at this rate" not in without


def test_steps_are_the_median_of_all_ranks_and_bytes_their_mean() -> None:
    answers = [
        HookAnswer(
            1000, {"float32": MethodRun([0.1, 0.9], 0.02, 4000.0, 1.0), "bf16": MethodRun([0.2], 0.02, 2000.0, 1.0)}
        ),
        HookAnswer(1000, {"float32": MethodRun([0.3], 0.04, 5000.0, 1.0), "bf16": MethodRun([0.4], 0.02, 2000.0, 1.0)}),
    ]
    timed = Timed.of(Loopback(), answers)
    assert timed.steps_s == {FLOAT32: pytest.approx(0.3), BF16: pytest.approx(0.3)}
    assert timed.least_s == {FLOAT32: 0.1, BF16: 0.2}
    assert timed.cpu_s[FLOAT32] == pytest.approx(0.03)
    assert timed.bytes_share == {FLOAT32: pytest.approx(1.125), BF16: pytest.approx(0.5)}
    assert (timed.n_ranks, timed.n_values, timed.limit_s) == (2, 1000, None)


def test_the_table_has_a_column_for_each_link_and_names_the_fastest() -> None:
    fast = replace(AT_40_MS, steps_s={**STEPS_S, OURS_4BIT: 0.02})
    report = CollectiveReport("collective", tuple(rows_of(AT_100)), ("a note",), (AT_100, fast))
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(report.to_table())
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    table = {cells[0]: cells[1:] for cells in lines if len(cells) == 3}
    assert table["torch float32"] == ["400 ms (200)", "400 ms (200)"]
    assert table["umbel 4bit"] == ["0.35 x (0.50)", "0.05 x (0.50)"]
    assert table["fastest"] == ["torch PowerSGD rank 1", "umbel 4bit"]
    found = report.to_json()
    assert list(found) == ["bench", "rows", "notes", "links"]
    assert [one["fastest"] for one in found["links"]] == ["powersgd-1", "umbel-4bit"]
    assert found["links"][0]["limit_s"] == pytest.approx(0.32)
    assert set(found["links"][0]["step_s"]) == set(METHODS)


def test_without_shaped_links_the_loopback_is_measured_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    links, words = links_of(2, ())
    with links[0] as link:
        assert link == Loopback()
    assert "over the loopback, which has no limit, because no rates were named with --rates" in words
    monkeypatch.setenv("PATH", "")  # neither root nor others find the tools
    links, words = links_of(2, (100.0, 1000.0), 40.0)
    assert len(links) == 1
    assert "over the loopback" in words
    assert "cannot be found" in words or "only" in words


def test_rates_are_numbers_with_commas_between_them() -> None:
    assert rates_of("") == ()
    assert rates_of("100, 2.5") == (100.0, 2.5)


@pytest.mark.parametrize("words", ["fast", "100,", "0", "-1", "nan", "1e9", "100;1000"])
def test_other_rates_are_refused(words: str) -> None:
    refused = CliRunner().invoke(bench_app, ["collective", "--rates", words])
    assert refused.exit_code == 2
    assert "is no rate" in refused.output


def test_a_delay_needs_a_rate() -> None:
    refused = CliRunner().invoke(bench_app, ["collective", "--round-trip-ms", "40"])
    assert refused.exit_code == 2
    assert "--rates" in refused.output


def test_losses_may_be_3_per_cent_above_float32_s() -> None:
    losses = {FLOAT32: (0.2, 0.4), BF16: (0.2, 0.4), OURS_8BIT: (0.2, 0.41), OURS_4BIT: (0.21, 0.41)}
    rows = loss_rows(FASHION, losses)
    assert [(row.against, row.hold, row.holds) for row in rows] == [
        ("torch float32", "<= 1.03", True),
        ("torch bf16", None, None),
        ("torch float32", "<= 1.03", False),
        ("torch bf16", None, None),
    ]
    assert rows[0].what == "Fashion-MNIST: loss after 400 steps, umbel 8bit"
    assert "umbel 4bit 1.050, 1.025" in loss_note(PLAYS, losses)
    assert "2 ranks train a transformer" in loss_note(PLAYS, losses)


def test_losses_need_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured."""
    monkeypatch.delenv("UMBEL_DATA", raising=False)
    refused = CliRunner().invoke(bench_app, ["collective", "--losses"])
    assert refused.exit_code == 2
    assert "--data" in refused.output
