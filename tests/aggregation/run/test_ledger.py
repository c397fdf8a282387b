"""What an ended attempt's record tells of the data: how much was asked, in and left out, and what was not covered."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.plans.round import CoverageFloor, RoundPlan, Weighting
from umbel.aggregation.reports import MaskedInput, WorkDone
from umbel.aggregation.round import states as machine
from umbel.aggregation.round.coverage import Gap
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import (
    Abandoned,
    Accepted,
    Closing,
    Gathered,
    Recruiting,
    Reported,
    RoundState,
    SecureEnd,
    Tick,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.derived_metrics import derived_metrics
from umbel.aggregation.run.ledger import Book, Ending, MemberFacts, client_records, live_round, round_record
from umbel.aggregation.run.quantiles import Quantiles
from umbel.aggregation.run.records import Fate, RoundRecord
from umbel.aggregation.types import ClientId, RunId

NORTH, SOUTH, NOWHERE = (ClientId(name) for name in ("north", "south", "nowhere"))
FLOOR = CoverageFloor(0.9, (NORTH, NOWHERE), ("ward",))
PLAN = RoundPlan(
    RunId("demo"), 1, 1, 3, 1, 1.0, 60.0, Weighting.SAMPLES, 1000, 64.0, seed=7, coverage=FLOOR, tuned="from 80 clients"
)
WAITING = (
    Candidate(NORTH, 800, "hospital"),
    Candidate(SOUTH, 100, "ward"),
    Candidate(ClientId("w1"), 50, "ward"),
    Candidate(ClientId("w2"), 50, "ward"),
)


def opened() -> Training:
    state, _ = advance(Recruiting(PLAN, since=0.0), Gathered(100.0, WAITING))
    assert isinstance(state, Training)
    return state


def book(state: Training) -> Book:
    members = {client: MemberFacts(member.sample_count) for client, member in state.cohort.items()}
    return Book(members, state.opened_at, heard_at=lambda _client: 160.0)


def told(state: RoundState, of: Training) -> RoundRecord:
    assert isinstance(state, Closing | Abandoned)
    return round_record(
        state, client_records(state, book(of)), of.opened_at, Ending(1, None, state.reason, 161.0, model_bytes=1234)
    )


def without_north() -> tuple[Training, RoundRecord]:
    """Everybody of the cohort but `north` reports; then the window is over."""
    training = opened()
    state: RoundState = training
    for client in sorted(training.cohort.keys() - {NORTH}):
        state, _ = advance(state, Reported(110.0, client, WorkDone(10, 1, 1, "0" * 64)))
    state, _ = advance(state, Tick(160.0))
    return training, told(state, training)


def test_a_record_tells_how_much_data_was_asked_in_and_left_out() -> None:
    training, record = without_north()
    asked = sum(member.sample_count for member in training.cohort.values())
    assert len(training.cohort) == 3
    assert NORTH in training.cohort
    assert (record.samples_selected, record.samples_left_out) == (asked, 800)
    assert record.samples_in == asked - 800
    assert record.samples_share == pytest.approx((asked - 800) / asked)
    assert (record.passed_over, record.samples_passed_over) == (1, 1000 - asked)


def test_a_record_tells_what_is_not_covered_and_why() -> None:
    _, record = without_north()
    assert [gap.what for gap in record.uncovered] == ["the share of samples", "site north", "site nowhere"]
    why = "had not reported: the window of 60 s is over with 2 reports"
    assert record.uncovered[1] == Gap("site", "north", why, 800)
    assert not any(gap.may_close for gap in record.uncovered)
    assert record.reason.endswith("; not covered: the share of samples, site north, site nowhere")


def test_a_record_tells_the_window_it_had_and_each_clients_tier() -> None:
    training, record = without_north()
    assert (record.window_s, record.over_selection, record.tuned) == (60.0, 1.0, "from 80 clients")
    assert (record.target, record.minimum) == (training.plan.target, training.plan.minimum)
    assert (record.open_s, record.model_bytes) == (60.0, 1234)
    tiers = {client.client: client.tier for client in record.clients}
    assert tiers == {client: member.tier for client, member in training.cohort.items()}
    assert {client.fate for client in record.clients if client.client == NORTH} == {Fate.RELEASED}


def test_an_attempt_that_never_opened_asked_for_nothing() -> None:
    stopped, _ = advance(Recruiting(PLAN, since=0.0), machine.Stopped(5.0, "enough"))
    record = told(stopped, replace(opened(), cohort={}))
    assert (record.samples_selected, record.samples_share, record.open_s) == (0, 0.0, 0.0)


def test_an_open_round_says_what_it_still_waits_for() -> None:
    training = opened()
    live = live_round(training, book(training), waiting=0, now=101.0)
    assert live is not None
    assert live.why == "0 of 3 reports are in; coverage waits for the share of samples, site north, tier ward"
    one = replace(training, plan=replace(training.plan, target=1, coverage=CoverageFloor()))
    alone = live_round(one, book(one), waiting=0, now=101.0)
    assert alone is not None
    assert alone.why == "0 of 1 report is in"


def test_an_open_round_counts_the_reports_that_can_come_where_fewer_clients_than_its_target_are_asked() -> None:
    plan = replace(PLAN, target=5, coverage=CoverageFloor())
    training = replace(opened(), plan=plan)
    live = live_round(training, book(training), waiting=0, now=101.0)
    assert live is not None
    assert live.why == "0 of 3 reports are in; only 3 clients were asked, and the target is 5 reports"
    state, _ = advance(training, Reported(110.0, NORTH, WorkDone(10, 1, 1, "0" * 64)))
    assert isinstance(state, Training)
    live = live_round(state, book(state), waiting=0, now=111.0)
    assert live is not None
    assert live.why.startswith("1 of 3 reports is in; only 3 clients")


@pytest.mark.parametrize(
    ("silent_s", "says"),
    [(4.0, "has not reported yet"), (45.0, "has not reported yet; nothing was heard of it for 45.0 s")],
)
def test_an_open_round_says_of_whom_nothing_is_heard(silent_s: float, says: str) -> None:
    """A round that needs all of its clients waits for a dead one: the operator must see which one to start again."""
    training = opened()
    live = live_round(training, book(training), waiting=0, now=160.0 + silent_s)
    assert live is not None
    assert {client.reason for client in live.clients} == {says}


def fates_of(blamed: Mapping[ClientId, str], heard_at: float) -> dict[str, tuple[Fate, str]]:
    """Of a round that had closed and was abandoned at 170, with these to blame."""
    state: RoundState = opened()
    assert isinstance(state, Training)
    cohort = state.cohort
    for client in cohort:
        state, _ = advance(state, Reported(110.0, client, WorkDone(10, 1, 1, "0" * 64)))
    state, _ = advance(state, machine.Spoiled(170.0, "the sum cannot be unmasked", blamed))
    assert isinstance(state, Abandoned)
    members = {client: MemberFacts(member.sample_count) for client, member in cohort.items()}
    records = client_records(state, Book(members, 100.0, heard_at=lambda _client: heard_at))
    return {one.client: (one.fate, one.reason) for one in records}


def test_who_is_to_blame_for_an_abandoned_round_is_told_so_though_its_report_was_in() -> None:
    told = fates_of({NORTH: "it has dealt wrong shares"}, heard_at=169.0)
    assert told.pop(NORTH) == (Fate.RELEASED, "it has dealt wrong shares")
    assert set(told.values()) == {(Fate.RELEASED, "the round was abandoned: the sum cannot be unmasked")}


def test_who_refused_the_sum_of_a_round_that_was_abandoned_has_declined_though_its_report_was_in() -> None:
    training = opened()
    ended = Abandoned(
        training.plan,
        "too few have signed",
        training.cohort,
        {client: machine.Accepted(1, WorkDone(10, 1, 1, "0" * 64)) for client in training.cohort},
        {},
        100.0,
        170.0,
        secure=SecureEnd(refused={NORTH: "the clients differ by one alone"}),
    )
    told = {one.client: (one.fate, one.reason) for one in client_records(ended, book(training))}
    assert told.pop(NORTH) == (Fate.DECLINED, "the clients differ by one alone")
    assert set(told.values()) == {(Fate.RELEASED, "the round was abandoned: too few have signed")}


def test_who_is_to_blame_and_was_silent_is_lost() -> None:
    told = fates_of({NORTH: "it had not revealed shares in time"}, heard_at=120.0)
    assert told[NORTH] == (Fate.LOST, "silent for 50.0 s when the round ended; it had not revealed shares in time")


def test_a_record_tells_how_long_clients_say_they_trained_and_how_fast_their_updates_went() -> None:
    training = opened()
    one, other, silent = sorted(training.cohort)
    state: RoundState = training
    says_more = WorkDone(10, 1, 1, "0" * 64, train_s=7.5, upload_bytes_per_s=2e5)
    for client, work in ((one, says_more), (other, WorkDone(10, 1, 1, "0" * 64))):
        state, _ = advance(state, Reported(110.0, client, work))
    state, _ = advance(state, Tick(160.0))
    found = {client.client: (client.train_s, client.upload_bytes_per_s) for client in told(state, training).clients}
    assert found == {one: (7.5, 2e5), other: (0.0, None), silent: (None, None)}


# --- counts -----------------------------------------------------------------------------------------------------------

NUMBERS = st.lists(st.integers(0, 1000), min_size=4, max_size=4).map(tuple)


def after_reports(works: Sequence[WorkDone], *, keeps_metrics: bool = False) -> RoundRecord:
    """The record of a round that these clients of its cohort have closed."""
    training = opened()
    state: RoundState = training
    for client, work in zip(sorted(training.cohort), works, strict=True):
        state, _ = advance(state, Reported(110.0, client, work))
    assert isinstance(state, Closing)
    of = replace(book(training), keeps_metrics=keeps_metrics)
    return round_record(
        state, client_records(state, of), 100.0, Ending(1, "0" * 64, state.reason, 161.0, model_bytes=1)
    )


@given(numbers=st.lists(NUMBERS, min_size=3, max_size=3))
def test_a_records_counts_are_exact_sums_and_its_figures_those_of_the_sums(numbers: list[tuple[int, ...]]) -> None:
    works = [
        WorkDone(
            10,
            1,
            1,
            "0" * 64,
            metrics={"loss": 0.5},
            counts={"confusion": one},
            evaluation_counts={"deaths": one[:1]},
            evaluation_sample_count=5,
        )
        for one in numbers
    ]
    record = after_reports(works)
    total = tuple(sum(one[i] for one in numbers) for i in range(4))
    assert record.counts == {"confusion": total}
    assert record.evaluation_counts == {"deaths": total[:1]}
    assert record.metrics == {"loss": 0.5, **derived_metrics({"confusion": total})}
    assert record.evaluation == {}
    assert all(not one.metrics and not one.evaluation for one in record.clients)


def test_with_per_site_metrics_each_client_has_its_own_figures() -> None:
    confusions = [(8, 0, 2, 10), (1, 1, 1, 1), (0, 0, 0, 5)]
    works = [
        WorkDone(10, 1, 1, "0" * 64, metrics={"loss": float(i)}, counts={"confusion": one})
        for i, one in enumerate(confusions)
    ]
    record = after_reports(works, keeps_metrics=True)
    assert record.metrics["confusion.sensitivity"] == 9 / 12
    found = [one.metrics for one in record.clients]
    assert [one["loss"] for one in found] == [0.0, 1.0, 2.0]
    assert [one.get("confusion.sensitivity") for one in found] == [0.8, 0.5, None]
    assert all(one.evaluation == {} for one in record.clients)


def test_a_reported_mean_does_not_hide_the_figure_of_the_same_name() -> None:
    works = [WorkDone(10, 1, 1, "0" * 64, metrics={"confusion.accuracy": 1.0}, counts={"confusion": (0, 1, 1, 0)})] * 3
    assert after_reports(works).metrics["confusion.accuracy"] == 0.0


# --- from client to client --------------------------------------------------------------------------------------------


def test_a_record_says_how_metrics_differ_between_clients_and_names_the_worst() -> None:
    works = [
        WorkDone(
            10 * (i + 1),
            1,
            1,
            "0" * 64,
            metrics={"loss": float(loss)},
            evaluation={"accuracy": loss / 8},
            evaluation_sample_count=5,
            counts={"confusion": (loss, 0, 2, 10)},
        )
        for i, loss in enumerate((2, 7, 5))
    ]
    record = after_reports(works)
    first, second, third = (one.client for one in record.clients)
    assert record.metric_quantiles["loss"] == Quantiles(3, 2.0, first, 2.0, 5.0, 7.0, 7.0, second)
    assert record.metric_quantiles["confusion.sensitivity"].least == 0.5
    assert record.evaluation_quantiles == {"accuracy": Quantiles(3, 0.25, first, 0.25, 0.625, 0.875, 0.875, second)}
    assert record.metric_quantiles.keys() == record.metrics.keys()
    assert third not in {one.least_client for one in record.metric_quantiles.values()}


def test_a_client_drawn_often_counts_once_among_the_quantiles_as_any_other_does() -> None:
    plan = replace(PLAN, weighting=Weighting.PROPORTIONAL, coverage=CoverageFloor(), target=8, minimum=2)
    training, _ = advance(Recruiting(plan, since=0.0), Gathered(100.0, WAITING))
    assert isinstance(training, Training)
    assert max(member.draws for member in training.cohort.values()) > 1
    state: RoundState = training
    for place, client in enumerate(sorted(training.cohort)):
        state, _ = advance(state, Reported(110.0, client, WorkDone(10, 1, 1, "0" * 64, metrics={"loss": float(place)})))
    record = told(state, training)
    assert record.metric_quantiles["loss"].clients == len(training.cohort) < 8


def test_the_record_of_masked_reports_says_nothing_of_single_clients() -> None:
    training = opened()
    masked = {client: Accepted(1, MaskedInput("0" * 64, "A" * 86 + "==")) for client in training.cohort}
    closing, _ = advance(replace(training, accepted=masked), Tick(1e9))
    record = told(closing, training)
    assert record.metric_quantiles == record.evaluation_quantiles == {}
