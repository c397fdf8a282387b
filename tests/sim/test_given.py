"""Objects that are found by name while a simulation runs, and only there."""

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from umbel.client.user_code import OptionWords, find_named
from umbel.sim.given import given, is_given, name_of, only_here, why_only_here

PLACE = OptionWords("name", "my_model:net", "an object")


def found(attribute: str) -> object:
    return find_named(name_of(attribute), PLACE)


def test_an_object_is_found_by_its_name_inside_and_not_after() -> None:
    one, other = object(), object()
    with given({"net-1": one}):
        assert found("net-1") is one
        with given({"net-2": other}):
            assert (found("net-1"), found("net-2")) == (one, other)
        assert not hasattr(importlib.import_module("umbel.sim.given"), "net-2")
    with pytest.raises(AttributeError, match="has no attribute 'net-1'"):
        getattr(importlib.import_module("umbel.sim.given"), "net-1")


def test_an_error_inside_leaves_nothing_behind() -> None:
    with pytest.raises(KeyError), given({"net-1": object()}):
        raise KeyError
    assert not hasattr(importlib.import_module("umbel.sim.given"), "net-1")


def test_two_threads_do_not_see_each_others_objects() -> None:
    meet = Barrier(2, timeout=60)

    def seen(own: object) -> object:
        with given({"net": own}):
            meet.wait()  # both have given theirs
            return found("net")

    one, other = object(), object()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(seen, (one, other))) == [one, other]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"a": "my_model:net", "b": [1, None, {"c": "x"}]}, None),
        ({"a": {"b": ["__main__:Net"]}}, "__main__:Net"),
        ({"a": "x", "b": {"c": name_of("Net-1")}}, name_of("Net-1")),
    ],
)
def test_names_that_other_processes_cannot_import_are_found_in_tables(value: object, name: str | None) -> None:
    assert only_here(value) == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("__main__:Net", '__main__:Net is defined in this notebook or script, .* name it "my_code:Net"'),
        (name_of("Net-0123"), '^Net is an object of this program, .* name it "my_code:Net"'),
        (name_of("<lambda>-0123"), '^<lambda> is an object of this program, .* name it "my_code:make"'),
    ],
)
def test_a_sentence_says_why_and_what_to_do(name: str, words: str) -> None:
    def refuse() -> None:
        raise ValueError(why_only_here(name))

    check: Callable[[], None] = refuse
    with pytest.raises(ValueError, match=words):
        check()
    assert is_given(name) == (not name.startswith("__main__"))
