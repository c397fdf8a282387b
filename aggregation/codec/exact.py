"""Where a vector has values that no codec may round: see `TensorSpec.is_coded`."""

from collections.abc import Iterator

from umbel.aggregation.layout import Layout


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
