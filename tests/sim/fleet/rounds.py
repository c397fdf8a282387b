"""Rounds of a fleet in virtual time through the real machine, with the records that a coordinator keeps of them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import Abandoned, Applied, Closing, Gathered, Recruiting, Reported, Tick, Training
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.ledger import Book, Ending, MemberFacts, client_records, round_record
from umbel.aggregation.run.records import Absent, AbsentClient, RoundRecord
from umbel.aggregation.types import ClientId, RunId, client_name, client_number
from umbel.sim.fleet.fates import CohortAsk, Fates
from umbel.sim.fleet.fleet import Fleet

SAMPLES, BATCH, STEPS = 640, 32, 40
MODEL_BYTES, UPDATE_BYTES = 4_000_000, 1_000_000
EVERY_S = 1800.0


def plan_of(number: int, attempt: int, *, target: int = 20, window_s: float = 600.0) -> RoundPlan:
    return RoundPlan(
        run=RunId("run"),
        number=number,
        attempt=attempt,
        target=target,
        minimum=max(1, target // 2),
        over_selection=1.3,
        window_s=window_s,
        weighting=Weighting.SAMPLES,
        sample_count_max=1 << 20,
        max_abs=64.0,
        seed=7,
    )


def play(
    fleet: Fleet, n_devices: int, n_rounds: int, plan: Callable[[int], RoundPlan], update_bytes: int = UPDATE_BYTES
) -> list[RoundRecord]:
    """One attempt each half hour."""
    return [_round(fleet, n_devices, plan(number), number * EVERY_S, update_bytes) for number in range(1, n_rounds + 1)]


def _round(fleet: Fleet, n_devices: int, plan: RoundPlan, now: float, update_bytes: int) -> RoundRecord:
    waiting = fleet.waiting(now, plan.number, plan.attempt, n_devices, plan.n_wanted)
    candidates = tuple(Candidate(client_name(int(device)), SAMPLES) for device in waiting)
    training, _ = advance(Recruiting(plan, now - plan.patience_s), Gathered(now, candidates))
    assert isinstance(training, Training), training
    devices = np.array(sorted(client_number(client) for client in training.cohort))
    steps = np.full(len(devices), STEPS)
    ask = CohortAsk(steps, BATCH, np.array([MODEL_BYTES]), np.array([update_bytes]), plan.window_s)
    fates = fleet.fates(devices, plan.number, plan.attempt, now, ask)
    ended = _trained(training, fates)
    clients = client_records(ended, _book(ended, fates))
    ending = Ending(plan.number, None, ended.reason, ended.closed_at, MODEL_BYTES)
    absent = np.setdiff1d(
        np.arange(n_devices), np.arange(n_devices)[fleet.presence.is_present(np.arange(n_devices), now)]
    )
    named = tuple(AbsentClient(client_name(int(device)), SAMPLES, 0.0) for device in absent[:30])
    record = round_record(ended, clients, ended.opened_at, ending)
    return replace(record, absent=Absent(len(absent), len(absent) * SAMPLES, named))


def _trained(training: Training, fates: Fates) -> Closing | Abandoned:
    state: Training | Closing | Abandoned = training
    for at in np.argsort(fates.report_s, kind="stable"):
        report_s = float(fates.report_s[at])
        if report_s >= training.plan.window_s or not isinstance(state, Training):
            break
        event = Reported(training.opened_at + report_s, client_name(int(fates.devices[at])), _work(fates, int(at)))
        moved, _ = advance(state, event)
        assert isinstance(moved, Training | Closing | Abandoned)
        state = moved
    if isinstance(state, Training):
        moved, _ = advance(state, Tick(training.closes_at))
        assert isinstance(moved, Closing | Abandoned)
        state = moved
    if isinstance(state, Closing):
        advance(state, Applied(state.closed_at, "0" * 64))
    assert not isinstance(state, Training)
    return state


def _work(fates: Fates, at: int) -> WorkDone:
    return WorkDone(
        sample_count=SAMPLES,
        steps_done=int(fates.steps_done[at]),
        steps_planned=int(fates.ask.steps[at]),
        update_sha256="0" * 64,
        train_s=float(fates.trained_s[at] - fates.fetched_s[at]),
        upload_bytes_per_s=float(fates.lines.up[at]),
    )


def _book(ended: Closing | Abandoned, fates: Fates) -> Book:
    open_s = ended.closed_at - ended.opened_at
    spent = fates.spent(open_s)
    heard: dict[ClientId, float] = {}
    members: dict[ClientId, MemberFacts] = {}
    for at, device in enumerate(fates.devices):
        client = client_name(int(device))
        reported_at = ended.opened_at + float(fates.report_s[at]) if client in ended.accepted else None
        members[client] = MemberFacts(SAMPLES, False, reported_at, int(spent.bytes_up[at]), int(spent.bytes_down[at]))
        is_silent = fates.lost_s[at] < open_s <= fates.back_s[at]
        heard[client] = ended.opened_at + float(fates.lost_s[at] if is_silent else open_s)
    return Book(members, ended.opened_at, heard.__getitem__)
