"""What the demo leaves behind: the picture, the lines, the summary."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from tests.sim.made_records import ended_round
from umbel.sim.demo_baselines import Baselines
from umbel.sim.demo_data import load_data
from umbel.sim.demo_plan import SPLIT, make_plan
from umbel.sim.demo_plot import draw_curves
from umbel.sim.demo_summary import round_line, summarize, table

PLAN = make_plan(0, 24, calm=False)
BASELINES = Baselines(0.98, tuple(0.4 + i / 40 for i in range(12)))


@pytest.mark.parametrize("n_rounds", [1, 12])
def test_the_picture_is_drawn_and_shows_something(tmp_path: Path, n_rounds: int) -> None:
    rounds = [ended_round(PLAN, i, committed=i != 2) for i in range(1, n_rounds + 1)]
    draw_curves(tmp_path / "curves.png", PLAN, rounds, BASELINES, load_data(SPLIT, 0).class_counts)
    image = imread(tmp_path / "curves.png")
    assert image.shape[0] > 800
    assert image.shape[1] > 1200
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 100


def test_the_summary_sums_over_all_attempts_and_takes_the_last_model() -> None:
    rounds = [ended_round(PLAN, 1), ended_round(PLAN, 2, committed=False), ended_round(PLAN, 3)]
    summary = summarize(PLAN, rounds, BASELINES, wall_s=12.0)
    assert (summary.rounds, summary.attempts, summary.selected) == (2, 3, 36)
    assert (summary.reported, summary.partial, summary.dropped, summary.lost) == (30, 1, 6, 1)
    assert summary.model_sha256 == f"{3:064x}"
    assert summary.local_accuracy_mean == pytest.approx(sum(BASELINES.alone) / 12)
    assert table(summary, Path("out"))


def test_a_demo_without_a_committed_round_has_no_summary() -> None:
    with pytest.raises(ValueError, match="no round"):
        summarize(PLAN, [ended_round(PLAN, 1, committed=False)], BASELINES, 1.0)


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
