"""Which way rounds lean is the same sum whichever way the rounds are taken together, and is said in words."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.run.lean import Lean

_COUNTS = st.integers(0, 1000)


@dataclass(frozen=True, slots=True)
class Round:
    reported: int = 0
    partial: int = 0
    dropped: int = 0
    samples_in: int = 0
    samples_left_out: int = 0
    passed_over: int = 0
    samples_passed_over: int = 0


@given(st.lists(st.builds(Round, *[_COUNTS] * 7), max_size=6), st.integers(0, 6))
def test_rounds_add_up_in_any_grouping(rounds: list[Round], cut: int) -> None:
    assert Lean.of(rounds[:cut]) + Lean.of(rounds[cut:]) == Lean.of(rounds)
    assert Lean.of(rounds) == Lean.of(reversed(rounds))


@given(st.lists(st.builds(Round, *[_COUNTS] * 7), max_size=6))
def test_shares_and_means_are_those_of_the_clients_one_by_one(rounds: list[Round]) -> None:
    """Against lists with an entry for each client, which has the mean number of samples of its round's kind."""
    lean = Lean.of(rounds)
    n_in, n_out = sum(one.reported for one in rounds), sum(one.dropped for one in rounds)
    samples_in, samples_out = sum(one.samples_in for one in rounds), sum(one.samples_left_out for one in rounds)
    assert lean.left_out_share == (n_out / (n_in + n_out) if n_in + n_out else None)
    silent = [one for one in rounds if one.reported + one.dropped and not one.samples_in + one.samples_left_out]
    known = samples_in + samples_out > 0 and not silent
    assert lean.samples_share == (samples_in / (samples_in + samples_out) if known else None)
    assert lean.mean_in == (samples_in / n_in if n_in and known else None)
    assert lean.mean_left_out == (samples_out / n_out if n_out and known else None)


def test_nothing_is_said_of_samples_if_those_of_one_round_are_not_known() -> None:
    lean = Lean.of([Round(10, samples_in=100), Round(6, dropped=4)])
    assert lean.samples_share is None
    assert lean.words == "0 of 16 reports were partial; 4 of 20 asked clients were left out"


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (Round(reported=10, samples_in=100), ""),
        (Round(10, 0, 3, 1000, 900), "samples count, so the model leans to clients with little data"),
        (Round(10, 0, 3, 1000, 150), "samples count, so the model leans to clients with much data"),
        (Round(10, 0, 3, 1000, 305), "the model leans neither to clients with much data nor to those with little"),
        (Round(10, 2, 3), "2 of 10 reports were partial; 3 of 13 asked clients were left out"),
        (Round(10, 1, 0, 1000), "1 of 10 reports was partial; 0 of 10 asked clients were left out"),
        (
            Round(10, 0, 10, 1000, 4000, 5, 1000),
            "clients have on average 100 samples if their reports count, 400 if they were left out, 200 if they waited "
            "and were not asked; 20% of the asked samples count",
        ),
    ],
)
def test_it_is_said_in_words(one: Round, words: str) -> None:
    assert words in Lean.of([one]).words
    assert bool(words) == bool(Lean.of([one]).words)
