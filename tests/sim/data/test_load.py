"""Whatever a [data] section names is loaded, from where it says, as much of it as it says."""

import gzip
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.sim.data.sets.test_fetch import served
from tests.sim.data.sets.test_heart_disease import made_up
from tests.sim.data.sets.test_idx_files import idx_bytes
from tests.sim.data.sets.test_mnist import IMAGES, LABELS
from tests.sim.data.sets.test_shakespeare import HEADER, written
from umbel.sim.data.data_set import DataError, DataSet
from umbel.sim.data.load import DataSection, load
from umbel.sim.data.sets.fetch import SOURCES, RemoteFile
from umbel.sim.data.sets.synthetic import SyntheticPopulation

OWN = """
import numpy as np
from umbel.sim.data.sets.arrays import dataset
from umbel.sim.data.data_set import TrainAndTest

def wards():
    return dataset(np.eye(10), [0, 1] * 5, groups=["east"] * 5 + ["west"] * 5)

def parts():
    data = wards()
    return TrainAndTest(data.whole().train, data.test)

def pairs():
    return np.eye(10), [0, 1] * 5

def drawn():
    return dataset(np.random.rand(10, 3), [0, 1] * 5)
"""


def loaded(section: DataSection, folder: Path | None = None, seed: int = 1) -> DataSet:
    data = load(section, folder, seed)
    assert isinstance(data, DataSet)
    return data


@pytest.mark.parametrize(("name", "n"), [("digits", 1797), ("breast-cancer", 569)])
def test_what_scikit_learn_carries_needs_no_folder(name: str, n: int) -> None:
    data = loaded(DataSection(name))
    assert (data.name, len(data.test)) == (name, -(-n // 5))
    half = loaded(DataSection(name, test_share=0.5, train_limit=40, test_limit=20))
    assert (len(half.rows), len(half.test)) == (40, 20)
    assert np.array_equal(half.rows, loaded(DataSection(name, test_share=0.5, train_limit=40)).rows)
    assert not np.array_equal(half.rows, loaded(DataSection(name, test_share=0.5, train_limit=40), seed=2).rows)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_images_are_fetched_into_the_folder_and_read_from_there(tmp_path: Path, name: str) -> None:
    files = {}
    for file in SOURCES[name].files:
        files[file.name] = gzip.compress(idx_bytes(IMAGES if "images" in file.name else LABELS))
    known = [RemoteFile(file, len(data), hashlib.sha256(data).hexdigest()) for file, data in files.items()]
    with served({f"/{file}": data for file, data in files.items()}) as (address, asked):
        source = replace(SOURCES[name], address=f"{address}/", files=tuple(known))
        data = load(DataSection(name), tmp_path, 1, {name: source})
    assert isinstance(data, DataSet)
    assert len(asked) == 4
    assert (data.name, data.input_shape, data.n_classes) == (name, (1, 28, 28), 10)
    assert torch.equal(data.samples.inputs[:, 0] * 255, torch.from_numpy(IMAGES).float())
    assert loaded(DataSection(name), tmp_path).labels.tolist() == [7, 0, 9]


def test_hospitals_and_roles_are_read_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "heart_disease").mkdir()
    (tmp_path / "shakespeare").mkdir()
    made_up(tmp_path / "heart_disease")
    lines = [f"{number}\tHamlet\t1.1.{number}\tHAMLET\tthe same thirty characters, again\n" for number in range(9)]
    written(tmp_path / "shakespeare", HEADER + "".join(lines))
    assert loaded(DataSection("heart-disease"), tmp_path).name == "heart-disease"
    plays = loaded(DataSection("shakespeare", train_limit=10), tmp_path)
    assert len(plays.rows) == 10
    assert plays.natural is not None
    assert plays.natural.names == ("Hamlet: HAMLET",)


@pytest.mark.parametrize("name", list(SOURCES))
def test_without_a_folder_files_are_asked_for(name: str) -> None:
    with pytest.raises(DataError, match="--data DIR"):
        load(DataSection(name), None, 1)


def test_synthetic_data_are_a_population_of_as_many_as_it_says() -> None:
    population = load(DataSection("synthetic", clients=1_000_000, samples=20), None, 1)
    assert isinstance(population, SyntheticPopulation)
    assert population.n_clients == 1_000_000
    assert population.sizes(np.array([999_999])).tolist() == [20]


def test_one_s_own_code_is_found_where_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_wards.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = loaded(DataSection("own_wards:wards", train_limit=5))
    assert (data.name, len(data.rows)) == ("own_wards:wards", 5)
    assert loaded(DataSection("own_wards:parts")).n_classes == 2
    drawn = [loaded(DataSection("own_wards:drawn")).samples.inputs for _ in range(2)]
    assert torch.equal(*drawn), "what is drawn at random is drawn alike every time"
    for name, why in {
        "pairs": r"returned a tuple; .* such as umbel\.sim\.data\.sets\.arrays\.dataset\(",
        "gone": "name a DataSet",
        "np": "name a DataSet",
    }.items():
        with pytest.raises(DataError, match=why):
            load(DataSection(f"own_wards:{name}"), None, 1)
