"""The words of metrics in a masked sum: a place for each name that the run file lists, or a table for any names.

**The table** is an invertible Bloom lookup table (Goodrich and Mitzenmacher 2011, "Invertible Bloom Lookup Tables").
It has five parts of 48 cells. A hash of a metric's name chooses one cell in each part, and a client adds the metric to
these five cells. A cell is twelve words:

- clients (1), the name in eight words, a check of the name, samples, and the sum of samples times value times 2^f.

All of these are sums modulo 2^64, so masks go on and come off as for other words. If a cell holds one name only, from n
clients, its name words and its check are n times those of the name. So the name can be read, and its numbers are taken
out of its four other cells, which may then hold one name only, and so on.

No sum of one name wraps: a word of a name, and a check, have 48 bits, and a cohort has at most 2^16 clients. Sums of
several names in a cell may wrap. That does no harm, because taking a name out is also modulo 2^64.

A round's key is part of the hash. So names that do not come apart in one round almost certainly do in the next one.
docs/decisions/0021-metrics-that-nobody-lists.md has the reasons and the measured probabilities.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields

from umbel.aggregation.types import ALL, MetricNames, require_metric_name

TABLE_NAMES_MAX = 32  # of one client
NAME_BYTES_MAX = 48  # of a name in a table
_PARTS, _PART_CELLS = 5, 48
_N_CELLS = _PARTS * _PART_CELLS
_NUMBER_BYTES = 6  # of a word of a name, and of a check: times 2^16 clients it is below 2^64
_NAME_WORDS = NAME_BYTES_MAX // _NUMBER_BYTES
_PLACE_BYTES = 4
_MODULUS = 1 << 64
_LABEL = b"umbel-secagg/1 metric"


@dataclass(frozen=True, slots=True, repr=False)
class MetricSum:
    """A metric of one client or a sum; without a repr, because one client's must not be in a log."""

    clients: int = 0  # that measured it
    samples: int = 0  # or the weight of its own
    value: int = 0  # the sum of samples * value * 2^f


@dataclass(frozen=True, slots=True, repr=False)
class MetricSums:
    """The metrics of one client or a sum, by name."""

    by_name: Mapping[str, MetricSum] = field(default_factory=dict[str, MetricSum])
    is_whole: bool = True  # whether these are all metrics in the words; a table may hold more than come out of it


_N_MEASURED = len(fields(MetricSum))
_CELL_WORDS = 1 + _NAME_WORDS + 1 + _N_MEASURED - 1


@dataclass(frozen=True, slots=True)
class ListedMetrics:
    """The words of these names, in this order."""

    names: tuple[str, ...]

    @property
    def n_words(self) -> int:
        return _N_MEASURED * len(self.names)

    @property
    def n_most(self) -> int:
        """The most metrics of one client."""
        return len(self.names)

    def sent_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of a client's metrics that travel."""
        found = frozenset(names)
        return tuple(name for name in self.names if name in found)

    def join(self, sums: Mapping[str, MetricSum]) -> list[int]:
        """The words of these metrics, int64 each: zeros for a name that is not among them."""
        return [number for name in self.names for number in astuple(sums.get(name, MetricSum()))]

    def split(self, words: Sequence[int]) -> MetricSums:
        """The inverse of `join`, of one client or a sum."""
        starts = range(0, len(words), _N_MEASURED)
        found = [MetricSum(*words[start : start + _N_MEASURED]) for start in starts]
        return MetricSums(dict(zip(self.names, found, strict=True)))


@dataclass(frozen=True, slots=True)
class MetricTable:
    """The words of a table, which has room for metrics of any name."""

    key: int  # of the round, 0 to 2^63 - 1
    clients_max: int  # 2^16 at most

    @property
    def n_words(self) -> int:
        return _N_CELLS * _CELL_WORDS

    @property
    def n_most(self) -> int:
        """The most metrics of one client."""
        return TABLE_NAMES_MAX

    def sent_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of a client's metrics that travel: the first ones in the order of names. A name that is too long, or
        that no metric may have, is left out, because the cells that hold it would not come apart.
        """
        return tuple(filter(is_name_of_table, sorted(names)))[:TABLE_NAMES_MAX]

    def join(self, sums: Mapping[str, MetricSum]) -> list[int]:
        """The words of these metrics, int64 each. Names: those of `sent_of`. A metric of no client leaves no trace."""
        cells = [[0] * _CELL_WORDS for _ in range(_N_CELLS)]
        for name, one in sums.items():
            if one.clients:
                self._add(cells, name, one, 1)
        return [_signed(word) for cell in cells for word in cell]

    def split(self, words: Sequence[int]) -> MetricSums:
        """What comes out of a table, of one client or a sum, in the order of names.

        The words may be anything. A cell counts only if all of it agrees, and each name comes out once at most.
        """
        cells = [
            [word % _MODULUS for word in words[start : start + _CELL_WORDS]]
            for start in range(0, len(words), _CELL_WORDS)
        ]
        found, places = dict[str, MetricSum](), list(range(_N_CELLS))
        while places and len(found) < _N_CELLS:  # words that somebody made up could otherwise go on for long
            place = places.pop()
            pure = self._pure(cells[place], place)
            if pure is None or pure[0] in found:
                continue
            name, one = pure
            found[name] = one
            places += self._add(cells, name, one, -1)
        return MetricSums(dict(sorted(found.items())), not any(map(any, cells)))

    def _add(self, cells: list[list[int]], name: str, one: MetricSum, sign: int) -> tuple[int, ...]:
        """Add the metric to its cells, or with `sign` -1 take it out; returns the places of these cells."""
        check, places = self._hashed(name)
        added = (one.clients, *(one.clients * word for word in (*_name_words(name), check)), one.samples, one.value)
        for place in places:
            cells[place] = [(word + sign * more) % _MODULUS for word, more in zip(cells[place], added, strict=True)]
        return places

    def _pure(self, cell: Sequence[int], place: int) -> tuple[str, MetricSum] | None:
        """The one metric in this cell; None for a cell that holds none, several, or what no client may add."""
        clients, numbers = cell[0], cell[1 : 2 + _NAME_WORDS]
        if not 1 <= clients <= self.clients_max or any(number % clients for number in numbers):
            return None
        *words, check = (number // clients for number in numbers)
        name = _name_of(words)
        if name is None:
            return None
        expected, places = self._hashed(name)
        if check != expected or place not in places:
            return None
        samples, value = map(_signed, cell[-2:])
        return name, MetricSum(clients, samples, value)

    def _hashed(self, name: str) -> tuple[int, tuple[int, ...]]:
        """The check of a name, and the places of its cells, one in each part."""
        digest = hashlib.sha256(_LABEL + self.key.to_bytes(8, "little") + name.encode()).digest()
        drawn = _numbers(digest[_NUMBER_BYTES:][: _PARTS * _PLACE_BYTES], _PLACE_BYTES)
        places = tuple(part * _PART_CELLS + one % _PART_CELLS for part, one in enumerate(drawn))
        return int.from_bytes(digest[:_NUMBER_BYTES], "little"), places


def metric_words(names: MetricNames, key: int, clients_max: int) -> ListedMetrics | MetricTable:
    """The words of listed metrics or of all. `key`: of the round. `clients_max`: the most clients in a sum."""
    return MetricTable(key, clients_max) if names == ALL else ListedMetrics(names)


def is_name_of_table(name: str) -> bool:
    """Whether a table has room for a metric of this name."""
    try:
        require_metric_name(name)
    except ValueError:
        return False
    return len(name) <= NAME_BYTES_MAX


def _name_words(name: str) -> Iterator[int]:
    return _numbers(name.encode().ljust(NAME_BYTES_MAX, b"\0"), _NUMBER_BYTES)


def _name_of(words: Sequence[int]) -> str | None:
    """The name of these words; None if no metric may have it."""
    if any(word >> 8 * _NUMBER_BYTES for word in words):
        return None
    text = b"".join(word.to_bytes(_NUMBER_BYTES, "little") for word in words).rstrip(b"\0")
    name = text.decode("ascii", "replace")
    return name if is_name_of_table(name) else None


def _numbers(data: bytes, size: int) -> Iterator[int]:
    """Unsigned integers of `size` bytes each, little-endian."""
    return (int.from_bytes(data[start : start + size], "little") for start in range(0, len(data), size))


def _signed(word: int) -> int:
    """A word modulo 2^64 as an int64."""
    low = word % _MODULUS
    return low - _MODULUS if low >= _MODULUS // 2 else low
