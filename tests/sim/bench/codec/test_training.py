"""The rows that training adds to `umbel bench codec`: what they promise, and that a picture is drawn of it."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from tests.sim.data.sets.test_idx_files import idx_bytes
from umbel.sim.bench.codec.contenders import CONTENDERS, DEVICES, FLOAT32, PROMISED
from umbel.sim.bench.codec.federation import CodecRun, Scored
from umbel.sim.bench.codec.training import Contest, measure_training, training_note, training_rows
from umbel.sim.bench.codec.training_plot import draw
from umbel.sim.bench.report import Row
from umbel.sim.commands import bench_app

N_UPDATES = 1000


def made_run(accuracy: float, update_bytes: int) -> CodecRun:
    n_bytes = N_UPDATES * update_bytes
    curve = tuple(
        Scored(number, number / 100 * n_bytes / DEVICES.n_clients, accuracy * min(1.0, 0.5 + number / 80))
        for number in range(1, 101)
        if DEVICES.is_scored(number)
    )
    return CodecRun(curve, 199_210, N_UPDATES, n_bytes, "0" * 64)


def rows_of(accuracy: float, update_bytes: int, *, quick: bool = False) -> list[Row]:
    runs = ((FLOAT32, made_run(0.94, 800_000)), (PROMISED, made_run(accuracy, update_bytes)))
    return training_rows([Contest(DEVICES, runs)], quick=quick)


def test_it_is_promised_that_half_a_point_is_lost_at_most_in_a_32nd_of_the_bytes() -> None:
    accuracy, lost, uploaded = rows_of(0.937, 20_000)
    assert [accuracy.ours, accuracy.theirs, lost.ours] == pytest.approx([93.7, 94.0, 0.3])
    assert [uploaded.ours, uploaded.ratio] == pytest.approx([0.2, 0.025])
    assert [row.hold for row in (accuracy, lost, uploaded)] == [None, "<= 0.5 points", "<= 0.03125"]
    assert [row.holds for row in (accuracy, lost, uploaded)] == [None, True, True]
    assert [row.holds for row in rows_of(0.934, 25_100)] == [None, False, False]


def test_three_rounds_promise_no_accuracy() -> None:
    assert [row.hold for row in rows_of(0.5, 20_000, quick=True)] == [None, None, "<= 0.03125"]


def test_float32_comes_first_everywhere_and_titles_differ() -> None:
    for contenders in CONTENDERS.values():
        assert contenders[0] is FLOAT32
        assert PROMISED in contenders
        assert len({contender.title for contender in contenders}) == len(contenders)


def test_every_codec_of_the_contest_is_drawn(tmp_path: Path) -> None:
    contests = [
        Contest(setting, [(contender, made_run(0.9, 10_000 + i)) for i, contender in enumerate(contenders)])
        for setting, contenders in CONTENDERS.items()
    ]
    draw(contests, tmp_path / "new" / "training.png")
    picture = imread(tmp_path / "new" / "training.png")
    assert picture.shape[0] > 500
    assert picture.std() > 0.05, "something is drawn"
    assert "100 devices 100 rounds" in training_note(contests)


def test_without_data_nothing_is_measured_and_the_note_says_so(tmp_path: Path) -> None:
    rows, note = measure_training(None, None, quick=True)
    assert not rows
    assert "--data" in note
    with pytest.raises(FileNotFoundError):
        measure_training(tmp_path, None, quick=True)


def test_a_picture_of_no_training_is_refused(tmp_path: Path) -> None:
    refused = CliRunner().invoke(bench_app, ["codec", "--curves", str(tmp_path / "training.png")])
    assert refused.exit_code == 2
    assert "--data" in refused.output


@pytest.mark.slow
def test_a_quick_run_over_files_like_mnist_s(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "mnist").mkdir()
    for part, n_samples in (("train", 2000), ("t10k", 100)):
        labels = rng.integers(0, 10, n_samples).astype(np.uint8)
        images = rng.integers(0, 256, (n_samples, 28, 28)).astype(np.uint8)
        for name, array in ((f"{part}-images-idx3", images), (f"{part}-labels-idx1", labels)):
            (tmp_path / "mnist" / f"{name}-ubyte.gz").write_bytes(gzip.compress(idx_bytes(array)))
    rows, note = measure_training(tmp_path, tmp_path / "training.png", quick=True)
    assert [row.unit for row in rows] == ["%", "points", "MB"]
    assert rows[-1].theirs == pytest.approx(3 * 10 * (64 + 4 * 199_210) / 100 / 1e6)
    assert "3 rounds" in note
    assert (tmp_path / "training.png").stat().st_size > 10_000
