"""The frozen round: its bytes are what implementers in other languages can check theirs against."""

import json
from typing import Any

import pytest

from tests.aggregation.secagg import by_the_book
from tests.aggregation.secagg.transcript import FILE, given, played

pytestmark = pytest.mark.bits

FROZEN: dict[str, Any] = json.loads(FILE.read_text())
BOOK = by_the_book.Book(FROZEN["given"])


def test_the_round_is_played_again_byte_for_byte() -> None:
    assert played(FROZEN["given"]) == FROZEN["derived"]


@pytest.mark.parametrize("part", FROZEN["derived"])
def test_whoever_reads_the_protocol_reaches_the_same_bytes(part: str) -> None:
    assert BOOK.derived()[part] == FROZEN["derived"][part]


def test_the_book_makes_nothing_that_is_not_in_the_file() -> None:
    assert BOOK.derived().keys() == FROZEN["derived"].keys()
    assert [key for _, key in FROZEN["given"]["context"]["cohort"]] == BOOK.identities()


def test_what_is_given_is_drawn_from_labels_and_so_hides_nothing() -> None:
    assert given() == FROZEN["given"]


def test_no_two_keys_of_the_round_are_the_same() -> None:
    masks = FROZEN["derived"]["masks"]
    keys = [*FROZEN["derived"]["channel_keys"].values()]
    for index, vectors in masks.items():
        for of_vector in vectors.values():
            keys += [one["key"] for of, one in of_vector.items() if of == "self" or int(of) > int(index)]
    assert len(keys) == 12 + 2 * (3 + 6)
    assert len(set(keys)) == len(keys)
    for index, other in (("0", "1"), ("0", "2"), ("1", "2")):
        assert masks[index]["levels"][other] == masks[other]["levels"][index]
