"""What a site's own code may answer: numbers of Python, numpy and torch. For all else it hears what is wrong."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from umbel.client import Evaluation, TrainResult


@pytest.mark.parametrize("whole", [int, np.int64, np.uint8, torch.tensor])
@pytest.mark.parametrize("number", [float, int, np.float32, torch.tensor])
def test_numbers_of_the_usual_libraries_are_taken(whole: Any, number: Any) -> None:
    result = TrainResult(
        whole(30),
        whole(2),
        whole(3),
        {"loss": number(4)},
        steps_full=whole(9),
        first_loss=number(5),
        last_loss=number(6),
    )
    assert result == TrainResult(30, 2, 3, {"loss": 4.0}, steps_full=9, first_loss=5.0, last_loss=6.0)
    assert (type(result.sample_count), type(result.metrics["loss"]), type(result.first_loss)) == (int, float, float)
    assert Evaluation(whole(7), {"loss": number(4)}) == Evaluation(7, {"loss": 4.0})


def test_a_metric_may_be_no_number_as_floats_go() -> None:
    """What becomes of it depends on the round."""
    assert math.isnan(TrainResult(30, 2, 3, {"loss": math.nan}).metrics["loss"])


@pytest.mark.parametrize("name", ["sample_count", "steps_done", "steps_planned", "steps_full"])
@pytest.mark.parametrize("wrong", ["3", 3.0, math.nan, [3]])
def test_a_count_that_is_no_whole_number_is_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a whole number, not {type(wrong).__name__}"):
        TrainResult(**({"sample_count": 30, "steps_done": 2, "steps_planned": 3} | {name: wrong}))  # pyright: ignore


@pytest.mark.parametrize("name", ["sample_count", "steps_done", "steps_planned"])
def test_so_is_a_count_that_is_missing(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a whole number, not NoneType"):
        TrainResult(**({"sample_count": 30, "steps_done": 2, "steps_planned": 3} | {name: None}))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["0.5", None, [0.5]])
def test_so_is_a_metric_that_is_no_number(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"metric 'loss' must be a number, not {type(wrong).__name__}"):
        TrainResult(30, 2, 3, {"loss": wrong})
    with pytest.raises(TypeError, match=f"metric 'loss' must be a number, not {type(wrong).__name__}"):
        Evaluation(30, {"loss": wrong})


@pytest.mark.parametrize("wrong", [None, 0.5, [("loss", 0.5)]])
def test_so_are_metrics_that_are_no_mapping(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"mapping from names to numbers, not {type(wrong).__name__}"):
        TrainResult(30, 2, 3, wrong)


@pytest.mark.parametrize(
    "numbers",
    [
        [[1, 2], [3, 4]],
        (1, 2, 3, 4),
        range(1, 5),
        np.array([[1, 2], [3, 4]], dtype=np.uint16),
        np.array([1, 2, 3, 4], dtype=np.int64),
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor([1, 2, 3, 4], dtype=torch.int32),
        [torch.tensor(1), np.int64(2), 3, np.array(4)],
    ],
)
def test_counts_of_the_usual_libraries_become_tuples_row_by_row(numbers: Any) -> None:
    assert TrainResult(30, 2, 3, counts={"confusion": numbers}).counts == {"confusion": (1, 2, 3, 4)}
    found = Evaluation(30, {}, {"confusion": numbers, "n": numbers[0]}).counts
    assert {type(number) for one in found.values() for number in one} == {int}


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (0.5, "float"),
        ([1, 2.0], "float"),
        (np.array([1.0]), "float"),
        (torch.tensor([1.0]), "float"),
        ("12", "str"),
        (None, "NoneType"),
        ({1: 2}, "dict"),
    ],
)
def test_counts_that_are_no_whole_numbers_are_refused_by_name(wrong: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"each number of counts 'confusion' must be a whole number, not {kind}"):
        Evaluation(30, {}, {"confusion": wrong})


@pytest.mark.parametrize("wrong", [None, [("n", 1)], 3])
def test_counts_that_are_no_mapping_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"counts must be a mapping .* not {type(wrong).__name__}"):
        TrainResult(30, 2, 3, counts=wrong)


def test_counts_out_of_bounds_are_refused_where_the_sites_code_returns_them() -> None:
    with pytest.raises(ValueError, match="a number of the counts 'n' is -1"):
        Evaluation(30, {}, {"n": -1})


@pytest.mark.parametrize("name", ["first_loss", "last_loss"])
def test_so_is_a_loss_that_is_text(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a number, not str"):
        TrainResult(30, 2, 3, **{name: "0.5"})  # type: ignore[arg-type]
