"""A site's data as batches, in an order drawn from a seed, the same on every machine (`sample_order.py`)."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from umbel.aggregation.sample_order import sample_order
from umbel.aggregation.seeds import derive_seed
from umbel.client.local.arrays import Array, ArrayData
from umbel.client.local.devices import generators, set_generators

Data: TypeAlias = Dataset[Any] | DataLoader[Any] | Iterable[Any]
Collate: TypeAlias = Callable[[list[Any]], Any]
Batch: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Which part of every batch a rank of a silo takes: number `index` of `count`, from 0; by default all of it.

    Raises `ValueError` for a part that does not exist.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"there is no part {self.index} of {self.count}: parts are numbered from 0")

    def of(self, chosen: Tensor) -> tuple[Tensor, float]:
        """This part of the samples of a batch, int64 (n,), and its share: its number of samples over that of a mean
        part. A part without samples gets one that does not count, with the share 0, so that all ranks make all steps.
        """
        mine = torch.tensor_split(chosen, self.count)[self.index]
        return (mine, len(mine) * self.count / len(chosen)) if len(mine) else (chosen[:1], 0.0)


WHOLE = BatchPart()


def n_samples(data: Data) -> int | None:
    """The number of samples; None for data without a length, or whose items are batches already."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    return len(dataset) if isinstance(dataset, Dataset) and isinstance(dataset, Sized) else None


def n_batches(data: Data, batch_size: int) -> int | None:
    """Batches in one pass; None for data without a length. A `DataLoader` has its own batch size."""
    if isinstance(data, Dataset) and (n := n_samples(data)) is not None:
        return len(split_sizes(n, batch_size))
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:  # a loader over an `IterableDataset`
        return None


def split_sizes(n: int, batch_size: int) -> list[int]:
    """Sizes of the batches of one pass. A last single sample joins the batch before: batch normalization needs two."""
    sizes = [min(batch_size, n - start) for start in range(0, n, batch_size)]
    if len(sizes) > 1 and batch_size > 1 and sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


def shuffled_batches(
    data: Data, batch_size: int, seed: int, number: int, n_skipped: int = 0, collate: Collate | None = None
) -> Iterator[Batch]:
    """Pass `number` (from 0) without its first `n_skipped` batches, in an order drawn from `seed`.

    The shuffling of a `DataLoader` is reseeded. Batches of other data come in the data's own order.
    """
    if is_map_style(data):
        whole = cast(Dataset[Any], data)
        return (_take(whole, chosen, collate) for chosen in _orders(whole, batch_size, seed, number, n_skipped))
    batches = _reseeded(_loader_of(data, batch_size, collate), derive_seed(seed, "pass", number))
    deque(islice(batches, n_skipped), maxlen=0)  # load the skipped ones now: a loader draws
    return batches


class EndlessBatches:
    """Pass after pass over a site's data, which can resume at a `place`.

    A place is the pass, the number of its items that were taken, and the states of the process-wide generators at the
    pass's start, because a `DataLoader` may draw from those. `n_in_step`: batches in one item, which is a list of them
    if there are several. `part`: of each batch that is taken; a `DataLoader` and data without random access are taken
    whole. `share`: the part's, of the last item (`BatchPart.of`).
    """

    def __init__(
        self,
        data: Data,
        batch_size: int,
        seed: int,
        device: torch.device,
        collate: Collate | None = None,
        n_in_step: int = 1,
        part: BatchPart = WHOLE,
    ) -> None:
        self._data, self._batch_size, self._seed, self._device = data, batch_size, seed, device
        self._collate, self._n_in_step, self._part, self.share = collate, n_in_step, part, 1.0
        self._generators: dict[str, Any] = {}
        self._number, self._n_taken = -1, 0
        self._pass: Iterator[Batch] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        while True:
            for item in self._pass:
                self._n_taken += 1
                yield item
            if self._number >= 0 and not self._n_taken:
                raise ValueError(
                    f"pass {self._number + 1} over the data gave no batch: give data that can be iterated again, such "
                    "as a list, a data set or a DataLoader"
                )
            self._generators = generators(self._device)
            self._number, self._n_taken = self._number + 1, 0
            self._pass = self._items()

    @property
    def place(self) -> dict[str, Any]:
        return {"pass": self._number, "n_taken": self._n_taken, "generators": self._generators}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Resume after the items that were taken at `place`. This moves the process-wide generators on."""
        self._number, self._n_taken, self._generators = place["pass"], place["n_taken"], place["generators"]
        set_generators(self._generators, self._device)
        self._pass = self._items()

    def _items(self) -> Iterator[Batch]:
        data, size, n_parts = self._data, self._batch_size, self._n_in_step
        if is_map_style(data):
            return self._drawn(cast(Dataset[Any], data))
        skipped = self._n_taken * n_parts
        batches = shuffled_batches(data, size, self._seed, self._number, skipped, self._collate)
        return batches if n_parts == 1 else _grouped(batches, n_parts)

    def _drawn(self, data: Dataset[Any]) -> Iterator[Batch]:
        for chosen in _orders(data, self._batch_size, self._seed, self._number, self._n_taken):
            mine, self.share = self._part.of(chosen)
            if self._n_in_step == 1:
                yield _take(data, mine, self._collate)
            else:
                parts = torch.tensor_split(mine, min(self._n_in_step, len(mine)))
                yield [_take(data, part, self._collate) for part in parts]


def ordered_batches(
    data: Data, batch_size: int, collate: Collate | None = None, part: BatchPart = WHOLE
) -> Iterator[tuple[Batch, float]]:
    """One pass in the data's own order: batches, and the share of each (`BatchPart.of`)."""
    if not is_map_style(data):
        yield from ((batch, 1.0) for batch in _loader_of(data, batch_size, collate))
        return
    whole = cast(Dataset[Any], data)
    for chosen in torch.split(torch.arange(n_samples(whole) or 0), batch_size):
        mine, share = part.of(chosen)
        yield _take(whole, mine, collate), share


def samples_in(batch: Batch) -> int:
    """The samples in a batch: the length of the first tensor or array that is found in it; 1 without one."""
    found = _first_tensor(batch)
    return 1 if found is None or not found.ndim else int(found.shape[0])


def to_device(part: Any, device: torch.device) -> Any:
    """Move every tensor in a batch; tuples, lists and mappings keep their shape."""
    match part:
        case Tensor():
            return part.to(device, non_blocking=True)
        case Mapping():
            return {key: to_device(value, device) for key, value in part.items()}
        case tuple() | list():
            return [to_device(value, device) for value in cast(list[Any], part)]
        case _:
            return part


def _first_tensor(part: Any) -> Tensor | Array | None:
    match part:
        case Tensor() | np.ndarray():
            return part
        case Mapping():
            return next((found for one in part.values() if (found := _first_tensor(one)) is not None), None)
        case tuple() | list():
            return next((found for one in cast(list[Any], part) if (found := _first_tensor(one)) is not None), None)
        case _:
            return None


def is_map_style(data: Data) -> bool:
    """Whether its samples can be indexed, so that their order can be drawn."""
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset)


def _loader_of(data: Data, batch_size: int, collate: Collate | None) -> Iterable[Any]:
    """What gives batches: a loader over samples that come one by one, else the data themselves."""
    if isinstance(data, IterableDataset):
        return DataLoader(cast(Dataset[Any], data), batch_size, collate_fn=collate)
    return cast(Iterable[Any], data)


def _orders(data: Dataset[Any], batch_size: int, seed: int, number: int, n_skipped: int) -> Iterator[Tensor]:
    """The samples of each batch of a pass."""
    order = torch.from_numpy(sample_order(seed, number, n_samples(data) or 0))
    yield from torch.split(order, split_sizes(len(order), batch_size))[n_skipped:]


def _grouped(batches: Iterator[Batch], n: int) -> Iterator[list[Batch]]:
    while group := list(islice(batches, n)):
        yield group


def _take(data: Dataset[Any], chosen: Tensor, collate: Collate | None) -> Batch:
    if collate is None and isinstance(data, TensorDataset) and _gives_as(data, TensorDataset):
        return tuple(tensor[chosen] for tensor in data.tensors)  # one gather instead of a Python loop over samples
    if collate is None and isinstance(data, ArrayData) and _gives_as(data, ArrayData):
        return data[chosen.numpy()]
    usual = _stacked if isinstance(data, ArrayData) else default_collate
    return (collate or usual)([data[int(i)] for i in chosen])


def _stacked(samples: list[tuple[Any, ...]]) -> tuple[Array, ...]:
    return tuple(np.stack(values) for values in zip(*samples, strict=True))


def _gives_as(data: Dataset[Any], kind: type[Any]) -> bool:
    """Whether it gives its samples as this kind does: a site's own kind may augment them."""
    return type(data).__getitem__ is kind.__getitem__


def _reseeded(batches: Iterable[Any], seed: int) -> Iterator[Batch]:
    """One pass. A loader without its own generator takes its seed from torch's global one."""
    if isinstance(batches, DataLoader):
        for generator in {id(g): g for g in _generators(batches)}.values():
            generator.manual_seed(seed)
    yield from batches


def _generators(loader: DataLoader[Any]) -> Iterator[torch.Generator]:
    for owner in (loader, loader.sampler):
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            yield generator
