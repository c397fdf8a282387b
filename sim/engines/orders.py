"""The orders in which many clients go through their samples, drawn at once: those of `aggregation/sample_order.py`."""

import numpy as np

from umbel.aggregation.sample_order import Words, epoch_seeds, sample_keys
from umbel.sim.data.partition.partition import Indices

_AT_ONCE = 1 << 14  # samples: what is worked on stays in the second-level cache
_PLACE_BITS = 32  # in a key: whose pass it is, and which sample; above them all, the upper half of the sample's own key


def sample_orders(seeds: Words, epochs: Indices, sizes: Indices) -> Indices:
    """`sample_order(seeds[i], epochs[i], sizes[i])` for every i, one after another in one array."""
    starts, ends = epoch_seeds(seeds, epochs), np.cumsum(sizes)
    orders = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    first = done = 0
    while first < len(sizes):
        last = max(first + 1, int(np.searchsorted(ends, done + _AT_ONCE, side="right")))
        _sort(starts[first:last], sizes[first:last], orders[done : ends[last - 1]])
        first, done = last, int(ends[last - 1])
    return orders


def _sort(starts: Words, sizes: Indices, out: Indices) -> None:
    """One sort for all: by pass, then by the sample's key, then by its number."""
    index_bits = int(sizes.max()).bit_length()
    assert index_bits + len(sizes).bit_length() <= _PLACE_BITS, "either few passes, or few samples in each"
    firsts = (np.cumsum(sizes) - sizes).astype(np.uint64)
    index = np.arange(len(out), dtype=np.uint64)
    index -= np.repeat(firsts, sizes)
    keys = sample_keys(np.repeat(starts, sizes), index)
    keys >>= np.uint64(32)
    keys <<= np.uint64(index_bits)
    keys |= index
    keys |= np.repeat(np.arange(len(sizes), dtype=np.uint64) << np.uint64(32 + index_bits), sizes)
    keys.sort()
    keys &= np.uint64((1 << index_bits) - 1)
    out[:] = keys.view(np.int64)
