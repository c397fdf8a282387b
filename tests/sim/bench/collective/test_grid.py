"""Means after every N steps: what is measured of real ranks, and the report of it."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.sim.bench.collective.small_job import LIMIT_S, N_VALUES, SMALL, samples
from umbel.sim.bench.collective.grid import Cell, GridReport, grid_job, loss_jobs, rows_of
from umbel.sim.bench.collective.job import RareAnswer, RareJob, RareTimes
from umbel.sim.bench.collective.links import Loopback
from umbel.sim.bench.collective.models import model_of
from umbel.sim.bench.collective.ranks import run_ranks
from umbel.sim.commands import bench_app

N = 1000
RARE = RareJob(
    n_ranks=2,
    everys=(1, 4),
    averagers=("float32", "4bit", "2bit"),
    widths=SMALL.widths,
    batch_size=16,
    learning_rate=0.1,
    untimed_means=0,
    means=1,
    steps_min=20,
    seed=4,
)


def answer(step_s: float, mean_s: float, sent_bytes: float | None) -> RareAnswer:
    return RareAnswer(N, [RareTimes("4bit", 8, step_s, mean_s, sent_bytes, 1.0)])


def test_utilisation_is_the_share_of_the_time_without_means_of_all_ranks() -> None:
    link = Loopback()
    found = Cell.all_of(link, [answer(0.25, 0.0625, 400.0), answer(0.25, 0.125, 600.0)])
    assert found == [Cell("loopback", 8, "4bit", utilisation=0.625, step_s=0.25, bytes_share=0.125)]
    assert Cell.all_of(link, [answer(0.02, 0.01, None)])[0].bytes_share is None


def cells() -> list[Cell]:
    found = list[Cell]()
    for link, slowness in (("50 Mbit/s", 4.0), ("200 Mbit/s", 1.0)):
        for every in (1, 8):
            found.append(Cell(link, every, "float32", 0.2 * every / 8 / slowness, 0.1, 1.04 / every))
            found.append(Cell(link, every, "4bit", 0.4 * every / 8 / slowness, 0.1, 0.13 / every))
    return found


def test_few_bits_are_compared_with_float32_on_the_same_link_after_as_many_steps() -> None:
    rows = rows_of(cells())
    assert len(rows) == 8
    assert {row.against for row in rows} == {"float32"}
    by_what = {row.what: row for row in rows}
    use = by_what["50 Mbit/s, every 8 steps: compute utilisation, 4bit"]
    assert (use.ours, use.theirs, use.ratio) == pytest.approx((10.0, 5.0, 2.0))
    sent = by_what["200 Mbit/s, every 8 steps: sent in a step, 4bit"]
    assert (sent.ours, sent.theirs) == pytest.approx((1.625, 13.0))
    unknown = [replace(one, bytes_share=None) for one in cells()]
    assert len(rows_of(unknown)) == 4


def test_the_table_has_a_row_for_each_number_of_steps() -> None:
    report = GridReport("collective", tuple(rows_of(cells())), ("a note",), tuple(cells()))
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(report.to_table())
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    table = {cells[0]: cells[1:] for cells in lines if len(cells) == 5}
    assert table == {"1": ["1%", "1%", "2%", "5%"], "8": ["5%", "10%", "20%", "40%"]}
    found = report.to_json()
    assert list(found) == ["bench", "rows", "notes", "grid"]
    assert [(one["link"], one["every"], one["averager"]) for one in found["grid"][:2]] == [
        ("50 Mbit/s", 1, "float32"),
        ("50 Mbit/s", 1, "4bit"),
    ]


@pytest.mark.parametrize("quick", [True, False])
def test_losses_are_compared_after_equally_many_steps(quick: bool) -> None:
    for _, job in loss_jobs(2, quick=quick):
        assert len({job.timed_steps(every) for every in job.everys}) == 1
        assert job.untimed_means == 0


def test_the_transformer_has_two_million_values() -> None:
    (_, job) = loss_jobs(2, quick=False)[-1]
    assert 1.9e6 < sum(one.numel() for one in model_of(job).parameters()) < 2.2e6


def test_each_number_of_steps_has_some_means() -> None:
    job = grid_job(2, quick=False)
    assert [job.timed_steps(every) for every in job.everys] == [12, 32, 128, 512]


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_real_ranks_end_with_one_model_that_has_learned(n_ranks: int) -> None:
    answers = run_ranks(replace(RARE, n_ranks=n_ranks), samples(), Loopback(), LIMIT_S)
    assert [one.n_values for one in answers] == [N_VALUES] * n_ranks
    first = answers[0].times
    assert [(one.every, one.averager) for one in first] == [
        (every, averager) for every in RARE.everys for averager in RARE.averagers
    ]
    for rank in answers:
        assert losses(rank.times) == losses(first), "20 steps are a multiple of 1 and of 4"
    for one in first:
        assert one.loss < 1.2, (one.every, one.averager)
        assert 0 < one.mean_s < one.step_s
        assert one.sent_bytes is None, "the loopback has others' bytes, too"


def losses(times: Sequence[RareTimes]) -> list[float]:
    return [one.loss for one in times]


def test_jobs_and_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    RARE.write(tmp_path)
    found = answer(0.1, 0.2, None)
    found.write(tmp_path, 1)
    assert RareJob.read(tmp_path) == RARE
    assert RARE.answer(tmp_path, 1) == found


def test_the_grid_has_no_delay() -> None:
    refused = CliRunner().invoke(bench_app, ["collective", "--grid", "--rates", "50", "--round-trip-ms", "40"])
    assert refused.exit_code == 2
    assert "--round-trip-ms" in refused.output
