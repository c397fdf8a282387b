"""What the user's own code is called, and what is said when it fails."""

import re

import pytest
import torch

from umbel.client import LocalPlan
from umbel.client.user_code import where_raised


def failure_of(code: object) -> str:
    assert callable(code)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any error is described
        code()
    return where_raised(caught.value)


def test_an_error_has_its_message_in_one_line_and_the_last_line_of_the_users_code() -> None:
    def look_up() -> None:
        raise KeyError("ward\n7")

    assert re.fullmatch(r"KeyError: 'ward\\n7' \(test_user_code\.py, line \d+\)", failure_of(look_up))
    assert failure_of(lambda: torch.zeros(2) @ torch.zeros(3)).startswith("RuntimeError: ")
    many = failure_of(lambda: (_ for _ in ()).throw(ValueError("first\n  second " + "x" * 999)))
    assert many.startswith("ValueError: first second xxx")
    assert len(many) < 400


def test_an_error_without_a_message_is_named_by_its_type() -> None:
    def fail() -> None:
        raise RuntimeError

    assert re.fullmatch(r"RuntimeError \(test_user_code\.py, line \d+\)", failure_of(fail))


def test_an_error_in_umbels_own_trainer_has_the_line_of_the_trainer() -> None:
    assert re.search(r" \(plan\.py, line \d+\)$", failure_of_library())


def failure_of_library() -> str:
    error = ValueError("no")
    try:
        LocalPlan().applied_by_site("unknown")
    except ValueError as raised:
        error = raised
    trace = error.__traceback__
    assert trace is not None
    return where_raised(error.with_traceback(trace.tb_next))  # without the frame of this test


def test_a_plans_state_that_is_replaced_is_told_to_be_changed_in_place() -> None:
    plan = LocalPlan()
    words = failure_of(lambda: setattr(plan, "state", {"round": 3}))
    assert "FrozenInstanceError: cannot assign to field 'state'; change plan.state in place" in words
    assert "in place" not in failure_of(lambda: setattr(plan, "epochs", 3))
