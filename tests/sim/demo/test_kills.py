"""When the demo kills its coordinator, and what it holds against the round that was interrupted."""

from dataclasses import replace

import pytest

from tests.sim.made_records import ended_round, live_round
from umbel.aggregation.run.records import Fate, LiveRound
from umbel.sim.demo.board import Board
from umbel.sim.demo.kills import InterruptedRound, ReportLost, is_the_moment
from umbel.sim.demo.plan import make_plan

PLAN = make_plan(0, 24, calm=False)
REPORTED = frozenset(f"clinic-{number:02}" for number in range(1, 10))


def board_after(n_rounds: int) -> Board:
    board = Board(PLAN, lambda _event: None)
    for number in range(1, n_rounds + 1):
        if number == 3:
            board.note_kill("clinic-10")
        board.add(ended_round(PLAN, number))
    return board


def with_reports(count: int) -> LiveRound:
    """Round 5, for which eleven are asked, since one is killed."""
    live = live_round(PLAN, 5, "training")
    asked = [client for client in live.clients if client.client != "clinic-10"]
    fates = [Fate.ACCEPTED] * count + [Fate.TRAINING] * (len(asked) - count)
    return replace(live, clients=tuple(replace(c, fate=f) for c, f in zip(asked, fates, strict=True)))


def test_the_coordinator_is_killed_while_the_killed_client_is_missing_and_enough_reports_are_in() -> None:
    live = with_reports(8)
    assert is_the_moment(PLAN, board_after(4), live)
    assert not is_the_moment(PLAN, board_after(3), live), "too early"
    assert not is_the_moment(PLAN, board_after(2), live), "nobody is killed yet"
    assert not is_the_moment(PLAN, board_after(4), replace(live, phase="closing"))


def test_it_is_not_killed_before_the_reports_are_in_that_let_the_round_commit() -> None:
    plain = make_plan(0, 24, calm=False, plain=True)
    assert plain.run_file.rounds.minimum == 6
    for plan, enough in ((PLAN, 8), (plain, 6)):  # a sum of 11 masked updates needs more than two thirds of them
        assert is_the_moment(plan, board_after(4), with_reports(enough))
        assert not is_the_moment(plan, board_after(4), with_reports(enough - 1))


def test_it_is_killed_once_and_never_in_a_calm_demo() -> None:
    board, live = board_after(4), with_reports(8)
    board.note_coordinator_kill(5, 9)
    assert not is_the_moment(PLAN, board, live)
    assert not is_the_moment(make_plan(0, 24, calm=True), board_after(4), live)


def test_a_round_that_counts_every_report_accepted_before_the_kill_passes() -> None:
    InterruptedRound(5, 1, REPORTED).check(ended_round(PLAN, 5).record)


def test_a_lost_report_fails_the_demo_and_is_named() -> None:
    record = ended_round(PLAN, 5).record
    clients = tuple(replace(c, fate=Fate.RELEASED) if c.client == "clinic-07" else c for c in record.clients)
    with pytest.raises(ReportLost, match="round 5 lost accepted reports: clinic-07"):
        InterruptedRound(5, 1, REPORTED).check(replace(record, clients=clients))


def test_an_abandoned_round_has_lost_them_all() -> None:
    with pytest.raises(ReportLost, match="clinic-01, clinic-02"):
        InterruptedRound(5, 1, REPORTED).check(ended_round(PLAN, 5, committed=False).record)
