"""What sets the kinds of rounds apart."""

from umbel.aggregation.plans.assignment import assignment_id
from umbel.aggregation.plans.round import Task
from umbel.aggregation.types import ClientId, RunId


def test_no_two_kinds_share_an_assignment() -> None:
    ids = {assignment_id(RunId("demo"), 1, 1, ClientId("lab"), task) for task in Task}
    assert len(ids) == len(Task)


def test_each_kind_says_what_is_done_when_it_has_closed() -> None:
    assert len({task.closing_words for task in Task}) == len(Task)


def test_only_updates_make_a_model() -> None:
    assert all(task.sends_updates for task in Task if task.makes_model)
