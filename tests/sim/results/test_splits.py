"""Every split of an experiment is drawn once, and its numbers are there, by the first seed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from tests.sim.federation.worlds import table
from umbel.sim import simulate
from umbel.sim.data.partition.heterogeneity import heterogeneity
from umbel.sim.data.partition.partition import Partition
from umbel.sim.experiment.file import experiment_of
from umbel.sim.experiment.world import make_world
from umbel.sim.results import split_plot
from umbel.sim.results.results import SUMMARY_FILE
from umbel.sim.simulation import EXPERIMENT_FILE

SHORT = {"count": 1}
SPLITS = [
    {"label": "IID", "partition.scheme": "iid"},
    {"label": "two shards each", "partition.scheme": "shards", "partition.shards_each": 2},
]
NOISY = {"label": "noisy", "partition.features": {"kind": "noise", "variance": 0.1}}
PICTURES = ["split-IID.png", "split-two_shards_each.png"]


def swept(**changes: Any) -> dict[str, Any]:
    """An experiment of two splits."""
    described = table(rounds=SHORT, sweep={"split": SPLITS}, **changes)
    return {**described, "partition": {"scheme": "iid", "clients": 30}}


def pictures(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("split*"))


def told(out: Path) -> list[Mapping[str, Any]]:
    """The points of `summary.json`."""
    points: list[Mapping[str, Any]] = json.loads((out / SUMMARY_FILE).read_text())["points"]
    return points


@pytest.fixture
def titles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the pictures, in the order in which they are drawn."""
    drawn, figure = list[str](), split_plot.split_figure

    def remembered(partition: Partition, labels: Any, class_names: Any, title: str) -> Figure:
        drawn.append(title)
        return figure(partition, labels, class_names, title)

    monkeypatch.setattr(split_plot, "split_figure", remembered)
    return drawn


def test_each_split_of_a_sweep_has_its_picture_and_its_numbers(tmp_path: Path, titles: list[str]) -> None:
    results = simulate(swept(seeds=[3, 4]), tmp_path)
    assert pictures(tmp_path) == PICTURES
    assert titles == [
        "small: IID; seed 3, the first of 2 seeds",
        "small: two shards each; seed 3, the first of 2 seeds",
    ]
    alike, apart = (imread(tmp_path / name) for name in PICTURES)
    assert alike.shape != apart.shape or (alike != apart).any()
    iid, shards = (point["split"] for point in told(tmp_path))
    assert iid["n_clients"] == shards["n_clients"] == 30
    assert iid["labels"]["effective_classes_mean"] > 7
    assert shards["labels"]["effective_classes_mean"] < 4
    assert [point.split.facts() for point in results.points if point.split is not None] == [iid, shards]


def test_the_numbers_are_of_the_first_seeds_split() -> None:
    described = table(rounds=SHORT, seeds=[3, 4])
    made = make_world(experiment_of(described).trials[0], Path(), None)
    made.world.close()
    assert made.partition is not None
    assert made.data is not None
    expected = heterogeneity(made.partition, made.data.samples.targets.numpy())
    assert simulate(described).points[0].split == expected


@pytest.mark.usefixtures("blank_pictures")
@pytest.mark.parametrize(
    ("sweep", "title"),
    [
        ({}, "small: seed 0"),
        ({"training.local_epochs": [1, 2]}, "small: every point; seed 0"),
        ({"skew": [{"label": "none"}, NOISY]}, "small: every point; seed 0"),
    ],
    ids=["nothing", "training", "features"],
)
def test_points_of_one_split_share_its_picture_and_its_numbers(
    tmp_path: Path, titles: list[str], sweep: dict[str, Any], title: str
) -> None:
    simulate(table(rounds=SHORT, sweep=sweep), tmp_path)
    assert pictures(tmp_path) == ["split.png"]
    assert titles == [title]
    first, *rest = (point["split"] for point in told(tmp_path))
    assert first["sizes"]["least"] >= 1
    assert all(one == first for one in rest)


@pytest.mark.usefixtures("blank_pictures")
def test_a_split_of_some_points_is_called_by_the_first_of_them(tmp_path: Path, titles: list[str]) -> None:
    described = swept()
    described["sweep"] = {"training.local_epochs": [1, 2], **described["sweep"]}
    simulate(described, tmp_path)
    assert pictures(tmp_path) == ["split-local_epochs=1__IID.png", "split-local_epochs=1__two_shards_each.png"]
    assert titles[0] == "small: local_epochs=1, IID (and 1 more of the same split); seed 0"
    one, other, *again = (point["split"] for point in told(tmp_path))
    assert one != other
    assert again == [one, other]


@pytest.mark.usefixtures("blank_pictures")
def test_what_is_done_keeps_its_pictures_and_tells_its_numbers_again(tmp_path: Path) -> None:
    first = simulate(swept(), tmp_path)
    before = told(tmp_path)
    (tmp_path / PICTURES[0]).write_bytes(b"as it was")
    (tmp_path / PICTURES[1]).unlink()
    again = simulate(swept(), tmp_path)
    assert (tmp_path / PICTURES[0]).read_bytes() == b"as it was"
    assert pictures(tmp_path) == PICTURES, "what is missing is drawn"
    assert [one["split"] for one in told(tmp_path)] == [one["split"] for one in before]
    assert again.splits == first.splits
    assert set(first.splits) == {"IID", "two shards each"}


@pytest.mark.usefixtures("blank_pictures")
def test_an_experiment_that_was_mended_leaves_no_picture_of_what_it_was(tmp_path: Path) -> None:
    (tmp_path / EXPERIMENT_FILE).write_text("{}")
    for name in ("split.png", "split-alpha=0.1.png"):
        (tmp_path / name).write_bytes(b"of the file before it was mended")
    simulate(swept(), tmp_path)
    assert pictures(tmp_path) == PICTURES


@pytest.mark.usefixtures("blank_pictures")
def test_synthetic_clients_have_no_split(tmp_path: Path) -> None:
    described = table(data={"name": "synthetic", "clients": 20}, partition=None, rounds=SHORT)
    results = simulate({**described, "model": {"name": "logistic"}}, tmp_path)
    assert pictures(tmp_path) == []
    assert results.points[0].split is None
    assert "split" not in told(tmp_path)[0]
