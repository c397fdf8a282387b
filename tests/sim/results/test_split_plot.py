"""The picture shows what is there, for few clients and many, with classes and without."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from umbel.sim.data.partition.heterogeneity import heterogeneity
from umbel.sim.data.partition.partition import Partition, class_counts, shards_of
from umbel.sim.results.split_plot import BARS_MAX, COLUMNS_MAX, draw_split, split_figure


def _partition(n_clients: int, n_samples: int, names: tuple[str, ...] | None = None) -> Partition:
    owners = np.concatenate([np.arange(n_clients), np.random.default_rng(0).integers(0, n_clients, n_samples)])
    return Partition(shards_of(owners, n_clients), names=names)


def _labels(n_classes: int, n_samples: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, n_classes, n_samples)


def test_bars_are_as_high_as_there_are_samples_and_are_called_by_their_classes() -> None:
    partition, labels = _partition(4, 400), _labels(3, 404)
    left = _left(split_figure(partition, labels, ["a", "b", "c"]))
    heights = np.array([bar.get_height() for bar in left.patches if isinstance(bar, Rectangle)])
    assert heights.reshape(3, 4).T.tolist() == class_counts(labels, partition.shards).tolist()
    legend = left.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["c", "b", "a"], "in the order of the stack"


def test_clients_of_very_unequal_size_are_drawn_by_shares_with_their_sizes_above() -> None:
    partition = Partition((np.arange(2), np.arange(2, 500)), names=("small", "large"))
    left = _left(split_figure(partition, np.arange(500) % 2))
    heights = [bar.get_height() for bar in left.patches if isinstance(bar, Rectangle)]
    assert heights == [0.5] * 4
    assert [text.get_text() for text in left.texts] == ["2", "498"]
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["small", "large"]


@pytest.mark.parametrize(("n_clients", "n_classes"), [(12, 62), (BARS_MAX + 1, 3), (3333, 10)])
def test_many_classes_or_clients_are_a_map_of_shares(n_clients: int, n_classes: int) -> None:
    partition, labels = _partition(n_clients, 9000), _labels(n_classes, 9000 + n_clients)
    [image] = _left(split_figure(partition, labels)).images
    shares = np.asarray(image.get_array())
    assert shares.shape == (n_classes, min(n_clients, COLUMNS_MAX))
    assert shares.sum(0) == pytest.approx(np.ones(shares.shape[1]))
    counts = class_counts(labels, partition.shards)
    of_clients = (counts / counts.sum(1, keepdims=True)).mean(0)
    assert shares.mean(1) == pytest.approx(of_clients, abs=0.002), "every client is in it"


def test_a_few_clients_keep_their_order_in_a_map_and_many_are_sorted_by_their_commonest_class() -> None:
    labels = np.repeat([1, 0], 60)
    few = Partition(tuple(np.array_split(np.arange(120), 12)))
    many = Partition(tuple(np.array_split(np.arange(120), 60)))
    wide = np.concatenate([labels, np.arange(2, 13)])  # 13 classes, of which nobody holds 11
    [image] = _left(split_figure(few, wide)).images
    assert np.asarray(image.get_array())[1].tolist() == [1.0] * 6 + [0.0] * 6
    [image] = _left(split_figure(many, wide)).images
    assert np.asarray(image.get_array())[1].tolist() == [0.0] * 30 + [1.0] * 30


@pytest.mark.parametrize("n_clients", [5, 300])
def test_without_classes_sizes_are_drawn(n_clients: int) -> None:
    partition = _partition(n_clients, 2000)
    figure = split_figure(partition, np.zeros((2000 + n_clients, 80)))
    assert not _left(figure).images
    _, histogram, words = figure.axes
    assert sum(bar.get_height() for bar in histogram.patches if isinstance(bar, Rectangle)) == n_clients
    [text] = words.texts
    assert text.get_text() == "\n".join(heterogeneity(partition, None).lines())


@pytest.mark.parametrize("sizes", [[600] * 100, [1, 1, 2, 3, 50_000], [3, 4], [1], *([1, n] for n in range(21, 60, 3))])
def test_the_histogram_counts_every_client_once(sizes: list[int]) -> None:
    partition = Partition(shards_of(np.repeat(np.arange(len(sizes)), sizes), len(sizes)))
    histogram = split_figure(partition, None).axes[1]
    assert sum(bar.get_height() for bar in histogram.patches if isinstance(bar, Rectangle)) == len(sizes)


@pytest.mark.parametrize(
    ("n_clients", "n_classes"), [(1, 1), (4, 2), (40, 10), (1000, 100)], ids=lambda number: str(number)
)
def test_a_picture_is_written(tmp_path: Path, n_clients: int, n_classes: int) -> None:
    names = tuple(f"the hospital of town number {i}" for i in range(n_clients))
    partition, labels = _partition(n_clients, 5000, names), _labels(n_classes, 5000 + n_clients)
    draw_split(tmp_path / "split.png", partition, labels)
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_says_whose_it_is() -> None:
    figure = split_figure(_partition(4, 400), None, title="two shards each, seed 0")
    assert figure.get_suptitle() == "two shards each, seed 0"


def test_a_picture_that_could_not_be_written_whole_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(_: Figure, path: Path, **__: str) -> None:
        path.write_bytes(b"\x89PNG")
        raise OSError

    monkeypatch.setattr(Figure, "savefig", broken_off)
    with pytest.raises(OSError):  # noqa: PT011 - as raised above
        draw_split(tmp_path / "split.png", _partition(4, 400), None)
    assert not (tmp_path / "split.png").exists()


def _left(figure: Figure) -> Axes:
    return figure.axes[0]
