"""A growing map is a dictionary that never changes: whatever is made of it, every map keeps its own entries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.round.states import GrowingMap, with_entry

some = st.dictionaries(st.integers(0, 5), st.integers(), max_size=3)
steps = st.lists(st.tuples(st.integers(0, 30), some), max_size=60)


@given(steps)
def test_each_map_is_the_dictionary_that_was_copied_at_each_step(steps: list[tuple[int, dict[int, int]]]) -> None:
    maps: list[GrowingMap[int, int]] = [GrowingMap()]
    plain: list[dict[int, int]] = [{}]
    for back, more in steps:
        at = max(0, len(maps) - 1 - back)
        if more.keys() & plain[at].keys():
            with pytest.raises(ValueError, match="already"):
                maps[at].with_entries(more)
            continue
        maps.append(maps[at].with_entries(more))
        plain.append({**plain[at], **more})
    for one, other in zip(maps, plain, strict=True):
        assert list(one.items()) == list(other.items())
        assert len(one) == len(other)
        assert one == other
        assert all((key in one) == (key in other) and one.get(key) == other.get(key) for key in range(6))


def test_a_map_that_grew_further_shows_a_smaller_one_nothing_new() -> None:
    small: GrowingMap[str, int] = GrowingMap({"a": 1})
    large = small.with_entries({"b": 2})
    assert "b" not in small
    with pytest.raises(KeyError):
        small["b"]
    assert list(small) == ["a"]
    assert list(large) == ["a", "b"]
    assert repr(small) == "GrowingMap({'a': 1})"


def test_a_dictionary_becomes_a_growing_map_and_stays_as_it_is() -> None:
    entries = {"a": 1}
    grown = with_entry(entries, "b", 2)
    assert grown == {"a": 1, "b": 2}
    assert entries == {"a": 1}
    assert with_entry(grown, "c", 3) == {"a": 1, "b": 2, "c": 3}
    assert grown == {"a": 1, "b": 2}
