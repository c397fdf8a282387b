"""A site's data as batches, in an order drawn from a seed, the same on every machine (`sample_order.py`)."""

from collections import deque
from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from umbel.aggregation.sample_order import sample_order
from umbel.aggregation.seeds import derive_seed
from umbel.client.local.devices import generators, set_generators

Data = Dataset[Any] | DataLoader[Any]
Batch = tuple[Any, Any]


def n_samples(data: Data) -> int:
    """The number of samples. Raises `TypeError` for a data set without a length."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if not isinstance(dataset, Sized):
        raise TypeError("the data set needs a length (__len__), because a client must state how many samples it holds")
    return len(dataset)


def n_batches(data: Data, batch_size: int) -> int:
    """Batches in one pass. A `DataLoader` has its own batch size."""
    return len(data) if isinstance(data, DataLoader) else len(split_sizes(n_samples(data), batch_size))


def split_sizes(n: int, batch_size: int) -> list[int]:
    """Sizes of the batches of one pass. A last single sample joins the batch before: batch normalization needs two."""
    sizes = [min(batch_size, n - start) for start in range(0, n, batch_size)]
    if len(sizes) > 1 and batch_size > 1 and sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


def shuffled_batches(data: Data, batch_size: int, seed: int, number: int, n_skipped: int = 0) -> Iterator[Batch]:
    """Pass `number` (from 0), without its first batches: pairs of inputs and targets, in an order drawn from `seed`.

    The shuffling of a `DataLoader` is reseeded.
    """
    if not isinstance(data, DataLoader):
        return _drawn(data, batch_size, seed, number, n_skipped)
    batches = _reseeded(data, derive_seed(seed, "pass", number))
    deque(islice(batches, n_skipped), maxlen=0)  # a loader must load the skipped batches
    return batches


class EndlessBatches:
    """Pass after pass over a site's data, which can resume at a `place`.

    A place is the pass, the number of its batches that were taken, and the states of the process-wide generators at the
    pass's start, because a `DataLoader` may draw from those.
    """

    def __init__(self, data: Data, batch_size: int, seed: int, device: torch.device) -> None:
        self._data, self._batch_size, self._seed, self._device = data, batch_size, seed, device
        self._generators: dict[str, Any] = {}
        self._number, self._n_taken = -1, 0
        self._pass: Iterator[Batch] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        while True:
            for batch in self._pass:
                self._n_taken += 1
                yield batch
            self._generators = generators(self._device)
            self._number, self._n_taken = self._number + 1, 0
            self._pass = self._batches()

    @property
    def place(self) -> dict[str, Any]:
        return {"pass": self._number, "n_taken": self._n_taken, "generators": self._generators}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Resume after the batches that were taken at `place`. This moves the process-wide generators on."""
        self._number, self._n_taken, self._generators = place["pass"], place["n_taken"], place["generators"]
        set_generators(self._generators, self._device)
        self._pass = self._batches()

    def _batches(self) -> Iterator[Batch]:
        return shuffled_batches(self._data, self._batch_size, self._seed, self._number, self._n_taken)


def ordered_batches(data: Data, batch_size: int) -> Iterator[Batch]:
    """One pass in the data's own order."""
    if isinstance(data, DataLoader):
        yield from data
        return
    for chosen in torch.split(torch.arange(n_samples(data)), batch_size):
        yield _take(data, chosen)


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


def _drawn(data: Dataset[Any], batch_size: int, seed: int, number: int, n_skipped: int) -> Iterator[Batch]:
    order = torch.from_numpy(sample_order(seed, number, n_samples(data)))
    for chosen in torch.split(order, split_sizes(len(order), batch_size))[n_skipped:]:
        yield _take(data, chosen)


def _take(data: Dataset[Any], chosen: Tensor) -> Batch:
    if isinstance(data, TensorDataset):  # one gather instead of a Python loop over samples
        return cast(Batch, tuple(tensor[chosen] for tensor in data.tensors))
    return cast(Batch, default_collate([data[int(i)] for i in chosen]))


def _reseeded(loader: DataLoader[Any], seed: int) -> Iterator[Batch]:
    """One pass over a loader. Without its own generator it takes its seed from torch's global one."""
    for generator in {id(g): g for g in _generators(loader)}.values():
        generator.manual_seed(seed)
    yield from loader


def _generators(loader: DataLoader[Any]) -> Iterator[torch.Generator]:
    for owner in (loader, loader.sampler):
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            yield generator
