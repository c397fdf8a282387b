"""When the process of a run is started, asked to leave, and tried again."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.client.agent.runs import CHANGED, ONE
from umbel.aggregation.types import RunId
from umbel.client.agent.absences import Absence
from umbel.client.agent.decisions import SiteDecision
from umbel.client.agent.notes import Doing, Note
from umbel.client.agent.order import ChildOrder
from umbel.client.agent.process import RunProcess
from umbel.client.agent.retries import RETRY
from umbel.client.agent.site_commands import SiteCommands
from umbel.client.agent.site_run import NOT_RUNNING, SupervisedRun
from umbel.client.agent.verdict import Stand, Verdict
from umbel.client.agent.verdict_log import VerdictLog
from umbel.client.policy.decided import DecidedTerms
from umbel.client.policy.policy import SitePolicy

COMMANDS = SiteCommands.of(Path("/srv/umbel"))
DECIDED = DecidedTerms(True, 3, False)
ORDER = ChildOrder("http://fl.example.org", Path("state"), RunId("heart-1"), "heart:client", None, DECIDED, 2)
OK = Verdict(Stand.ALLOWED)


class Process(RunProcess):
    """A process that ends when the test says so; it notes what the test says."""

    def __init__(self, order: ChildOrder, _work: Path) -> None:
        self.order = order
        self.newest: Note | None = None
        self.has_ended = False
        self.retired = self.withdrawn = self.left = self.killed = 0

    @property
    def pid(self) -> int:
        return 1

    def retire(self) -> None:
        self.retired += 1

    def withdraw(self) -> None:
        self.withdrawn += 1

    def leave(self) -> None:
        self.left += 1

    def kill(self) -> None:
        self.killed += 1

    def note(self) -> Note | None:
        return self.newest

    def ended(self) -> Note | None:
        return self.newest if self.has_ended else None

    def end(self, doing: Doing, reason: str = "", reports: int = 0) -> None:
        self.newest, self.has_ended = Note(doing, 0.0, 4, reports, reason), True


class House:
    def __init__(self, work: Path) -> None:
        self.started = list[Process]()
        self.run = SupervisedRun(ONE, work, COMMANDS, VerdictLog(COMMANDS), self._start)

    def _start(self, order: ChildOrder, work: Path) -> Process:
        self.started.append(Process(order, work))
        return self.started[-1]

    def look(self, now: float, order: ChildOrder | None = ORDER, verdict: Verdict = OK) -> None:
        self.run.judge(ONE, verdict, None, "heart:client")
        self.run.follow(order, now)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "work")


def test_an_allowed_run_has_one_process(house: House) -> None:
    for now in range(5):
        house.look(now)
    [process] = house.started
    assert process.order == ORDER
    assert (process.left, process.retired) == (0, 0)


def test_a_run_that_is_no_longer_allowed_is_withdrawn_from_once(house: House) -> None:
    house.look(0.0)
    house.look(1.0, None, Verdict(Stand.DENIED, "a person denied it"))
    house.look(1.5, None, Verdict(Stand.DENIED, "a person denied it"))
    assert (house.started[0].withdrawn, house.started[0].left, house.started[0].killed) == (1, 0, 0)
    assert house.run.shown().state == "leaving"
    house.started[0].end(Doing.LEFT)
    house.look(2.0, None, Verdict(Stand.DENIED, "a person denied it"))
    shown = house.run.shown()
    assert (shown.state, shown.reason) == ("denied", "a person denied it")
    assert len(house.started) == 1


def test_code_that_keeps_its_process_from_leaving_is_killed(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.look(0.0)
    for now in (1.0, 5.0, 10.9):
        house.look(now, None, Verdict(Stand.REFUSED, "the policy does not allow it"))
    assert (house.started[0].withdrawn, house.started[0].killed) == (1, 0)
    house.look(11.0, None, Verdict(Stand.REFUSED, "the policy does not allow it"))
    assert house.started[0].killed == 1
    house.look(11.5, None, Verdict(Stand.REFUSED, "the policy does not allow it"))
    killed = "run heart-1: the agent kills its process, which has not ended in 10 s"
    assert caplog.messages.count(killed) == 1, "also if it cannot end at once"


def test_another_policy_counts_after_the_round(house: House) -> None:
    house.look(0.0)
    other = replace(ORDER, policy=SitePolicy(minimum_cohort=4))
    house.look(1.0, other)
    assert (house.started[0].retired, house.started[0].left) == (1, 0)
    house.started[0].end(Doing.LEFT, "the agent asked")
    house.look(2.0, other)
    house.look(3.5, other)
    assert [one.order for one in house.started] == [ORDER, other]


@pytest.mark.parametrize(("doing", "left"), [(Doing.WAITING, 1), (Doing.HELD_UP, 1), (Doing.TRAINING, 0)])
def test_a_process_that_the_coordinator_has_sent_away_for_hours_does_not_keep_an_old_policy(
    house: House, doing: Doing, left: int
) -> None:
    house.look(0.0)
    other, [process] = replace(ORDER, policy=SitePolicy(minimum_cohort=4)), house.started
    process.newest = Note(doing, 0.0)
    for now in (1.0, 8.0, 15.5):
        house.look(now, other)
        assert (process.retired, process.left) == (1, 0)
    house.look(16.0, other)
    assert (process.retired, process.left) == (1, left)


def test_failures_are_tried_again_less_and_less_often_and_said_once(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    starts, now = list[float](), 0.0
    while now < 3000.0:
        house.look(now)
        if len(house.started) > len(starts):
            starts.append(now)
            house.started[-1].end(Doing.FAILED, "no data")
        now += 1.0
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    assert pauses[:4] == [3.0, 5.0, 9.0, 17.0], "2 s, doubled, from the look after the failure"
    assert max(pauses) == RETRY.longest_s + 1
    assert [record.message.startswith("run heart-1 failed: no data") for record in caplog.records] == [True]
    assert (house.run.shown().state, "umbel site allow heart-1 --state /srv/umbel" in house.run.shown().reason) == (
        "failed",
        True,
    )


def test_the_coordinator_may_know_that_a_process_does_not_run_and_not_why_nor_how_often(house: House) -> None:
    house.look(0.0)
    assert house.run.absence() == Absence("its process at the site is starting", may_come=True)
    house.started[-1].newest = Note(Doing.WAITING, 0.0)
    assert house.run.absence() is None
    for now in (1.0, 10.0):
        house.started[-1].end(Doing.FAILED, "patient 4711 has no scan")
        house.look(now)
        assert house.run.absence() == Absence(NOT_RUNNING, may_come=True)
        house.look(now + 5.0)
        assert house.run.absence() == Absence(NOT_RUNNING, may_come=True), "it is starting again"
        house.started[-1].newest = Note(Doing.TRAINING, 0.0)
        assert house.run.absence() is None
    house.look(20.0, None, Verdict(Stand.DENIED, "denied; to take part: …", "a person at the site denied it"))
    assert house.run.absence() == Absence("a person at the site denied it", False)
    house.run.unlist(21.0)
    assert house.run.absence() is None


def test_a_new_decision_tries_at_once(house: House) -> None:
    house.look(0.0)
    house.started[0].end(Doing.FAILED, "no data")
    house.look(1.0)
    house.run.judge(ONE, OK, SiteDecision.about(ONE, True, 5.0), "heart:client")
    house.run.follow(ORDER, 1.0)
    assert len(house.started) == 2


def test_after_a_report_the_pauses_begin_anew(house: House) -> None:
    now = 0.0
    for n, reports in enumerate((0, 0, 0, 1), 1):
        house.look(now := now + 100.0)
        assert len(house.started) == n
        house.started[-1].end(Doing.FAILED, "no data", reports)
        house.look(now := now + 1.0)
    house.look(now + RETRY.first_s)
    assert len(house.started) == 5
    assert house.run.shown().reports == 1


def test_a_run_that_is_over_has_no_process_and_leaves_nothing_on_disk(house: House, tmp_path: Path) -> None:
    (tmp_path / "work" / "models").mkdir(parents=True)
    house.look(0.0)
    house.started[0].end(Doing.OVER, "finished: all 6 rounds are committed", 6)
    for now in (1.0, 100.0):
        house.look(now)
    assert len(house.started) == 1
    assert not (tmp_path / "work").exists()
    shown = house.run.shown()
    assert (shown.state, shown.reason, shown.reports) == ("finished", "all 6 rounds are committed", 6)
    house.run.unlist(101.0)
    assert house.run.is_over


def unlisted(house: House) -> None:
    house.run.unlist(10.0)


@pytest.mark.parametrize("change", [unlisted])
def test_a_process_that_does_not_learn_that_its_run_is_over_is_told(
    house: House, change: Callable[[House], None]
) -> None:
    house.look(0.0)
    change(house)
    house.run.follow(None, 11.0)
    assert house.started[0].left == 0, "its own question is answered at once, with how the run ended"
    house.run.follow(None, 15.0)
    assert house.started[0].left == 1
    house.started[0].end(Doing.LEFT)
    house.run.follow(None, 16.0)
    assert (house.run.shown().state, house.run.is_over) == ("over", True)


def test_a_run_made_again_with_other_content_is_no_longer_over(house: House) -> None:
    house.look(0.0)
    house.started[0].end(Doing.OVER, "stopped: enough")
    house.look(1.0)
    house.run.judge(CHANGED["run_file_sha256"], OK, None, "heart:client")
    house.run.follow(ORDER, 2.0)
    assert len(house.started) == 2


def test_a_machine_that_cannot_start_a_process_fails_this_run_only(tmp_path: Path) -> None:
    def no_more(_order: ChildOrder, _work: Path) -> RunProcess:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    run = SupervisedRun(ONE, tmp_path, COMMANDS, VerdictLog(COMMANDS), no_more)
    run.judge(ONE, OK, None, "heart:client")
    run.follow(ORDER, 0.0)
    assert not run.is_alive
    shown = run.shown()
    assert shown.state == Doing.FAILED
    assert "cannot be started (Resource temporarily unavailable)" in shown.reason
