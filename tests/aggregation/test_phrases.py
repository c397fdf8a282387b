"""Sentences that list, and sentences that count."""

import pytest

from umbel.aggregation.phrases import agreeing, counted, some


def test_a_long_list_ends_in_how_many_more() -> None:
    assert some(["a", "b"]) == "a, b"
    assert some(["a", "b", "c"], shown=2) == "a, b and 1 more"


@pytest.mark.parametrize(("n", "words"), [(0, "0 clients"), (1, "1 client"), (2, "2 clients")])
def test_a_number_and_its_noun_agree(n: int, words: str) -> None:
    assert counted(n, "client") == words


def test_so_do_a_number_and_its_verb() -> None:
    assert [counted(n, "client waits", "clients wait") for n in (0, 1)] == ["0 clients wait", "1 client waits"]
    assert [agreeing(n, "has", "have") for n in (0, 1, 2)] == ["have", "has", "have"]
