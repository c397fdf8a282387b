"""A site's data as batches: in an order drawn from a seed, the same on every machine with the same torch."""

from collections import deque
from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from umbel.client.randomness import generators, set_generators

Batch = tuple[Any, Any]


def n_samples(data: "Dataset[Any] | DataLoader[Any]") -> int:
    """How many samples there are. Raises `TypeError` for a data set without a length."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if not isinstance(dataset, Sized):
        raise TypeError("the data set needs a length (__len__): a site states how many samples it holds")
    return len(dataset)


def n_batches(data: "Dataset[Any] | DataLoader[Any]", batch_size: int) -> int:
    """Batches in one pass. A `DataLoader` has its own batch size."""
    return len(data) if isinstance(data, DataLoader) else len(split_sizes(n_samples(data), batch_size))


def split_sizes(n: int, batch_size: int) -> list[int]:
    """Sizes of the batches of one pass: a last batch of one sample joins the one before it.

    Batch normalization cannot train on a single sample, and dropping it would ignore some samples for ever.
    """
    sizes = [min(batch_size, n - start) for start in range(0, n, batch_size)]
    if len(sizes) > 1 and batch_size > 1 and sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


def shuffled_batches(data: "Dataset[Any] | DataLoader[Any]", batch_size: int, rng: torch.Generator) -> Iterator[Batch]:
    """One pass in a random order drawn from `rng`: pairs of inputs and targets.

    A `DataLoader` is used as it is, its shuffling reseeded from `rng`.
    """
    if isinstance(data, DataLoader):
        yield from _reseeded(data, rng)
    else:
        yield from _drawn(data, batch_size, rng)


class EndlessBatches:
    """Pass after pass over a site's data, which knows where it is and can go on from there.

    `place` says so: how many batches of this pass were taken, and the states of the generators at its start, from which
    the same order is drawn again; the process-wide ones too, for a `DataLoader` may draw from those.
    """

    def __init__(
        self, data: "Dataset[Any] | DataLoader[Any]", batch_size: int, seed: int, device: torch.device
    ) -> None:
        self._data, self._batch_size, self._device = data, batch_size, device
        self._rng = torch.Generator().manual_seed(seed)
        self._start: dict[str, Any] = {}
        self._n_taken = 0
        self._pass: Iterator[Batch] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        while True:
            for batch in self._pass:
                self._n_taken += 1
                yield batch
            self._start = {"order": self._rng.get_state(), "global": generators(self._device)}
            self._n_taken = 0
            self._pass = shuffled_batches(self._data, self._batch_size, self._rng)

    @property
    def place(self) -> dict[str, Any]:
        return {"n_taken": self._n_taken, **self._start}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Go on after the batches taken there.

        A loader must load them again; the process-wide generators are left where that takes them from the pass's start.
        """
        self._start = {"order": place["order"], "global": place["global"]}
        self._n_taken = place["n_taken"]
        self._rng.set_state(place["order"])
        set_generators(place["global"], self._device)
        if isinstance(self._data, DataLoader):
            self._pass = _reseeded(self._data, self._rng)
            deque(islice(self._pass, self._n_taken), maxlen=0)
        else:
            self._pass = _drawn(self._data, self._batch_size, self._rng, self._n_taken)


def ordered_batches(data: "Dataset[Any] | DataLoader[Any]", batch_size: int) -> Iterator[Batch]:
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


def _drawn(data: Dataset[Any], batch_size: int, rng: torch.Generator, n_skipped: int = 0) -> Iterator[Batch]:
    """One pass in an order drawn from `rng`, without its first batches."""
    order = torch.randperm(n_samples(data), generator=rng)
    for chosen in torch.split(order, split_sizes(len(order), batch_size))[n_skipped:]:
        yield _take(data, chosen)


def _take(data: Dataset[Any], chosen: Tensor) -> Batch:
    if isinstance(data, TensorDataset):  # one gather instead of a Python loop over samples
        return cast(Batch, tuple(tensor[chosen] for tensor in data.tensors))
    return cast(Batch, default_collate([data[int(i)] for i in chosen]))


def _reseeded(loader: DataLoader[Any], rng: torch.Generator) -> Iterator[Batch]:
    """One pass over a loader. One without a generator of its own takes its seed from torch's global one."""
    seed = int(torch.randint(1 << 62, (), generator=rng))
    for generator in {id(g): g for g in _generators(loader)}.values():
        generator.manual_seed(seed)
    yield from loader


def _generators(loader: DataLoader[Any]) -> Iterator[torch.Generator]:
    for owner in (loader, loader.sampler):
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            yield generator
