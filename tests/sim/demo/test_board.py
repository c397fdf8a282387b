"""The live picture can be drawn in every situation, at every width."""

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from tests.sim.made_records import ended_round, live_round
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.run.records import Fate, RunView
from umbel.sim.demo.baselines import Baselines
from umbel.sim.demo.board import Board, DemoRound, Proof, View, sparkline
from umbel.sim.demo.plan import make_plan

PLAN = make_plan(0, 24, calm=False)


RUN = RunView("demo", RunStatus.RUNNING, "", 0, 24, 0.0, ModelRef(0, "0" * 64, 135_000, "0" * 64))


def new_board(told: list[str]) -> Board:
    return Board(PLAN, told.append, run=RUN)


def drawn(board: Board, events: Sequence[str] = (), width: int = 100, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=width, height=height)
    view = View()
    view.board = board
    for event in events:
        view.tell(event)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


@pytest.mark.parametrize("phase", ["recruiting", "training", "closing"])
@pytest.mark.parametrize("width", [60, 100, 200])
def test_every_phase_is_drawn_within_forty_lines(phase: str, width: int) -> None:
    board = new_board([])
    board.add(ended_round(PLAN, 1))
    board.live = live_round(PLAN, 2, phase)
    text = drawn(board, ["something happened"], width)
    assert phase in text
    assert "0 of 24 rounds" in text
    assert f"round 2: {phase}" in text
    assert "clinic-12" in text
    assert len(text.splitlines()) <= 40


@pytest.mark.parametrize(("width", "height"), [(80, 24), (110, 45)])
def test_the_picture_fits_the_terminal_and_its_newest_events_are_shown(width: int, height: int) -> None:
    told: list[str] = []
    board = new_board(told)
    for number in range(1, 21):
        board.add(ended_round(PLAN, number))
    board.live = live_round(PLAN, 21, "training")
    lines = drawn(board, told, width, height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "round 20/24" in lines[-1]
    assert "round 18/24" in lines[-3]
    if height > 40:
        assert any("clinic-11" in line and "7 of 28" in line for line in lines)


def test_before_the_first_round_the_stage_is_shown() -> None:
    board = new_board([])
    board.say_stage("starting a coordinator")
    assert "starting a coordinator" in drawn(board)


def test_a_killed_client_is_shown_as_lost_until_it_is_back() -> None:
    told: list[str] = []
    board = new_board(told)
    board.live = live_round(PLAN, 3, "training")
    board.note_kill("clinic-10")
    assert "killed by the demo" in drawn(board)
    board.note_restart("clinic-10")
    assert "starting again" in drawn(board)
    board.note_return("clinic-10")
    assert [text.split()[0] for text in told[:3]] == ["clinic-10"] * 3
    assert "the slow clients are told to stop" in told[3]
    assert not board.down


def test_a_round_is_told_in_one_line_that_names_whoever_did_not_simply_report() -> None:
    told: list[str] = []
    new_board(told).add(ended_round(PLAN, 3))
    assert told[0].endswith("10/12 reports, partial 11, lost 10, stopped 12")


def test_many_who_did_not_report_are_told_by_their_number_within_the_line() -> None:
    told: list[str] = []
    ended = ended_round(PLAN, 24)
    clients = tuple(replace(client, fate=Fate.LOST) for client in ended.record.clients)
    new_board(told).add(DemoRound(replace(ended.record, clients=clients), ended.score))
    assert told[0].endswith("lost 12 clients")
    assert len(told[0]) <= 71


def test_an_abandoned_attempt_is_told_with_its_reason() -> None:
    told: list[str] = []
    new_board(told).add(ended_round(PLAN, 3, committed=False))
    assert "abandoned: the target" in told[0]


def test_the_baselines_appear_as_they_become_known() -> None:
    board = new_board([])
    board.baselines = Baselines(0.991, ())
    assert "99.1%" in drawn(board)
    board.baselines = Baselines(0.991, (0.5, 0.7))
    assert "60.0%" in drawn(board)


def test_a_killed_coordinator_is_the_stage_until_it_is_back() -> None:
    told: list[str] = []
    board = new_board(told)
    board.live = live_round(PLAN, 5, "training")
    board.note_coordinator_kill(5, 9)
    while_down = drawn(board, width=80)
    assert "the coordinator is killed (SIGKILL) in round 5, after 9 reports" in while_down
    assert "7 of 28" in while_down, "who has reported in this round is still to be seen"
    board.note_coordinator_return(4.1)
    assert "the coordinator is back" in drawn(board, width=80)
    assert told[-1] == "the coordinator is back with the same files after 4.1 s"
    assert board.coordinator_killed_in == 5


def test_without_a_terminal_no_line_is_longer_than_eighty_columns() -> None:
    file = io.StringIO()
    view = View(Console(file=file, width=200))
    view.board = board = Board(PLAN, view.tell)
    for number in range(1, 12):
        board.add(ended_round(PLAN, number))
    board.add(ended_round(PLAN, 12, committed=False))
    board.note_kill("clinic-10")
    board.note_coordinator_kill(5, 9)
    board.note_proof(Proof(123, 120, "0" * 64))
    board.note_return("clinic-10")
    board.tell("word " * 40)
    assert max(map(len, file.getvalue().splitlines())) <= 80
    assert file.getvalue().splitlines()[-1].startswith(" " * 9 + "word")


def test_without_a_terminal_each_event_is_one_line() -> None:
    file = io.StringIO()
    view = View(Console(file=file, width=40))
    view.board = Board(PLAN, view.tell)
    view.board.add(ended_round(PLAN, 3))
    assert len(file.getvalue().splitlines()) == 1
    assert "lost 10" in file.getvalue()


def test_a_sparkline_has_one_bar_per_value_and_survives_the_ends() -> None:
    assert sparkline([-1.0, 0.0, 0.5, 1.0, 2.0], 10) == "▁▁▅██"
    assert len(sparkline([0.5] * 50, 30)) == 30


@pytest.mark.parametrize(("attempt", "is_said"), [(1, False), (2, True)])
def test_an_attempt_after_the_first_is_said(attempt: int, is_said: bool) -> None:
    board = new_board([])
    board.live = replace(live_round(PLAN, 2, "training"), attempt=attempt)
    assert (f"(attempt {attempt})" in drawn(board)) is is_said
