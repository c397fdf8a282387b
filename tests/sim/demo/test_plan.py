"""What the demo asks for is consistent, and the coordinator reads the same run file that the demo wrote."""

import tomllib

import pytest
from pydantic import TypeAdapter

from umbel.aggregation.run.file import RunFile
from umbel.sim.commands import demo
from umbel.sim.demo.plan import (
    COORDINATOR_KILLED_AFTER,
    KILL_IN_TRAINING,
    N_CLIENTS,
    PACE_MAX,
    ROUNDS_DOWN,
    SECURE_WINDOW_S,
    WINDOW_S,
    Role,
    make_plan,
    pace_of,
    run_toml,
)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_demo_too_short_for_a_kill_asks_for_none(rounds: int) -> None:
    assert make_plan(7, rounds, calm=False).run_file.override == ()


@pytest.mark.parametrize("calm", [True, False])
def test_the_run_file_comes_back_as_it_was_written(calm: bool) -> None:
    run_file = make_plan(7, 24, calm=calm).run_file
    assert TypeAdapter(RunFile).validate_python(tomllib.loads(run_toml(run_file))) == run_file


def test_a_run_is_bound_to_the_list_and_nothing_else_of_it_changes() -> None:
    plan, sha256 = make_plan(7, 24, calm=False), "07f5be6f" * 8
    written = tomllib.loads(run_toml(plan.bound_to(sha256).run_file))
    assert written["secure_aggregation"].pop("members_sha256") == sha256
    before = tomllib.loads(run_toml(plan.run_file))
    assert before["secure_aggregation"].pop("members_sha256") == ""
    assert written == before


def test_there_are_twelve_clients_in_five_processes_and_the_victim_is_alone() -> None:
    plan = make_plan(0, 24, calm=False)
    assert sorted(client.name for client in plan.clients) == [f"clinic-{i:02}" for i in range(1, 13)]
    assert len(plan.processes) == 5
    assert [[c.role for c in p] for p in plan.processes[3:]] == [[Role.VICTIM], [Role.SLOW, Role.SLOW]]


def test_without_the_victim_the_target_needs_one_slow_client() -> None:
    plan = make_plan(0, 24, calm=False)
    n_ordinary = sum(client.role is Role.ORDINARY for client in plan.clients)
    assert n_ordinary + 1 == plan.run_file.rounds.target
    assert plan.run_file.round_plan(1, 1).n_wanted == len(plan.clients)


def test_a_calm_demo_kills_and_slows_nobody_and_waits_for_all() -> None:
    plan = make_plan(0, 24, calm=True)
    assert {client.role for client in plan.clients} == {Role.ORDINARY}
    assert plan.kill_in_training is None
    assert plan.run_file.rounds.target == plan.run_file.rounds.minimum == len(plan.clients)


@pytest.mark.parametrize(("rehearsals_s", "pace"), [([0.3, 0.5, 9.0], 1.0), ([1.4] * 5, 2.0), ([60.0] * 5, PACE_MAX)])
def test_the_window_is_as_long_as_this_machine_needs_within_bounds(rehearsals_s: list[float], pace: float) -> None:
    assert pace_of(rehearsals_s) == pace
    for plain, window_s in ((True, WINDOW_S), (False, SECURE_WINDOW_S)):
        plan = make_plan(0, 24, calm=False, plain=plain).at_pace(pace)
        assert plan.run_file.rounds.window_s == pytest.approx(window_s * pace)


def test_rounds_are_secure_and_the_last_plain_one_can_be_made_again() -> None:
    secure, plain = (make_plan(0, 24, calm=True, plain=plain).run_file for plain in (False, True))
    assert (secure.secure is None, secure.retention.updates) == (False, "none")
    assert (plain.secure is None, plain.retention.updates) == (True, "1 round")


def test_only_where_clients_are_slow_does_the_run_take_part_of_the_work() -> None:
    slow, calm = (make_plan(0, 24, calm=calm).run_file.secure for calm in (False, True))
    assert slow is not None
    assert calm is not None
    assert (slow.minimum_work, calm.minimum_work) == (0.1, None)


def test_the_help_tells_from_how_many_rounds_on_something_is_killed() -> None:
    # The client is killed in a certain training of its own, and may miss a round before.
    assert f"With --rounds {KILL_IN_TRAINING + 1} or more, another client is killed" in (demo.__doc__ or "")
    coordinator = f"With --rounds {KILL_IN_TRAINING + COORDINATOR_KILLED_AFTER + 1} or more, the coordinator is killed"
    assert coordinator in " ".join((demo.__doc__ or "").split())


def test_while_a_clinic_is_away_every_other_one_is_asked_so_that_the_rounds_go_on() -> None:
    file = make_plan(7, 24, calm=False).run_file
    wanted = [file.rounds_of(number).target for number in range(1, 25)]
    away = range(KILL_IN_TRAINING, KILL_IN_TRAINING + ROUNDS_DOWN + 1)
    assert wanted == [N_CLIENTS if number in away else 10 for number in range(1, 25)]
