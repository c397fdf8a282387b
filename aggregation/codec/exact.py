"""Where a vector has values that no codec may round: see `TensorSpec.is_coded`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from umbel.aggregation.model.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


class ExactPlaces:
    """The places of a layout's exact tensors in its vector. `n_values`: how many values they have."""

    def __init__(self, layout: Layout) -> None:
        self._runs = [(one.offset, one.n_values) for one in layout.owners() if not one.is_coded and one.n_values]
        self.n_values = sum(length for _, length in self._runs)

    def within(self, first: int, n_values: int) -> Iterator[tuple[int, slice]]:
        """The runs of exact values among `n_values` of the vector from `first` on: the index of each run's first value
        among all exact values, and its place among the `n_values`.
        """
        n_before = 0
        for offset, length in self._runs:
            start, stop = max(offset, first), min(offset + length, first + n_values)
            if start < stop:
                yield n_before + start - offset, slice(start - first, stop - first)
            n_before += length

    def taken_out(self, values: Tensor, first: int) -> bytes:
        """The exact ones of `values`, which are float32 and begin with coordinate `first`, as little-endian float32;
        zeros stay in their places.
        """
        taken = bytearray()
        for _, here in self.within(first, values.numel()):
            taken += values[here].numpy().astype("<f4", copy=False).tobytes()
            values[here] = 0.0
        return bytes(taken)

    def put_back(self, values: Tensor, first: int, exact: Tensor) -> Tensor:
        """`values`, which begin with coordinate `first`, with the exact ones in their places: a copy of the type of
        `exact` (all that the layout has, in order), or `values` itself if there are none here.
        """
        places = tuple(self.within(first, values.numel()))
        if not places:
            return values
        whole = values.to(exact.dtype, copy=True)
        for at, here in places:
            whole[here] = exact[at : at + here.stop - here.start]
        return whole
