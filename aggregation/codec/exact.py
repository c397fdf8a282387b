"""The values of a vector that no codec may round: those of exact tensors (`TensorSpec.is_coded`)."""

from collections.abc import Iterator

from torch import Tensor

from umbel.aggregation.model.layout import Layout


class ExactPlaces:
    """The places of a layout's exact tensors in its vector."""

    def __init__(self, layout: Layout) -> None:
        self._runs = [(one.offset, one.n_values) for one in layout.owners() if not one.is_coded and one.n_values]
        self.n_values = sum(length for _, length in self._runs)  # of all exact tensors

    def within(self, first: int, n_values: int) -> Iterator[tuple[int, slice]]:
        """The runs of exact values among the coordinates `first` to `first + n_values`.

        Each is the index of its first value among all exact values, and its place among the `n_values`.
        """
        n_before = 0
        for offset, length in self._runs:
            start, stop = max(offset, first), min(offset + length, first + n_values)
            if start < stop:
                yield n_before + start - offset, slice(start - first, stop - first)
            n_before += length

    def taken_out(self, values: Tensor, first: int) -> bytes:
        """Replace the exact ones of `values` with zeros; return them as little-endian float32.

        `values`: float32, the coordinates from `first` on.
        """
        taken = bytearray()
        for _, here in self.within(first, values.numel()):
            taken += values[here].numpy().astype("<f4", copy=False).tobytes()
            values[here] = 0.0
        return bytes(taken)

    def put_back(self, values: Tensor, first: int, exact: Tensor) -> Tensor:
        """`values`, the coordinates from `first` on, with the exact ones in their places.

        `exact`: all exact values of the layout, in order. Returns a copy of that type, or `values` itself if none of
        them is here.
        """
        places = tuple(self.within(first, values.numel()))
        if not places:
            return values
        whole = values.to(exact.dtype, copy=True)
        for at, here in places:
            whole[here] = exact[at : at + here.stop - here.start]
        return whole
