"""The training that codecs are compared by: it learns, it repeats itself, and it counts every byte."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from tests.aggregation.codec.conftest import PATHS, compiled_paths
from umbel.aggregation.codec.kernels import native
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.codec.vectors.codec import Projections
from umbel.aggregation.codec.vectors.sign import Sign
from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.update.wire import HEADER_BYTES
from umbel.sim.bench.codec.federation import CodecRun, Federation, Setting
from umbel.sim.bench.codec.uplink import Uplink
from umbel.sim.data.samples import Samples, TrainAndTest
from umbel.sim.data.sets.mnist import N_CLASSES, N_PIXELS

N_VALUES = 199_210
LAYOUT = Layout((TensorSpec("w", (N_VALUES,), "float32", 0),))
TINY = Setting("tiny", 8, 2, 4, n_rounds=5, learning_rate=0.05, n_steps=8, score_every=2, n_last=1)
FLOAT32, INTEGER = CodecSection(), CodecSection(name="integer", step=4.0)


def made_samples(n_samples: int, seed: int) -> Samples:
    """A pattern of its own for each class, and noise."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(0, N_CLASSES, n_samples))
    patterns = torch.from_numpy(np.random.default_rng(0).random((N_CLASSES, N_PIXELS), dtype=np.float32))
    noise = torch.from_numpy(rng.random((n_samples, N_PIXELS), dtype=np.float32))
    return Samples(0.7 * patterns[labels] + 0.3 * noise, labels)


DATA = TrainAndTest(made_samples(640, 1), made_samples(200, 2))


@pytest.mark.slow
@pytest.mark.parametrize("section", [FLOAT32, INTEGER, CodecSection(name="eden", bits=2)], ids=lambda s: s.name)
def test_a_few_rounds_teach_it_much(section: CodecSection) -> None:
    before, *_, after = Federation(replace(TINY, n_rounds=16), DATA, 1).train(section).curve
    assert after.accuracy > max(0.5, before.accuracy)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_model_and_another_seed_another() -> None:
    federation = Federation(TINY, DATA, 1)
    first, again = federation.train(INTEGER), federation.train(INTEGER)
    assert first == again == Federation(TINY, DATA, 1).train(INTEGER)
    assert Federation(TINY, DATA, 2).train(INTEGER).sha256 != first.sha256
    assert federation.train(FLOAT32).sha256 != first.sha256


@pytest.mark.nightly
def test_the_model_does_not_depend_on_which_kernels_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = list[CodecRun]()
    for path in PATHS:
        monkeypatch.setenv(native.VARIABLE, path)
        native.chosen.cache_clear()
        if path is native.Path.TORCH or path in compiled_paths():
            trained.append(Federation(TINY, DATA, 1).train(INTEGER))
    monkeypatch.undo()
    native.chosen.cache_clear()
    assert all(one == trained[0] for one in trained), "hash, bytes and accuracy"
    assert len(trained) > 1 or not compiled_paths()


def test_a_lossless_codec_gives_float32_s_model_in_fewer_bytes() -> None:
    federation = Federation(TINY, DATA, 1)
    whole, planes = federation.train(FLOAT32), federation.train(CodecSection(name="planes"))
    assert planes.sha256 == whole.sha256
    assert [scored.accuracy for scored in planes.curve] == [scored.accuracy for scored in whole.curve]
    assert planes.n_bytes < whole.n_bytes


@pytest.mark.parametrize(
    ("section", "update_bytes"),
    [
        (FLOAT32, HEADER_BYTES + 4 * N_VALUES),
        (
            CodecSection(name="sign"),
            HEADER_BYTES + Sign().payload_bytes(LAYOUT)[0],
        ),
    ],
    ids=["float32", "sign"],
)
def test_every_byte_of_every_update_counts(section: CodecSection, update_bytes: int) -> None:
    trained = Federation(TINY, DATA, 1).train(section)
    assert trained.n_updates == TINY.n_rounds * TINY.n_asked
    assert trained.n_bytes == trained.n_updates * update_bytes
    assert trained.bits == pytest.approx(8 * update_bytes / N_VALUES)
    each_round = TINY.n_asked * update_bytes / TINY.n_clients
    assert [(scored.number, scored.client_bytes) for scored in trained.curve] == [
        (number, number * each_round) for number in (2, 4, 5)
    ]
    assert trained.client_bytes == trained.n_bytes / TINY.n_clients


@pytest.mark.slow
def test_error_feedback_works_where_clients_come_back_every_round() -> None:
    silos = replace(TINY, n_asked=8, n_rounds=12)
    share = CodecSection(name="topk", share=0.002)
    plain, fed = (Federation(silos, DATA, 1).train(section) for section in (share, replace(share, error_feedback=True)))
    assert plain.n_bytes == pytest.approx(fed.n_bytes, rel=0.02)
    assert fed.accuracy(1) > plain.accuracy(1)


def test_the_accuracy_at_the_end_is_the_mean_of_the_last_scores() -> None:
    trained = Federation(replace(TINY, n_last=3), DATA, 1).train(FLOAT32)
    assert [scored.number for scored in trained.curve] == [2, 3, 4, 5]
    assert trained.accuracy(3) == pytest.approx(sum(scored.accuracy for scored in trained.curve[1:]) / 3)


@pytest.mark.parametrize(("mode", "is_trained_within"), [("structured", True), ("sketched", False)])
def test_clients_train_the_part_that_can_be_sent_where_the_codec_is_structured(
    monkeypatch: pytest.MonkeyPatch, mode: Literal["structured", "sketched"], is_trained_within: bool
) -> None:
    section = CodecSection(name="mask", every=4, mode=mode)
    as_it_is = Federation(TINY, DATA, 1).train(section)

    def freely(_uplink: Uplink) -> Projections:
        return {}

    monkeypatch.setattr(Uplink, "within", freely)
    trained_freely = Federation(TINY, DATA, 1).train(section)
    assert trained_freely.n_bytes == as_it_is.n_bytes
    assert (trained_freely.sha256 != as_it_is.sha256) == is_trained_within
