"""A map that never changes and grows by an entry in constant time, so that a step of a round copies no cohort."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class GrowingMap(Mapping[Key, Value], Generic[Key, Value]):
    """A mapping in the order of insertion; `with_entry` makes a greater one and leaves this one as it is.

    Maps that grow from one another share one dictionary, of which each sees as many entries as it has. Only the
    greatest of them can add to it; any other copies what it sees first. Not thread-safe.
    """

    __slots__ = ("_n", "_shared")

    def __init__(self, entries: Mapping[Key, Value] | None = None) -> None:
        self._shared: dict[Key, tuple[int, Value]] = {}
        for n, (key, value) in enumerate((entries or {}).items()):
            self._shared[key] = (n, value)
        self._n = len(self._shared)

    def with_entry(self, key: Key, value: Value) -> "GrowingMap[Key, Value]":
        """This map with one more entry. Raises `ValueError` for a key that it has."""
        if key in self:
            raise ValueError(f"the map has {key!r} already")
        grown: GrowingMap[Key, Value] = GrowingMap.__new__(GrowingMap)
        is_newest = len(self._shared) == self._n
        grown._shared = self._shared if is_newest else dict(islice(self._shared.items(), self._n))
        grown._shared[key] = (self._n, value)
        grown._n = self._n + 1
        return grown

    def __getitem__(self, key: Key) -> Value:
        n, value = self._shared[key]
        if n >= self._n:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        found = self._shared.get(key)  # type: ignore[arg-type]  # any object may be looked up
        return found is not None and found[0] < self._n

    def __iter__(self) -> Iterator[Key]:
        return islice(iter(self._shared), self._n)

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return f"GrowingMap({dict(self)!r})"


def with_entry(entries: Mapping[Key, Value], key: Key, value: Value) -> Mapping[Key, Value]:
    """`entries` with one more. Constant time if it is a `GrowingMap`, as what this returns always is."""
    return (entries if isinstance(entries, GrowingMap) else GrowingMap(entries)).with_entry(key, value)
