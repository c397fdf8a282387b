"""A coordinator that leaves one site the time to train, and the others next to none, so that the sum is that one's.

What all sign has the round's window; what is left of it when a client is asked, and when the model arrives, the
coordinator chooses for each client alone. The whole client runs here, against such a coordinator in memory.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.client.doubles.double import Handler
from tests.client.doubles.secure_double import PEERS, SecureDouble, plans
from tests.client.test_secure_rounds import SAMPLES, Hasty, Ward, listed, remembered, take_part
from umbel.aggregation.plans.masks import NoisePlan
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.client import Client, LocalPlan, RunEnd, SitePolicy, TorchClient, TrainResult
from umbel.client.errors import UnfitWork
from umbel.client.rounds.shutdown import Shutdown
from umbel.client.state.failures import UNFIT_MAX

STRICTEST = {
    "cohort_change": "refuse",
    "retrain_after_release": False,
    "share_sample_count": False,
}
TOLD = "this client does not take part in this attempt"


class Patient(Shutdown):
    """Waits for nothing, and leaves when it has declined so many attempts."""

    def __init__(self, declines: int = 2) -> None:
        super().__init__()
        self._left = declines

    def wait(self, seconds: float) -> None:
        self._left -= seconds >= 1  # a client that has declined is away for a second or more
        if self._left <= 0:
            self.request("the test has seen enough")
        super().wait(0.0)


class Starving(SecureDouble):
    """`left_s`: of the window, as it says to this client; `keeps_model_s`: for how long it keeps the model."""

    def __init__(self, model: nn.Module, window_s: float, training: TrainingSection) -> None:
        super().__init__(model, window_s=window_s)
        self.run_file = RunFile("demo", RoundsSection(1, target=1, window_s=window_s), training=training)
        self.left_s: float | None = None
        self.keeps_model_s = 0.0

    def _assignment(self, client: str) -> dict[str, Any]:
        whole = super()._assignment(client)
        return whole if self.left_s is None else whole | {"window_s": self.left_s}

    def _model(self, request: Any) -> Any:
        time.sleep(self.keeps_model_s)
        return super()._model(request)


class Hospital(TorchClient):
    """A site with the ready trainer. `steps`: done and planned, of each training."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(7)
        data = TensorDataset(torch.randn(64, 30, generator=draw), torch.randint(0, 10, (64,), generator=draw))
        super().__init__(nn.Linear(30, 10), nn.CrossEntropyLoss(), data, device="cpu")
        self.steps: list[tuple[int, int]] = []

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        result = super().train(model, plan)
        self.steps.append((result.steps_done, result.steps_planned))
        return result


def no_policy(tmp_path: Path, double: SecureDouble) -> SitePolicy | None:
    return None


def default_policy(tmp_path: Path, double: SecureDouble) -> SitePolicy | None:
    return listed(tmp_path, double)


def strictest_policy(tmp_path: Path, double: SecureDouble) -> SitePolicy | None:
    return listed(tmp_path, double, **STRICTEST)


POLICIES = [no_policy, default_policy, strictest_policy]


def starve(
    tmp_path: Path, double: Starving, app: Client, policy: SitePolicy | None, shutdown: Shutdown | None = None
) -> RunEnd:
    return take_part(tmp_path, double, app, policy, shutdown=shutdown or Patient())


def nothing_was_sent(tmp_path: Path, double: SecureDouble, end: RunEnd) -> None:
    assert (end.reports, end.masked, end.opened) == (0, 0, 0)
    assert not double.uploads
    assert not double.totals
    assert not {phase for _, phase in double.said} & {"consistency-check", "unmasking"}
    assert not remembered(tmp_path), "no sum can have an update of it"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_site_that_is_told_that_little_time_is_left_says_nothing(
    tmp_path: Path, policy: Callable[[Path, SecureDouble], SitePolicy | None]
) -> None:
    app = Hospital()
    double = Starving(app.model, 60.0, TrainingSection(local_steps=1500))
    double.left_s = 1.0
    end = starve(tmp_path, double, app, policy(tmp_path, double))
    nothing_was_sent(tmp_path, double, end)
    assert not double.said, "not even keys"
    assert not app.steps, "and it has trained for nobody"
    assert all("1 s left of the round's 60 s window" in told for told in double.declined.values())


def test_half_of_the_window_is_enough_and_a_little_less_is_not(tmp_path: Path) -> None:
    for left_s, taken in ((30.0, True), (29.999, False)):
        double = Starving(Ward().model, 60.0, TrainingSection())
        double.left_s = left_s
        end = starve(tmp_path / str(left_s), double, Ward(), None)
        assert (end.opened == 1) is taken


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_site_that_gets_the_model_late_sends_nothing(
    tmp_path: Path, policy: Callable[[Path, SecureDouble], SitePolicy | None]
) -> None:
    """However fast or slow this machine is: the model comes when a fifth of the window is left, or less."""
    app = Hospital()
    double = Starving(app.model, 1.0, TrainingSection(local_steps=1))
    double.keeps_model_s = 0.8
    end = starve(tmp_path, double, app, policy(tmp_path, double), Patient(1))
    nothing_was_sent(tmp_path, double, end)
    assert not app.steps


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_site_that_has_time_for_some_of_its_steps_sends_nothing(
    tmp_path: Path, policy: Callable[[Path, SecureDouble], SitePolicy | None], caplog: pytest.LogCaptureFixture
) -> None:
    """The window that all sign is as short: what remains is that less than all of the work was done."""
    app = Hospital()
    double = Starving(app.model, 1.0, TrainingSection(local_steps=1 << 30))
    end = starve(tmp_path, double, app, policy(tmp_path, double), Patient(1))
    nothing_was_sent(tmp_path, double, end)
    [(done, planned)] = app.steps
    assert 1 <= done < planned == 1 << 30
    assert set(double.declined.values()) == {TOLD}, "not how much was done, nor that it was too little"
    [said] = [record for record in caplog.records if "steps were done" in record.message]
    assert said.levelno == logging.WARNING
    for word in (
        f"{done} of {planned} planned steps",
        "minimum_work = 1",
        "window_s",
        "fewer local steps",
        "security.md",
    ):
        assert word in said.message


class Partial(Ward):
    """Says that it has done so many of its steps."""

    def __init__(self, done: int, planned: int) -> None:
        super().__init__()
        self._done, self._planned = done, planned

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return TrainResult(super().train(model, plan).sample_count, self._done, self._planned, {"loss": 0.5})


def asked_for(floor: float | None) -> SecureDouble:
    """A coordinator whose run has this floor; its own, by default."""
    double = SecureDouble(Ward().model)
    if floor is not None:
        double.codec, double.plan = plans(len(PEERS) + 1, minimum_work=floor)
    return double


FLOORS: dict[str, tuple[float | None, float | None, int, bool]] = {
    "neither says less: all": (None, None, 1000, True),
    "neither says less: one step is missing": (None, None, 999, False),
    "the run alone says less": (0.5, None, 999, False),
    "the site alone says less": (None, 0.5, 999, False),
    "both say a half: a half": (0.5, 0.5, 500, True),
    "both say a half: one step less": (0.5, 0.5, 499, False),
    "the run's is greater": (0.75, 0.5, 749, False),
    "the run's is met": (0.75, 0.5, 750, True),
    "the site's is greater": (0.5, 0.75, 749, False),
    "the site's is met": (0.5, 0.75, 750, True),
}


@pytest.mark.parametrize(("of_run", "of_site", "done", "is_sent"), FLOORS.values(), ids=FLOORS.keys())
def test_the_greater_floor_counts(
    tmp_path: Path, of_run: float | None, of_site: float | None, done: int, is_sent: bool
) -> None:
    double = asked_for(of_run)
    end = take_part(
        tmp_path, double, Partial(done, 1000), listed(tmp_path, double, minimum_work=of_site), shutdown=Patient()
    )
    if is_sent:
        assert (end.opened, double.declined) == (1, {})
        assert [one.steps_done for one in double.totals] == [done + 4 * len(PEERS)]
    else:
        nothing_was_sent(tmp_path, double, end)


def test_a_site_without_a_policy_gives_all_of_its_work_or_nothing(tmp_path: Path) -> None:
    double = asked_for(0.5)
    end = take_part(tmp_path, double, Partial(999, 1000), shutdown=Patient())
    nothing_was_sent(tmp_path, double, end)


@pytest.mark.usefixtures("no_time_left")
def test_a_site_that_is_always_too_slow_stays_and_asks_ever_more_seldom(tmp_path: Path) -> None:
    class Leaving(Hasty):
        def wait(self, seconds: float) -> None:
            if len(self.waits) == 4 and seconds >= 1:
                self.request("enough")
            super().wait(seconds)

    double, shutdown = asked_for(None), Leaving()
    end = take_part(tmp_path, double, Partial(1, 1000), shutdown=shutdown)
    assert end.status == "interrupted", "it is no failure, three of which would end the client"
    assert shutdown.waits == [1, 2, 4, 8, 16]


def test_training_that_ends_early_of_itself_is_a_failure_for_its_data_may_have_ended_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss that no longer falls, say. The coordinator sees each refusal, so there are three and no more."""
    double = asked_for(None)
    with pytest.raises(UnfitWork, match="train ended after 1 of 1000 planned steps, but a masked update needs 1000"):
        take_part(tmp_path, double, Partial(1, 1000), shutdown=Hasty())
    assert list(double.declined.values()) == [TOLD] * UNFIT_MAX
    assert "do all steps of the plan, or go on until plan.should_stop() gives a reason" in caplog.text


@pytest.mark.usefixtures("no_time_left")
def test_the_two_sums_of_which_one_lacks_the_work_of_all_but_one_are_not_opened(tmp_path: Path) -> None:
    """The same clients twice over one model, which sites allow: in the first sum all are starved. There is none."""
    double = asked_for(None)
    end = take_part(tmp_path, double, Partial(1, 1500), listed(tmp_path, double), shutdown=Patient(5))
    nothing_was_sent(tmp_path, double, end)
    assert len(double.declined) == 5, "every attempt, whatever it is called"


def private(floor: float, window_s: float = 60.0) -> Starving:
    """A coordinator whose rounds have noise, and this floor."""
    double = Starving(Ward().model, window_s, TrainingSection())
    noise = NoisePlan.of(1e9, 10**6, 320, least=3, colluders=1)
    changes = {"metrics": (), "evaluation": (), "weight_unit": 1, "noise": noise, "bits": 24, "minimum_work": floor}
    double.plan = replace(double.plan, **changes)  # type: ignore[arg-type]  # what replace takes is known to the tests
    double.codec = replace(double.codec, clip_norm=1.0)
    return double


@pytest.mark.parametrize(
    ("of_run", "of_site", "is_sent"), [(0.0, None, True), (0.5, None, False), (0.0, 0.5, False), (0.4, 0.4, True)]
)
def test_in_a_round_with_noise_a_step_is_enough_unless_a_floor_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, of_run: float, of_site: float | None, is_sent: bool
) -> None:
    """Noise that a site counts covers what it sends, whatever the others contribute. Below a named floor it sends noise
    alone.
    """
    double = private(of_run)
    policy = listed(tmp_path, double, minimum_work=of_site, epsilon=1e5)
    end = take_part(tmp_path, double, Partial(4 if is_sent and of_run else 3, 10), policy, shutdown=Patient())
    assert end.opened == 1
    assert not double.declined
    assert ("sends only noise" not in caplog.text) is is_sent


@pytest.mark.slow
def test_nor_does_it_matter_there_when_the_model_comes(tmp_path: Path) -> None:
    double = private(0.0, window_s=1.0)
    double.keeps_model_s = 0.8
    take_part(tmp_path, double, Partial(1, 10), listed(tmp_path, double, epsilon=1e5), shutdown=Patient(1))
    assert not [told for told in double.declined.values() if "the model arrived" in told]


@pytest.mark.parametrize("policy", POLICIES)
def test_noise_that_a_site_does_not_count_takes_no_floor_away(
    tmp_path: Path, policy: Callable[[Path, SecureDouble], SitePolicy | None]
) -> None:
    """A coordinator plans next to none, and starves the site, or gives it a learning rate that leads nowhere."""
    double = private(0.0)
    assert double.plan.noise is not None
    double.plan = replace(double.plan, noise=replace(double.plan.noise, variance_per_client=2.0**-20))
    end = take_part(tmp_path, double, Partial(9, 10), policy(tmp_path, double), shutdown=Patient())
    nothing_was_sent(tmp_path, double, end)
    assert set(double.declined.values()) == {TOLD}


@pytest.mark.parametrize("policy", POLICIES)
def test_nor_the_time_that_must_be_left(
    tmp_path: Path, policy: Callable[[Path, SecureDouble], SitePolicy | None]
) -> None:
    app, double = Ward(), private(0.0, window_s=1.0)
    double.keeps_model_s = 0.8
    end = take_part(tmp_path, double, app, policy(tmp_path, double), shutdown=Patient(1))
    nothing_was_sent(tmp_path, double, end)
    assert not app.seeds, "however fast or slow this machine is: a fifth of the window is left, or less"
    assert all("the model arrived" in told for told in double.declined.values())


# --- steps that the site's own code reports ---


class Stopped(Ward):
    """Does as many steps as `says` has, and asks after each of them if it should stop."""

    def __init__(self, shutdown: Shutdown, says: TrainResult) -> None:
        super().__init__()
        self._shutdown, self._says = shutdown, says

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        super().train(model, plan)
        assert plan.should_stop() is None
        self._shutdown.request("the night is over")
        assert plan.should_stop() is not None
        return self._says


def test_one_that_was_told_to_stop_cannot_have_done_it_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double, shutdown = asked_for(None), Shutdown()
    end = take_part(tmp_path, double, Stopped(shutdown, TrainResult(SAMPLES, 10, 10)), shutdown=shutdown)
    nothing_was_sent(tmp_path, double, end)
    assert set(double.declined.values()) == {TOLD}
    assert "was told to stop but reported all 10 planned steps as done" in caplog.text


@pytest.mark.slow
def test_nor_one_that_goes_on_after_its_deadline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Late(Ward):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            while not plan.should_stop():
                time.sleep(0.01)
            return super().train(model, plan)

    double = Starving(Ward().model, 1.0, TrainingSection())
    with pytest.raises(UnfitWork):
        starve(tmp_path, double, Late(), None, Patient(9))
    assert not double.uploads
    assert "was told to stop but reported all 4 planned steps as done" in caplog.text


PLANNED: dict[str, tuple[TrainingSection, int, bool]] = {
    "as many steps as are asked": (TrainingSection(local_steps=5), 5, True),
    "one less": (TrainingSection(local_steps=5), 4, False),
    "more, for it counts finer": (TrainingSection(local_steps=5), 10, True),
    "a step for each epoch": (TrainingSection(local_epochs=3), 3, True),
    "less than that": (TrainingSection(local_epochs=3), 2, False),
}


@pytest.mark.parametrize(("asked", "n_steps", "is_sent"), PLANNED.values(), ids=PLANNED.keys())
def test_the_steps_that_it_says_were_planned_are_no_fewer_than_the_plan_has(
    tmp_path: Path, asked: TrainingSection, n_steps: int, is_sent: bool
) -> None:
    """Else a training that was cut short could say that what it has done was all that was planned."""
    double = Starving(Ward().model, 60.0, asked)
    if is_sent:
        assert starve(tmp_path, double, Partial(n_steps, n_steps), None).opened == 1
        return
    with pytest.raises(UnfitWork, match=f"steps_planned = {n_steps}, and the plan asks for {n_steps + 1} or more"):
        starve(tmp_path, double, Partial(n_steps, n_steps), None, Patient(9))
    assert not double.uploads
    assert set(double.declined.values()) == {TOLD}


def test_a_watch_that_fails_after_the_keys_does_not_cut_the_training_short(tmp_path: Path) -> None:
    """What the coordinator says of an open assignment is its word to one client, too."""
    double = asked_for(None)

    def spoil(handler: Handler) -> Handler:
        def handle(request: Any) -> Any:
            answer = handler(request)
            if request.method == "GET" and request.url.path.split("/")[-2] == "assignments":
                answer.status_code = 418
                polled.append(request.url.path)
            return answer

        return handle

    class Watched(Ward):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            until = time.monotonic() + 60
            while not polled and time.monotonic() < until:
                assert plan.told_to_stop() is None
                time.sleep(0.01)
            for _ in range(20):
                assert plan.told_to_stop() is None
                time.sleep(0.01)
            return super().train(model, plan)

    polled = list[str]()
    assert take_part(tmp_path, double, Watched(), wrap=spoil).opened == 1
    assert polled


def test_a_share_of_the_work_is_no_secure_round(tmp_path: Path) -> None:
    class Sharing(SecureDouble):
        def _assignment(self, client: str) -> dict[str, Any]:
            return super()._assignment(client) | {"share": 0.5}

    double = Sharing(Ward().model)
    with pytest.raises(Exception, match="asks for a share of the work"):
        take_part(tmp_path, double)
    assert not double.said


# --- how much a site counts ---


@pytest.mark.parametrize(
    ("most", "counted"), [(None, SAMPLES), (SAMPLES, SAMPLES), (SAMPLES - 1, SAMPLES - 1), (10, 10)]
)
def test_a_site_counts_no_more_samples_than_its_policy_has(tmp_path: Path, most: int | None, counted: int) -> None:
    double = SecureDouble(Ward().model)
    end = take_part(tmp_path, double, policy=listed(tmp_path, double, weight_max=most))
    assert end.opened == 1
    [one] = double.totals
    assert one.total_weight == one.sample_count == counted + 40, "what it weighs is what it says"
    mean = (counted * 0.75 + 40 * 0.25) / (counted + 40)
    found = one.mean.mean_slice(0, 310)
    assert float(found.mean()) == pytest.approx(mean, abs=0.02), "rounding leaves a standard deviation of 0.0013"
    assert float((found - mean).abs().max()) < 0.3, "and of 0.023 in each value"
    assert one.metrics["loss"] == pytest.approx((counted * 0.7853981633974483 + 40 * 0.5) / (counted + 40), abs=1e-6)


def test_nor_in_what_it_measures(tmp_path: Path) -> None:
    double = Starving(Ward().model, 60.0, TrainingSection(evaluate=True))
    take_part(tmp_path, double, policy=listed(tmp_path, double, weight_max=2))
    [one] = double.totals
    assert one.evaluation["accuracy"] == pytest.approx((2 * 0.5 + 16 * 0.25) / 18), "of three samples held out, two"


def test_a_round_that_closes_while_it_trains_is_over_and_not_declined(tmp_path: Path) -> None:
    """What was done until then is too little, which is no matter: nobody waits for it."""
    double = asked_for(None)

    class Closing(Ward):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            double.close_round("enough others have reported")
            until = time.monotonic() + 60
            while plan.told_to_stop() is None and time.monotonic() < until:
                time.sleep(0.01)
            return TrainResult(self.sample_count, 1, 1000)

    end = take_part(tmp_path, double, Closing())
    assert (end.status, end.reports) == ("finished", 0)
    assert not double.declined
