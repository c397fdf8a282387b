"""The run that an experiment's file describes."""

import tomllib

import pytest

from umbel.aggregation.run.of_experiment import run_part

RUN = """
name = "ward"
seed = 3
[rounds]
count = 2
target = 3
"""
EXPERIMENT = (
    RUN.replace("seed = 3", "seeds = [3]\ntarget_accuracy = 0.5")
    + """
[clients]
app = "my_hospital:make_client"
count = 9
[engine]
name = "sequential"
"""
)


def test_a_run_file_is_taken_as_it_is() -> None:
    table = tomllib.loads(RUN)
    assert run_part(table) == (table, [])


def test_of_an_experiment_the_run_is_taken_and_the_rest_is_named() -> None:
    assert run_part(tomllib.loads(EXPERIMENT)) == (
        tomllib.loads(RUN),
        ["target_accuracy", "[clients]", "[engine]"],
    )


@pytest.mark.parametrize("seeds", ["[]", "[1, 2]", "7", '"a"', "[3]\nseed = 3"])
def test_a_run_has_one_seed(seeds: str) -> None:
    with pytest.raises(ValueError, match="a run has one seed"):
        run_part(tomllib.loads(f"seeds = {seeds}"))


def test_a_sweep_is_not_one_run() -> None:
    with pytest.raises(ValueError, match="describes several runs"):
        run_part(tomllib.loads("[sweep]\n'rounds.target' = [1, 2]"))
