"""Sentences that list, and sentences that count."""

import pytest

from umbel.aggregation.phrases import agreeing, counted, part_of, some


def test_a_long_list_ends_in_how_many_more() -> None:
    assert some(["a", "b"]) == "a, b"
    assert some(["a", "b", "c"], shown=2) == "a, b and 1 more"


@pytest.mark.parametrize(("n", "words"), [(0, "0 clients"), (1, "1 client"), (2, "2 clients")])
def test_a_number_and_its_noun_agree(n: int, words: str) -> None:
    assert counted(n, "client") == words


def test_so_do_a_number_and_its_verb() -> None:
    assert [counted(n, "client waits", "clients wait") for n in (0, 1)] == ["0 clients wait", "1 client waits"]
    assert [agreeing(n, "has", "have") for n in (0, 1, 2)] == ["have", "has", "have"]


def test_a_part_has_the_verb_of_its_number_and_the_noun_of_the_whole() -> None:
    said = [part_of(n, total, "report", "is", "are") for n, total in ((0, 1), (1, 1), (0, 3), (1, 3), (2, 3))]
    assert said == [
        "0 of 1 report is",
        "1 of 1 report is",
        "0 of 3 reports are",
        "1 of 3 reports is",
        "2 of 3 reports are",
    ]
