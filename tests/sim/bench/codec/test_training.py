"""The training that codecs are compared by: it learns, counts every byte, and keeps its promises."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

from tests.aggregation.conftest import PATHS, compiled_paths
from tests.sim.data.sets.test_idx_files import idx_bytes
from tests.suite.nights import at_night
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.codec.vectors.buckets import Sign
from umbel.aggregation.kernels import native
from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.update.wire import HEADER_BYTES
from umbel.sim.bench.codec.training import (
    CONTENDERS,
    DEVICES,
    FLOAT32,
    N_VALUES,
    PROMISED,
    CodecContest,
    CodecRun,
    Contender,
    Scored,
    Setting,
    draw_codec_training,
    hold_codec_contest,
    measure_training,
    training_note,
    training_rows,
)
from umbel.sim.bench.report import BenchRow
from umbel.sim.commands import bench_app
from umbel.sim.data.data_set import SampleSet, TrainAndTest
from umbel.sim.data.sets.mnist import N_CLASSES, N_PIXELS

LAYOUT = Layout((TensorSpec("w", (N_VALUES,), "float32", 0),))
TINY = Setting("tiny", 8, 5, n_asked=4, learning_rate=0.05, n_steps=8, n_last=1, data=f"{__name__}:made_data")


def made_samples(n_samples: int, seed: int) -> SampleSet:
    """A pattern of its own for each class, and noise."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(0, N_CLASSES, n_samples))
    patterns = torch.from_numpy(np.random.default_rng(0).random((N_CLASSES, N_PIXELS), dtype=np.float32))
    noise = torch.from_numpy(rng.random((n_samples, N_PIXELS), dtype=np.float32))
    return SampleSet(0.7 * patterns[labels] + 0.3 * noise, labels)


def made_data() -> TrainAndTest:
    return TrainAndTest(made_samples(640, 1), made_samples(200, 2))


def trained(section: CodecSection, setting: Setting = TINY) -> CodecRun:
    ((_, run),) = hold_codec_contest(setting, None, [Contender(str(section.name), section)]).runs
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "section", [CodecSection(), PROMISED.codec, *at_night(CodecSection(name="eden", bits=2))], ids=lambda s: s.name
)
def test_a_few_rounds_teach_it_much(section: CodecSection) -> None:
    before, *_, after = trained(section, replace(TINY, n_rounds=16)).curve
    assert after.accuracy > max(0.5, before.accuracy)


@pytest.mark.nightly
def test_the_model_does_not_depend_on_which_kernels_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list[CodecRun]()
    for path in PATHS:
        monkeypatch.setenv(native.VARIABLE, path)
        native.chosen.cache_clear()
        if path is native.Path.TORCH or path in compiled_paths():
            runs.append(trained(PROMISED.codec))
    monkeypatch.undo()
    native.chosen.cache_clear()
    assert all(one == runs[0] for one in runs), "hash, bytes and accuracy"
    assert len(runs) > 1 or not compiled_paths()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_lossless_codec_gives_float32_s_model_in_fewer_bytes_and_a_lossy_one_another_each_time_the_same() -> None:
    planes = Contender("planes", CodecSection(name="planes"))
    again = Contender("again", PROMISED.codec)
    contest = hold_codec_contest(TINY, None, [FLOAT32, planes, PROMISED, again])
    whole, lossless, lossy, same = (run for _, run in contest.runs)
    assert lossless.sha256 == whole.sha256
    assert [scored.accuracy for scored in lossless.curve] == [scored.accuracy for scored in whole.curve]
    assert lossless.n_bytes < whole.n_bytes
    assert lossy == same
    assert lossy.sha256 != whole.sha256


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "update_bytes"),
    [
        (CodecSection(), HEADER_BYTES + 4 * N_VALUES),
        (CodecSection(name="sign"), HEADER_BYTES + Sign().payload_bytes(LAYOUT)[0]),
    ],
    ids=["float32", "sign"],
)
def test_every_byte_of_every_update_counts(section: CodecSection, update_bytes: int) -> None:
    run = trained(section)
    assert run.n_updates == TINY.n_rounds * TINY.n_asked
    assert run.n_bytes == run.n_updates * update_bytes
    assert run.bits == pytest.approx(8 * update_bytes / N_VALUES)
    each_round = TINY.n_asked * update_bytes / TINY.n_clients
    assert [(one.number, one.client_bytes) for one in run.curve] == [(i, i * each_round) for i in range(1, 6)]
    assert run.client_bytes == run.n_bytes / TINY.n_clients


@pytest.mark.nightly
def test_error_feedback_works_where_clients_come_back_every_round() -> None:
    silos = replace(TINY, n_asked=8, n_rounds=20)
    share = CodecSection(name="topk", share=0.002)
    plain, fed = (trained(section, silos) for section in (share, replace(share, error_feedback=True)))
    assert plain.n_bytes == pytest.approx(fed.n_bytes, rel=0.05)
    assert fed.accuracy(3) > plain.accuracy(3) + 0.1


def test_the_accuracy_at_the_end_is_the_mean_of_the_last_scores() -> None:
    run = CodecRun(tuple(Scored(number, 1.0, number / 10) for number in (1, 2, 3, 4)), 4, 4, "0" * 64)
    assert run.accuracy(3) == pytest.approx(0.3)


N_UPDATES = 1000


def made_run(accuracy: float, update_bytes: int) -> CodecRun:
    n_bytes = N_UPDATES * update_bytes
    curve = tuple(
        Scored(number, number / 100 * n_bytes / DEVICES.n_clients, accuracy * min(1.0, 0.5 + number / 80))
        for number in range(1, 101)
    )
    return CodecRun(curve, N_UPDATES, n_bytes, "0" * 64)


def rows_of(accuracy: float, update_bytes: int, *, quick: bool = False) -> list[BenchRow]:
    runs = ((FLOAT32, made_run(0.94, 800_000)), (PROMISED, made_run(accuracy, update_bytes)))
    return training_rows([CodecContest(DEVICES, runs)], quick=quick)


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
        CodecContest(setting, [(contender, made_run(0.9, 10_000 + i)) for i, contender in enumerate(contenders)])
        for setting, contenders in CONTENDERS.items()
    ]
    draw_codec_training(contests, tmp_path / "new" / "training.png")
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


@pytest.mark.nightly
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
