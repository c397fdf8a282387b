"""Data sets of `datasets` and `flwr-datasets` become data sets: by a stand-in here, by the libraries where they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from umbel.sim.data.data_set import DataError, DataSet
from umbel.sim.data.sets.hugging_face import from_flwr_datasets, from_hugging_face, from_partitioner

SIX: Mapping[str, Any] = {
    "pixels": np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2),
    "colours": np.arange(6 * 12, dtype=np.uint8).reshape(6, 2, 2, 3),
    "age": np.array([30.0, 40, 50, 60, 70, 80], dtype=np.float32),
    "pulse": np.array([60, 61, 62, 63, 64, 65]),
    "ill": np.array([0, 1, 0, 1, 0, 1]),
    "ward": np.array(["east", "west", "east", "west", "west", "west"]),
    "notes": np.array([np.zeros(1), np.zeros(2), *[np.zeros(3)] * 4], dtype=object),
}


@dataclass
class StandIn:
    """What `datasets.Dataset` promises, over arrays."""

    columns: Mapping[str, Any]
    is_formatted: bool = False

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def with_format(self, type: str, columns: list[str]) -> "StandIn":
        assert type == "numpy"
        return StandIn({name: self.columns[name] for name in columns}, is_formatted=True)

    def __getitem__(self, rows: slice) -> Mapping[str, Any]:
        assert self.is_formatted, "else values come as Python's own"
        return {name: values[rows] for name, values in self.columns.items()}


@dataclass
class StandInPartitioner:
    """What a partitioner of `flwr_datasets` promises: every second row."""

    num_partitions: int

    def load_partition(self, partition_id: int) -> StandIn:
        return StandIn({name: values[partition_id :: self.num_partitions] for name, values in SIX.items()})


@dataclass
class StandInFederated:
    partitioners: Mapping[str, StandInPartitioner]

    def load_split(self, split: str) -> StandIn:
        assert split == "test"
        return StandIn(SIX)


def shares(data: DataSet) -> dict[str, list[float]]:
    """The first number of every input that each holder trains on."""
    assert data.natural is not None
    first = data.samples.inputs.reshape(len(data.samples), -1)[:, 0]
    return {name: first[shard].tolist() for name, shard in zip(data.natural.names, data.natural.shards, strict=True)}


def test_images_come_channels_first_between_0_and_1() -> None:
    parts = {"train": StandIn(SIX), "test": StandIn(SIX)}
    grey = from_hugging_face(parts, "pixels", "ill")
    assert grey.input_shape == (1, 2, 2)
    assert torch.equal(grey.samples.inputs[:, 0] * 255, torch.from_numpy(SIX["pixels"]).float())
    colour = from_hugging_face(parts, "colours", "ill")
    assert colour.input_shape == (3, 2, 2)
    assert colour.samples.inputs[1, 2, 1, 0] == SIX["colours"][1, 1, 0, 2] / 255
    assert colour.samples.inputs.is_contiguous()


def test_several_columns_are_one_input_and_a_group_is_who_holds_it() -> None:
    data = from_hugging_face({"train": StandIn(SIX), "test": StandIn(SIX)}, ["age", "pulse"], "ill", group="ward")
    assert data.samples.inputs[2].tolist() == [50, 62]
    assert shares(data) == {"east": [30, 50], "west": [40, 60, 70, 80]}
    assert data.natural is not None
    assert data.natural.kind == "ward"


def test_one_table_is_cut_in_two() -> None:
    data = from_hugging_face(StandIn(SIX), ["age"], "ward", test_share=0.5)
    assert (len(data.rows), len(data.test), data.n_classes) == (3, 3, 2)


def test_partitions_are_natural_holders() -> None:
    data = from_partitioner(StandInPartitioner(3), ["age"], "ill", test=StandIn(SIX))
    assert shares(data) == {"0": [30, 60], "1": [40, 70], "2": [50, 80]}
    assert data.samples.targets.tolist() == [0, 1, 1, 0, 0, 1]
    federated = StandInFederated({"train": StandInPartitioner(3)})
    assert shares(from_flwr_datasets(federated, ["age"], "ill")) == shares(data)
    cut = from_flwr_datasets(federated, ["age"], "ill", test_split=None)
    assert len(cut.test) == 2


@pytest.mark.parametrize(
    ("given", "input", "target", "why"),
    [
        (StandIn(SIX), "image", "ill", "no column 'image'; the columns are 'pixels', 'colours', 'age'"),
        (StandIn(SIX), ["age"], "sick", "no column 'sick'"),
        (StandIn(SIX), "notes", "ill", "'notes' must hold numbers, all of one shape"),
        (StandIn(SIX), "ward", "ill", "'ward' must hold numbers, all of one shape"),
        (StandIn(SIX), ["age"], "age", "whole numbers from 0 on"),
        ({"validation": StandIn(SIX)}, "age", "ill", "no part 'train', only 'validation'"),
    ],
)
def test_columns_that_do_not_fit_are_refused(given: Any, input: Any, target: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        from_hugging_face(given, input, target)


def test_a_split_that_is_not_partitioned_is_refused() -> None:
    with pytest.raises(DataError, match="no partitions of 'validation', only of 'train'"):
        from_flwr_datasets(StandInFederated({"train": StandInPartitioner(2)}), "age", "ill", split="validation")


def test_the_library_s_own_data_sets_are_like_the_stand_in() -> None:
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    pictures = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    one = datasets.Dataset.from_dict({"image": [image] * 4, "label": ["dog", "cat", "dog", "cat"]}, features=pictures)
    data = from_hugging_face(datasets.DatasetDict({"train": one, "test": one}), "image", "label")
    assert torch.equal(data.samples.inputs[0] * 255, torch.from_numpy(image).permute(2, 0, 1).float())
    assert data.test.targets.tolist() == [1, 0, 1, 0]
    rows = datasets.Dataset.from_dict({name: SIX[name].tolist() for name in ("age", "pulse", "ill", "ward")})
    parts = datasets.DatasetDict({"train": rows, "test": rows})
    assert shares(from_hugging_face(parts, ["age", "pulse"], "ill", group="ward"))["east"] == [30, 50]
    ragged = datasets.Dataset.from_dict({"notes": [[1.0], [1.0, 2.0]], "ill": [0, 1]})
    with pytest.raises(DataError, match="must hold numbers, all of one shape"):
        from_hugging_face(ragged, "notes", "ill")


def test_flower_s_own_partitioners_are_like_the_stand_in(tmp_path: Path) -> None:
    flwr_datasets = pytest.importorskip("flwr_datasets", reason="the library flwr-datasets is not installed")
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    six = str(tmp_path / "six.parquet")
    datasets.Dataset.from_dict({name: SIX[name].tolist() for name in ("age", "ill", "ward")}).to_parquet(six)
    federated = flwr_datasets.FederatedDataset(
        dataset="parquet",
        data_files={"train": six, "test": six},
        partitioners={"train": flwr_datasets.partitioner.NaturalIdPartitioner(partition_by="ward")},
        shuffle=False,
        cache_dir=str(tmp_path / "cache"),
    )
    data = from_flwr_datasets(federated, ["age"], "ill")
    assert sorted(map(sorted, shares(data).values())) == [[30, 50], [40, 60, 70, 80]]
    assert len(data.test) == 6
