"""What the demo leaves behind: the picture, the lines, the summary."""

import io
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from tests.sim.made_records import ended_round
from tests.suite.nights import at_night
from umbel.sim.demo.baselines import Baselines
from umbel.sim.demo.board import Board, DemoRound, Proof
from umbel.sim.demo.digits import load_data
from umbel.sim.demo.plan import SPLIT, make_plan
from umbel.sim.demo.plot import curves, draw_curves
from umbel.sim.demo.sites import members_line
from umbel.sim.demo.summary import round_line, si_bytes, summarize, table

PLAN = make_plan(0, 24, calm=False)
BASELINES = Baselines(0.98, tuple(0.4 + i / 40 for i in range(12)))


def board_of(*rounds: DemoRound) -> Board:
    board = Board(PLAN, lambda _event: None, rounds=list(rounds), baselines=BASELINES, coordinator_killed_in=3)
    board.note_proof(Proof(len(rounds) + 1, 3, f"{3:064x}"))
    return board


@pytest.mark.nightly
@pytest.mark.parametrize("n_rounds", [*at_night(1), 12])
def test_the_picture_is_drawn_and_shows_something(tmp_path: Path, n_rounds: int) -> None:
    rounds = [ended_round(PLAN, i, committed=i != 2) for i in range(1, n_rounds + 1)]
    draw_curves(tmp_path / "curves.png", board_of(*rounds), load_data(SPLIT, 0).class_counts)
    image = imread(tmp_path / "curves.png")
    assert image.shape[0] > 800
    assert image.shape[1] > 1200
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 100


def test_the_picture_counts_rounds_and_tells_apart_what_an_abandoned_attempt_was_given() -> None:
    rounds = [ended_round(PLAN, 1), ended_round(PLAN, 2, committed=False), ended_round(PLAN, 2, attempt=2)]
    figure = curves(board_of(*rounds), load_data(SPLIT, 0).class_counts)
    accuracy, _, participation, megabytes = figure.axes
    labels = [text.get_text() for legend in [participation.get_legend()] if legend for text in legend.get_texts()]
    assert {"report discarded", "abandoned attempt"} <= set(labels)
    assert [axes.get_xlim()[1] for axes in (accuracy, participation, megabytes)] == [2.5] * 3


def test_the_summary_counts_each_request_once_and_takes_the_last_model() -> None:
    board = board_of(ended_round(PLAN, 1), ended_round(PLAN, 2, committed=False), ended_round(PLAN, 3))
    summary = summarize(board, wall_s=12.0)
    assert (summary.rounds, summary.attempts, summary.selected) == (2, 3, 36)
    assert (summary.reported, summary.partial, summary.in_vain) == (20, 1, 10)
    assert (summary.dropped, summary.lost) == (6, 1)
    assert summary.selected == summary.reported + summary.in_vain + summary.dropped
    assert summary.model_sha256 == summary.replayed == f"{3:064x}"
    assert (summary.coordinator_kills, summary.chain) == (1, 4)
    assert summary.local_accuracy_mean == pytest.approx(sum(BASELINES.alone) / 12)


def test_the_table_fits_eighty_columns_and_tells_of_kill_and_proof() -> None:
    board = board_of(ended_round(PLAN, 1), ended_round(PLAN, 2, committed=False), ended_round(PLAN, 3))
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as capture:
        console.print(table(summarize(board, 12.0), Path("out")))
    text = capture.get()
    for said in ("killed once in mid-round", "chain of 4 bundles verified", "same hash", f"{3:064x}", "10 reports of"):
        assert said in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_table_of_a_secure_demo_tells_of_the_list_with_its_whole_hash() -> None:
    board = board_of(ended_round(PLAN, 1))
    board.note_members("07f5be6f" * 8)
    summary = summarize(board, 12.0)
    assert summary.members_sha256 == "07f5be6f" * 8
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as capture:
        console.print(table(summary, Path("out")))
    assert members_line(12, "07f5be6f" * 8) in " ".join(capture.get().split())
    assert max(map(len, capture.get().splitlines())) <= 80


def test_the_table_of_a_plain_demo_tells_of_no_list() -> None:
    summary = summarize(board_of(ended_round(PLAN, 1)), 12.0)
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as capture:
        console.print(table(summary, Path("out")))
    assert summary.members_sha256 == ""
    assert "officers" not in capture.get()


def test_a_demo_without_a_committed_round_has_no_summary() -> None:
    with pytest.raises(ValueError, match="no round"):
        summarize(board_of(ended_round(PLAN, 1, committed=False)), 1.0)


@pytest.mark.parametrize("committed", [True, False])
def test_a_line_of_rounds_jsonl_has_the_promised_fields(committed: bool) -> None:
    line = json.loads(round_line(ended_round(PLAN, 3, committed=committed)))
    promised = "round model_version model_sha256 accuracy loss selected reported partial dropped bytes_up bytes_down"
    assert {*promised.split(), "wall_s", "virtual_s", "clients"} <= line.keys()
    assert (line["accuracy"] is None) is not committed


def test_the_test_set_is_held_out_and_the_shards_make_up_the_rest() -> None:
    data = load_data(SPLIT, 3)
    assert (len(data.train), len(data.test)) == (1347, 450)
    assert sum(map(len, data.shards)) == 1347
    assert data.class_counts.sum() == 1347
    assert asdict(SPLIT)["n_clients"] == len(data.shards)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (38_100_000, "38.1 MB"), (2 * 10**12, "2e+03 GB")],
)
def test_bytes_are_written_for_people(n_bytes: int, text: str) -> None:
    assert si_bytes(n_bytes) == text
