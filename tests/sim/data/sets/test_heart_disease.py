"""Records of four hospitals become the features and the split that were published."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.servers.real_data import real_files
from umbel.sim.data.data_set import DataError
from umbel.sim.data.sets.fetch import HEART_DISEASE
from umbel.sim.data.sets.heart_disease import complete_records, load_heart_disease, split_of

SIZES = {"cleveland": (199, 104), "hungarian": (172, 89), "switzerland": (30, 16), "va": (85, 45)}


def made_up(folder: Path) -> Path:
    """Files with as many complete records as the real ones, and one incomplete record before them."""
    rng = np.random.default_rng(7)
    for hospital, (n_train, n_test) in SIZES.items():
        lines = ["50,1,?,130,200,0,0,150,0,1,?,?,?,0"]
        for number in range(n_train + n_test):
            pain, ecg = 1 + number % 4, number % 3
            cholesterol = 0 if hospital == "switzerland" else rng.integers(100, 400)
            first = f"{rng.integers(30, 70)}.0,{number % 2},{pain},{rng.integers(90, 200)},{cholesterol},{number % 2}"
            lines.append(f"{first},{ecg},{rng.integers(90, 200)},{number % 2},{rng.random():.1f},?,?,?,{number % 5}")
        (folder / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")
    return folder


def test_features_classes_and_who_holds_them(tmp_path: Path) -> None:
    data = load_heart_disease(made_up(tmp_path))
    assert (data.input_shape, data.n_classes, len(data.rows), len(data.test)) == ((13,), 2, 486, 254)
    assert data.natural is not None
    assert (data.natural.kind, data.natural.names) == ("hospital", tuple(SIZES))
    assert [(len(shard), len(out)) for shard, out in zip(data.natural.shards, data.natural.holdouts, strict=True)] == [
        *SIZES.values()
    ]
    held = np.sort(np.concatenate([*data.natural.shards, *data.natural.holdouts]))
    assert np.array_equal(held, np.arange(740)), "every record is with one hospital, in one of its two parts"
    assert np.array_equal(np.sort(np.concatenate(data.natural.shards)), data.rows)
    assert torch.equal(data.test.inputs, data.samples.inputs[np.concatenate(data.natural.holdouts)])
    assert data.samples.targets[:303].tolist() == [int(number % 5 > 0) for number in range(303)]


def test_each_hospital_standardises_by_its_own_training_records(tmp_path: Path) -> None:
    data = load_heart_disease(made_up(tmp_path))
    assert data.natural is not None
    for name, shard in zip(data.natural.names, data.natural.shards, strict=True):
        inputs = data.samples.inputs[shard].double()
        assert inputs.mean(0).abs().max() < 1e-6
        deviations = inputs.std(0)  # over n - 1
        if name == "switzerland":
            assert deviations[3] == 0, "nobody measured cholesterol there"
            deviations[3] = 1
        assert (deviations - 1).abs().max() < 1e-6


def test_chest_pain_and_ecg_are_columns_of_0_and_1_without_the_first_kind(tmp_path: Path) -> None:
    data = load_heart_disease(made_up(tmp_path))
    kinds = data.samples.inputs[:303, 8:] > 0
    expected = [
        [number % 4 == kind for kind in (1, 2, 3)] + [number % 3 == kind for kind in (1, 2)] for number in range(303)
    ]
    assert kinds.tolist() == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1,2,3\n", "does not have 14 values"),
        ("a" + ",1" * 13, "is not the file"),
        (",".join(["1"] * 14) + "\n", "has 1 complete records, but UCI's file has 303"),
        ("", "has 0 complete records"),
        ("1," * (1 << 20), "is longer than"),
        ("\x00\xff", "is not the file"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = made_up(tmp_path) / "processed.cleveland.data"
    path.write_text(text)
    with pytest.raises(DataError, match=why) as refused:
        load_heart_disease(tmp_path)
    assert path.name in str(refused.value)


def test_the_published_files_give_the_published_records_and_split() -> None:
    folder = real_files(HEART_DISEASE) / HEART_DISEASE.folder
    data = load_heart_disease(folder)
    assert data.natural is not None
    positives = [
        int(data.samples.targets[np.concatenate(both)].sum())
        for both in zip(data.natural.shards, data.natural.holdouts, strict=True)
    ]
    assert positives == [139, 98, 45, 101]
    if not (published := folder / "flamby_split.json").exists():
        pytest.skip(f"the data sets of UMBEL_DATA lack {published}")
    for hospital, split in json.loads(published.read_text()).items():
        assert [part.tolist() for part in split_of(hospital)] == [split["train"], split["test"]]
        lines = (folder / f"processed.{hospital}.data").read_text().split()
        kept = [float(lines[row].split(",")[7]) for row in split["kept_rows"]]
        assert complete_records(folder / f"processed.{hospital}.data", hospital)[:, 7].tolist() == kept
