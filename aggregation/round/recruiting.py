"""A round's first state: it waits for clients until a cohort can be drawn."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from umbel.aggregation.messages import Outcome
from umbel.aggregation.round.cohort import Choice, Member, able_of, choose
from umbel.aggregation.round.second_sum import Past, choose_again
from umbel.aggregation.round.states import (
    Abandoned,
    Answer,
    Applied,
    Declined,
    Discard,
    Event,
    Gathered,
    Hurried,
    Invite,
    Outage,
    Recruiting,
    Reported,
    Resumed,
    SecureEnd,
    SecureSide,
    Silent,
    Spoiled,
    Spoke,
    Step,
    Stopped,
    Tick,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.secagg.turns import Exchange
from umbel.aggregation.types import ClientId


def recruit(state: Recruiting, event: Event) -> Step:
    """The state that follows while clients check in, and the commands. A full cohort begins the training."""
    match event:
        case Gathered(now) if now < state.not_before:
            return state, ()
        case Gathered():
            return _gather(state, event)
        case Stopped(now, reason):
            return _abandon_unopened(state, now, reason)
        case Hurried():
            return replace(state, is_hurried=True), ()
        case Resumed(now=now) | Outage(now=now):
            return replace(state, since=max(now, state.since)), ()
        case Reported(client=client):
            return state, (uninvited(client),)
        case Tick() | Spoke() | Declined() | Applied() | Silent() | Spoiled():
            return state, ()
        case _:
            assert_never(event)


def _gather(state: Recruiting, event: Gathered) -> Step:
    """Begin with a cohort of the clients that wait, or show for whom the round waits, and how long."""
    candidates = _without(event.candidates, state.excluded)
    missing: tuple[ClientId, ...] = ()
    ends_at: float | None = None
    if event.expected is not None and not (state.before or state.is_hurried):
        here = {one.client for one in able_of(state.plan, candidates)}
        missing, ends_at = event.expected.missing(here, event.now), event.expected.ends_at(here)
    choice = _choose(state, event, candidates, ends_at)
    state = replace(state, missing=missing, waits_until=ends_at)
    if choice.cohort is None:
        return _go_without(state, event.now, choice.why)
    return _begun(state, event, choice, choice.cohort), (Invite(tuple(choice.cohort)),)


def _choose(state: Recruiting, event: Gathered, candidates: Sequence[Candidate], ends_at: float | None) -> Choice:
    """`ends_at`: when the round no longer waits for a full cohort; None: the plan's patience says so."""
    waited_s = math.inf if state.is_hurried else event.now - state.since
    avoid = frozenset(state.avoid)
    if not state.before:
        return choose(state.plan, candidates, waited_s, avoid, None if ends_at is None else ends_at - event.now)
    past = Past(state.before.opened, avoid, frozenset(state.before.liars), event.removed)
    return choose_again(state.plan, candidates, waited_s, past)


def _begun(state: Recruiting, event: Gathered, choice: Choice, cohort: Mapping[ClientId, Member]) -> Training:
    opened_at, secure = max(event.now, state.since), None
    if state.plan.secure:
        secure = SecureSide(Exchange.begun(event.random, opened_at, state.plan.window_s))
    if secure and state.before:
        secure = replace(secure, opened=state.before.opened, why=choice.why, needs_all=choice.needs_all)
    return Training(state.plan, cohort, opened_at, passed_over=choice.passed_over, secure=secure)


def _without(candidates: tuple[Candidate, ...], excluded: tuple[ClientId, ...]) -> tuple[Candidate, ...]:
    if not excluded:
        return candidates
    names = frozenset(excluded)
    return tuple(candidate for candidate in candidates if candidate.client not in names)


def _go_without(state: Recruiting, now: float, why: str) -> Step:
    """Wait for a cohort; abandon an evaluation whose patience has run out."""
    if state.plan.task.may_be_left_out and now >= state.since + state.plan.patience_s:
        return _abandon_unopened(state, now, f"there is nobody to measure the model: {why}")
    return replace(state, why=why), ()


def _abandon_unopened(state: Recruiting, now: float, reason: str) -> Step:
    ended_at = max(now, state.since)
    secure = SecureEnd(opened=state.before.opened) if state.before else SecureEnd()
    ended = Abandoned(state.plan, reason, {}, {}, {}, opened_at=ended_at, closed_at=ended_at, secure=secure)
    return ended, (Discard(reason),)


def uninvited(client: ClientId) -> Answer:
    return Answer(client, Outcome.SURPLUS, "this client is not in the round's cohort")
