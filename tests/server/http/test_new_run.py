"""The run files that a coordinator takes."""

import pytest

from umbel.server.http.new_run import read_run_file
from umbel.server.problems import Refused

RUN = b'name = "ward"\nrounds = { count = 2, target = 3 }\n'
SIMULATED = b'seeds = [4]\n[clients]\napp = "wards:make_ward"\ncount = 9\n[engine]\nworkers = 2\n'


def test_an_experiment_is_the_run_that_it_describes() -> None:
    assert read_run_file(RUN + SIMULATED) == read_run_file(b"seed = 4\n" + RUN)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (b"[sweep]\n'rounds.target' = [2, 3]\n", "describes several runs"),
        (b"seeds = [1, 2]\n", "a run has one seed"),
        (b"[engin]\n", "engin"),
    ],
)
def test_what_is_not_one_run_is_refused_with_the_reason(more: bytes, words: str) -> None:
    with pytest.raises(Refused, match=words):
        read_run_file(RUN + more)
