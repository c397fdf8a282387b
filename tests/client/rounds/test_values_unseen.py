"""A coordinator that chooses a bound cannot tell on which side of it a site's numbers lie: all are answered alike.

Each test is the whole client loop, against a coordinator that looks at every request, and starts the site again.
"""

import contextlib
import functools
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn

from tests.client.doubles.double import URL, Handler
from tests.client.doubles.secure_double import SecureDouble
from tests.client.test_secure_rounds import LOST_KEYS, SAMPLES, Crash, Mortal, Ward, listed, take_part
from tests.servers.waits import wait_until
from umbel.aggregation.plans.masks import NoisePlan
from umbel.aggregation.secagg.turns import after_s
from umbel.aggregation.types import AssignmentId, RunId
from umbel.client import Client, LocalPlan, TrainResult, loop
from umbel.client.errors import Alarm, BudgetSpent, ClientError, TooManyFailures, UnfitWork, WorkRefused
from umbel.client.rounds.delivery import decline
from umbel.client.rounds.shutdown import Shutdown
from umbel.client.state.failures import FAILURES_MAX, UNFIT_MAX
from umbel.client.state.store import Store
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.transport import Patience

DELTA, MAX_ABS = 1e-6, 0.5


class Site(Ward):
    """Its greatest change is what a record in its data makes it. `samples`: how many it trains on."""

    def __init__(self, change: float = 0.3, samples: int = SAMPLES) -> None:
        super().__init__()
        self.change, self.sample_count = change, samples

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.seeds.append(plan.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
            model.get_parameter("bias")[3] += self.change - 0.1
        return TrainResult(self.sample_count, 4, 4, {"loss": 0.5})


class Throwing(Site):
    """Its own code stops at a loss that is no number, or has no memory left."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.seeds.append(plan.seed)
        raise RuntimeError("the loss is nan: CUDA out of memory")


class Resizing(Site):
    """Its model has grown: there is nothing that could be sent."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        result = super().train(model, plan)
        model.register_parameter("bias", nn.Parameter(torch.zeros(11)))
        return result


class Elsewhere(Site):
    """Its model's values are where they cannot be read."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        result = super().train(model, plan)
        model.register_parameter("bias", nn.Parameter(torch.empty(10, device="meta")))
        return result


class Early(Site):
    """Its code stops when the loss no longer falls, and says so."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return replace(super().train(model, plan), steps_done=1)


class Unmeasured(Site):
    """It has no metric, nor anything else that a result should have."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        super().train(model, plan)
        return None  # type: ignore[return-value]  # a user's code


@dataclass
class Seen:
    """What the coordinator sees of a site in an attempt: its requests, how long its update is, whether it declined."""

    requests: dict[str, int]
    update_bytes: int
    declined: list[str]
    n_charged: int


def private(max_abs: float = MAX_ABS, rounds: int = 1) -> SecureDouble:
    """A coordinator with private rounds. Its peers change every weight by a quarter."""
    double = SecureDouble(Ward().model, rounds=rounds)
    noise = NoisePlan.of(1e9, 10**6, 320, least=3, colluders=1)
    double.plan = replace(double.plan, metrics=(), evaluation=(), weight_unit=1, noise=noise, bits=24)
    double.codec = replace(double.codec, clip_norm=1.0)
    double.plan = replace(double.plan, minimum_work=0.9)  # that the coordinator may choose, too
    double.max_abs = max_abs
    return double


def n_charged(directory: Path) -> int:
    return Store(directory / "state", URL).secure.spent(RunId("demo"), DELTA).n_rounds


def seen_of(directory: Path, app: Client, double: SecureDouble) -> Seen:
    """One attempt, from the check-in to its end; the site has a policy with a list and a budget."""
    directory.mkdir()
    budget = {"epsilon": 50.0} if double.plan.noise is not None else {}
    with contextlib.suppress(ClientError):  # the coordinator sees its requests, and nothing else
        take_part(directory, double, app, listed(directory, double, **budget))
    polls = "GET assignments"  # of the status: one after another, as long as the site trains and masks
    requests = Counter(line for line in double.log if line != polls)
    sizes = [len(upload.data) for upload in double.uploads.values()]
    return Seen(dict(requests), sum(sizes), list(double.declined.values()), n_charged(directory))


# --- private rounds: nothing that the data decide can be seen ---------------------------------------------------------

ODD: dict[str, Callable[[], Client]] = {
    "beyond max_abs": lambda: Site(0.7),
    "not a number": lambda: Site(math.nan),
    "infinite": lambda: Site(math.inf),
    "1e30": lambda: Site(1e30),
    "the greatest float32": lambda: Site(3.4e38),
    "more samples than the run takes": lambda: Site(samples=10**9),
    "code that throws": Throwing,
    "a model that has grown": Resizing,
    "a model that cannot be read": Elsewhere,
    "no result": Unmeasured,
    "fewer steps than the plan has": Early,
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_a_private_round_is_answered_alike_and_charged_alike_whatever_the_training_came_to(
    tmp_path: Path, odd: Callable[[], Client]
) -> None:
    """In the next round too, which begins with a question about what this one has left."""
    usual = seen_of(tmp_path / "usual", Site(0.3), private(rounds=2))
    assert usual.update_bytes
    assert (usual.declined, usual.n_charged, usual.requests["GET counts"]) == ([], 2, 1)
    assert seen_of(tmp_path / "odd", odd(), private(rounds=2)) == usual


def test_the_site_itself_is_told_what_was_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = private()
    take_part(tmp_path, double, Site(math.nan), listed(tmp_path, double, epsilon=1000.0))
    assert "the update is not finite, so zeros and noise are sent in its place" in caplog.text
    caplog.clear()
    (tmp_path / "again").mkdir()
    double = private()
    take_part(tmp_path / "again", double, Throwing(), listed(tmp_path / "again", double, epsilon=1000.0))
    assert (
        "this client has no update for this private round, so it sends only noise: the client's own "
        "code failed with RuntimeError" in caplog.text
    )
    assert "CUDA out of memory" in caplog.text, "with the traceback"


@pytest.mark.parametrize("odd", [functools.partial(Site, math.nan), Throwing, Resizing, Elsewhere, Unmeasured])
def test_under_noise_that_it_does_not_count_a_site_sends_no_zeros(tmp_path: Path, odd: Callable[[], Client]) -> None:
    """Where all others send zeros, and the noise is next to none, the sum is one site's update."""
    double = private()
    with pytest.raises(UnfitWork):
        take_part(tmp_path, double, odd(), listed(tmp_path, double))
    assert not double.uploads
    assert len(double.declined) == UNFIT_MAX


def test_however_often_training_fails_in_private_rounds_the_site_goes_on(tmp_path: Path) -> None:
    """That it leaves after some failures in a row would be an answer too."""
    double = private(rounds=FAILURES_MAX + 2)
    end = take_part(tmp_path, double, Throwing(), listed(tmp_path, double, epsilon=1000.0))
    assert (end.status, end.opened) == ("finished", FAILURES_MAX + 2)
    assert n_charged(tmp_path) == FAILURES_MAX + 2


# --- the charge -------------------------------------------------------------------------------------------------------


def test_a_private_round_is_charged_before_anything_is_trained_in_it_and_once(tmp_path: Path) -> None:
    charged = list[int]()

    class Dying(Site):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            charged.append(n_charged(tmp_path))
            raise Crash

    double = private()
    policy = listed(tmp_path, double, epsilon=50.0)
    for _ in range(2):
        with pytest.raises(Crash):
            take_part(tmp_path, double, Dying(), policy)
    assert charged == [1, 2], "the restarted site declined the attempt that was charged, and was charged for the next"
    assert double.declined == {"demo.1.1.ward-7": LOST_KEYS}
    assert take_part(tmp_path, double, Site(), policy).opened == 1
    assert n_charged(tmp_path) == 3


@pytest.mark.slow
@pytest.mark.parametrize("at", ["PUT share-keys", "POST update", "PUT report", "GET unmasking"])
def test_a_kill_at_any_step_after_it_costs_no_more_and_no_less(tmp_path: Path, at: str) -> None:
    double, mortal = private(), Mortal()
    policy = listed(tmp_path, double, epsilon=50.0)
    with pytest.raises(Crash):
        take_part(tmp_path, double, mortal, policy, wrap=mortal.dying_at(at))
    assert n_charged(tmp_path) == 1


def test_a_budget_that_is_spent_stops_the_site_before_it_trains(tmp_path: Path) -> None:
    double, app = private(rounds=3), Site()
    assert double.plan.noise is not None
    with pytest.raises(WorkRefused, match="this round would bring this site's privacy cost for the run to"):
        take_part(tmp_path, double, app, listed(tmp_path, double, epsilon=1e-6))
    assert not app.seeds
    assert not double.said


# --- other secure rounds: no bound is answered ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_coordinator_that_halves_max_abs_learns_nothing_of_the_greatest_change(tmp_path: Path) -> None:
    found = list[Seen]()
    for step in range(-6, 7):
        double = SecureDouble(Ward().model)
        double.max_abs = 0.7 * 2.0**step
        found.append(seen_of(tmp_path / str(step), Site(0.7), double))
    assert found.count(found[0]) == 13
    assert not found[0].declined


@pytest.mark.slow
def test_a_coordinator_that_bisects_the_sample_count_learns_nothing(tmp_path: Path) -> None:
    low, high, answers = 1, 1000, list[dict[str, int]]()
    while low < high:
        middle = (low + high) // 2
        double = SecureDouble(Ward().model)
        double.sample_count_max = middle
        seen = seen_of(tmp_path / str(middle), Site(samples=SAMPLES), double)
        answers.append(seen.requests)
        (one,) = double.totals
        assert one.sample_count == min(SAMPLES, middle) + 4 * min(10, middle), "only the sum has it"
        low, high = (middle + 1, high) if seen.declined else (low, middle)
    assert low == 1, "as for any other count"
    assert answers.count(answers[0]) == len(answers) >= 9


def test_what_was_cut_is_in_the_sites_own_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = SecureDouble(Ward().model)
    double.max_abs, double.sample_count_max = MAX_ABS, 100
    with caplog.at_level(logging.INFO, "umbel.client"):
        take_part(tmp_path, double, Site(0.7))
    assert "a value of the update is beyond the run's max_abs 0.5, so the whole update is shortened" in caplog.text
    assert "at most 100 of this client's 613 samples count, because the run's sample_count_max is 100" in caplog.text
    (one,) = double.totals
    assert float(one.mean.mean_slice(0, 310).max()) < 0.5, "the spike is no higher"


# --- what is still declined: how often --------------------------------------------------------------------------------


def restarted(n_times: int, start: Callable[[], object]) -> list[type[ClientError]]:
    """`restart: on-failure`: what each process ended with."""
    ends = list[type[ClientError]]()
    for _ in range(n_times):
        try:
            start()
        except ClientError as error:
            ends.append(type(error))
    return ends


def test_a_restart_does_not_begin_the_count_of_failures_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = SecureDouble(Ward().model)
    policy, app = listed(tmp_path, double), Site(math.nan)
    ends = restarted(4, lambda: take_part(tmp_path, double, app, policy))
    assert ends == [UnfitWork, TooManyFailures, TooManyFailures, TooManyFailures]
    assert len(app.seeds) == len(double.declined) == FAILURES_MAX
    assert set(double.declined.values()) == {"this client does not take part in this attempt"}
    path = next(tmp_path.rglob("failures/demo.json"))
    assert f"Then remove {path} and start the client again" in caplog.text, "said when it stops"
    asked = len(double.log)
    with pytest.raises(
        TooManyFailures, match=r"in 3 rounds of this run, .* The last failure: the update is not finite"
    ) as why:
        take_part(tmp_path, double, app, policy)
    assert str(path) in str(why.value), "and whenever it is started"
    assert len(double.log) == asked, "it says nothing"


def test_a_budget_that_is_spent_is_said_three_times_and_no_more_until_a_person_has_looked(tmp_path: Path) -> None:
    """Each time tells how a cost that the coordinator chooses compares with what is left of it."""
    double = private()
    policy = listed(tmp_path, double, epsilon=1e-6)
    ends = restarted(4, lambda: take_part(tmp_path, double, Site(), policy))
    assert ends == [BudgetSpent, TooManyFailures, TooManyFailures, TooManyFailures]
    assert len(double.declined) == FAILURES_MAX
    assert set(double.declined.values()) == {
        "this site's privacy budget does not allow this round; the site's log has the numbers"
    }


class Waits(Shutdown):
    """Notes how long the client is away before it asks for work again; leaves after the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = list[float]()

    def wait(self, seconds: float) -> None:
        if seconds >= 0.5:
            self.seconds.append(seconds)
        if len(self.seconds) == 2:
            self.request("the test has seen enough")
        super().wait(0.0)


class TooLittle(Site):
    """It ended when its time was up, if the test says that none is left."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return replace(super().train(model, plan), steps_done=1, steps_planned=10)


@pytest.mark.usefixtures("no_time_left")
def test_when_a_site_asks_again_does_not_tell_why_it_declined(tmp_path: Path) -> None:
    """That it had too little time is not of its data; that training failed may be."""
    waits = dict[str, list[float]]()
    for app in (Throwing(), Site(math.nan), TooLittle()):
        double, shutdown, directory = SecureDouble(Ward().model), Waits(), tmp_path / type(app).__name__
        directory.mkdir()
        take_part(directory, double, app, listed(directory, double), shutdown=shutdown)
        assert set(double.declined.values()) == {"this client does not take part in this attempt"}
        waits[type(app).__name__] = shutdown.seconds
    assert waits == {"Throwing": [1.0, 2.0], "Site": [1.0, 2.0], "TooLittle": [1.0, 2.0]}


@pytest.mark.usefixtures("no_time_left")
def test_how_long_a_refusal_is_tried_does_not_tell_why_it_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that answers none sees it: each is tried for some time after the round's window."""
    told = list[tuple[str, float]]()

    def noted(coordinator: CoordinatorClient, assignment: AssignmentId, reason: str, patience: Patience) -> None:
        told.append((type(app).__name__, patience.until))
        decline(coordinator, assignment, reason, patience)

    monkeypatch.setattr(loop, "decline", noted)
    for app in (Throwing(), Site(math.nan), TooLittle()):
        double, directory, began = SecureDouble(Ward().model), tmp_path / type(app).__name__, time.monotonic()
        directory.mkdir()
        take_part(directory, double, app, listed(directory, double), shutdown=Waits())
        assert {name for name, _ in told} >= {type(app).__name__}
        window_s = double.run_file.rounds.window_s
        assert min(until for _, until in told) >= began + window_s + after_s(window_s)
        told.clear()


def test_a_lie_of_the_coordinator_is_told_of_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A traceback is for errors in the site's own code."""
    double = SecureDouble(Ward().model)
    double.change_offer = lambda offer: replace(offer, draws=2)
    take_part(tmp_path, double, Site(), listed(tmp_path, double), shutdown=Waits())
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert errors
    assert all("how often they were drawn" in one.getMessage() and one.exc_info is None for one in errors)


def test_once_a_person_has_removed_the_file_the_site_goes_on(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model)
    policy = listed(tmp_path, double)
    restarted(2, lambda: take_part(tmp_path, double, Throwing(), policy))
    next(tmp_path.rglob("failures/demo.json")).unlink()
    assert take_part(tmp_path, double, Site(), policy).opened == 1


def killed_after_declining(double: SecureDouble, n_times: int) -> Callable[[Handler], Handler]:
    """The process ends after each so-many-th refusal."""

    def wrap(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            answer = handler(request)
            if request.url.path.endswith("/decline") and len(double.declined) % n_times == 0:
                raise Crash
            return answer

        return handle

    return wrap


def test_a_coordinator_that_has_the_site_killed_between_failures_gains_no_more_of_them(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model)
    policy, app = listed(tmp_path, double), Throwing()
    for _ in range(FAILURES_MAX):
        with pytest.raises(Crash):
            take_part(tmp_path, double, app, policy, wrap=killed_after_declining(double, 1))
    with pytest.raises(TooManyFailures):
        take_part(tmp_path, double, app, policy)
    assert len(app.seeds) == FAILURES_MAX


def test_rounds_that_go_well_in_between_do_not_make_room_for_more_of_what_hangs_on_the_data(tmp_path: Path) -> None:
    """Two failures in a row, a good round, two more: each tells the coordinator something of the data."""

    class Sometimes(Site):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            self.change = 0.3 if len(self.seeds) % 2 else math.nan
            return super().train(model, plan)

    double, app = SecureDouble(Ward().model, rounds=20), Sometimes()
    with pytest.raises(UnfitWork):
        take_part(tmp_path, double, app, listed(tmp_path, double))
    assert len(double.declined) == UNFIT_MAX
    assert len(app.seeds) == 2 * UNFIT_MAX - 1


def test_good_rounds_in_between_make_no_room_for_more_comparisons_with_a_budget(tmp_path: Path) -> None:
    """Two rounds that are too dear, a cheap one, two more: each compares a cost with what is left."""
    failures = Store(tmp_path, URL).failures
    for _ in range(2):
        failures.count(RunId("demo"), BudgetSpent("no room", public_reason="no room"))
        failures.succeeded(RunId("demo"))
        failures.check(RunId("demo"))
    failures.count(RunId("demo"), BudgetSpent("no room", public_reason="no room"))
    failures.succeeded(RunId("demo"))
    with pytest.raises(TooManyFailures, match="its privacy budget did not allow the round"):
        failures.check(RunId("demo"))


@pytest.mark.parametrize("error", [RuntimeError("the loss is nan"), SystemExit(1)], ids=["raises", "exits"])
def test_code_that_ends_its_process_fails_like_any_other(tmp_path: Path, error: BaseException) -> None:
    """Else a service manager would start it again and again, and nobody would count."""

    class Ending(Site):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            raise error

    double = SecureDouble(Ward().model)
    with pytest.raises(UnfitWork, match=f"failed with {type(error).__name__}"):
        take_part(tmp_path, double, Ending(), listed(tmp_path, double))
    assert len(double.declined) == UNFIT_MAX


@pytest.mark.parametrize("fails", [False, True], ids=["goes well", "fails"])
def test_of_a_round_that_has_ended_nobody_hears_how_training_went(tmp_path: Path, fails: bool) -> None:
    double = SecureDouble(Ward().model, rounds=2)

    class Closed(Site):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            if self.seeds:
                return super().train(model, plan)
            double.close_round("the window is over")
            wait_until("the client hears that the round has ended", plan.told_to_stop)
            result = super().train(model, plan)
            if fails:
                raise RuntimeError("the loss is nan")
            return result

    end = take_part(tmp_path, double, Closed(), listed(tmp_path, double))
    assert (end.status, end.opened, double.declined) == ("finished", 1, {})
    assert Store(tmp_path / "state", URL).failures.of(RunId("demo")).unfit == fails, "and it counts"


@pytest.mark.slow
def test_other_failures_count_in_a_row_alone(tmp_path: Path) -> None:
    """An alarm, and a round that goes well: as often as the coordinator likes."""
    double = SecureDouble(Ward().model, rounds=3 * FAILURES_MAX)
    double.told["masked-input"] = lambda told: told[:-1] if double.attempt == 1 else told
    end = take_part(tmp_path, double, Site(), listed(tmp_path, double))
    assert (end.status, end.opened) == ("finished", 3 * FAILURES_MAX)
    assert len(double.declined) == 3 * FAILURES_MAX


def test_alarms_in_a_row_are_counted_over_restarts_too(tmp_path: Path) -> None:
    double = SecureDouble(Ward().model)
    double.told["masked-input"] = lambda told: told[:-1]
    policy = listed(tmp_path, double)
    ends = restarted(3, functools.partial(take_part, tmp_path, double, Site(), policy))
    assert ends == [Alarm, TooManyFailures, TooManyFailures]
    assert len(double.declined) == FAILURES_MAX


def test_what_the_policy_refuses_is_not_held_against_the_next_policy(tmp_path: Path) -> None:
    """It is answered before anything is trained, from what was asked alone."""
    double = SecureDouble(Ward().model)
    policy = listed(tmp_path, double)
    ends = restarted(2, lambda: take_part(tmp_path, double, Site(), replace(policy, max_parameters=300)))
    assert ends == [WorkRefused, WorkRefused]
    assert not list(tmp_path.rglob("failures/*.json"))
    assert take_part(tmp_path, double, Site(), policy).opened == 1


def test_another_run_is_not_stopped_by_it(tmp_path: Path) -> None:
    store = Store(tmp_path, URL)
    for _ in range(FAILURES_MAX):
        store.failures.count(RunId("demo"), Alarm("said two things", "said two things"))
    store.failures.check(RunId("other"))
    with pytest.raises(
        TooManyFailures,
        match=r"run 'demo': it failed 3 times in a row in secure rounds of this run. .* failure: said two",
    ):
        store.failures.check(RunId("demo"))


def test_a_damaged_count_stops_the_site(tmp_path: Path) -> None:
    store = Store(tmp_path, URL)
    store.failures.count(RunId("demo"), UnfitWork("no number"))
    path = next(tmp_path.rglob("failures/demo.json"))
    assert json.loads(path.read_bytes()) == {"in_a_row": 1, "unfit": 1, "last": "no number"}
    path.write_bytes(b"{")
    with pytest.raises(ClientError, match="is damaged; remove it and start again"):
        store.failures.check(RunId("demo"))
