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
        whole(30), whole(2), whole(3), {"loss": number(4)}, whole(9), first_loss=number(5), last_loss=number(6)
    )
    assert result == TrainResult(30, 2, 3, {"loss": 4.0}, 9, 5.0, 6.0)
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


@pytest.mark.parametrize("name", ["first_loss", "last_loss"])
def test_so_is_a_loss_that_is_text(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a number, not str"):
        TrainResult(30, 2, 3, **{name: "0.5"})  # type: ignore[arg-type]
