"""One federated round as a state machine: `advance(state, event) -> (state, commands)`; `states.py` has the types.

```
              Gathered, enough                    target reached, window over with the
              clients wait                        minimum in, or nobody left to wait for
  Recruiting ------------------> Training ------------------------------------------> Closing --Applied--> Committed
      |                             |                                                    |
      | Stopped                     | window over below the minimum, nobody              | Spoiled (a stop does not
      v                             v left, strict coverage not met, Stopped             v undo a round that has closed)
  Abandoned                     Abandoned                                            Abandoned
```

Rules:
1. Every transition of a round's state is made here (before its cohort is drawn, in `recruiting.py`), without a clock, a
   network, a database or tensors.
2. Time arrives in the events; it never runs backward here, whatever the events say.
3. Commands are carried out in order, after the new state is durable. Each may be carried out again after a crash.
4. A message that is late, repeated or uninvited is answered, and is never an error. A repeated report gets the same
   answer, unless the round was abandoned in between.
5. The target counts *draws*: under proportional weighting a client drawn twice counts as two. The minimum counts
   *clients*, so that no model is one client's update.
6. Coverage (`coverage.py`) holds a round open past its target, never past its window; strict, it abandons the round.
   A round that has enough reports also closes when it waits only for clients of which nothing is heard
   (`Silent`). Silence is no state: while the round is open a silent client's report counts.
7. An evaluation (`RoundPlan.task`) goes the same way, with clients that did not train the model. It has no updates, so
   nothing is folded unless it is secure (then masked measurements are), and `Applied` names the model as it was. It is
   abandoned if too few clients wait when patience has run out, so that it does not delay training.
8. A canary tries a round on a few clients (`run/canary.py`). It makes no model, and closes with any number of reports,
   because missing clients are a finding too.
9. In a secure round (`Exchange`, secagg/turns.py) clients advertise and share keys while they train. A client that
   misses either phase is dropped; below the threshold the round is abandoned. Once the round has closed, the clients in
   the sum sign the list of its clients and reveal shares; if too few do, the closed round is abandoned. The clients to
   blame are named (`SecureEnd.blamed`). A client that declines to sign the list is skipped and not blamed; clients
   missing from the list are. After a sum was unmasked but not used, cohorts are restricted, and some need every client
   (`second_sum.py`).
10. A report takes as long in a cohort of 10,000 as in one of 300 (`GrowingMap`). Stored as JSON, a client takes
   240 bytes.

The coordinator and the simulator both drive this machine, and so do its tests.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar, assert_never

from umbel.aggregation.messages import Outcome
from umbel.aggregation.phrases import agreeing, counted, some
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.round.coverage import Gap, Roll, gaps, names, words
from umbel.aggregation.round.recruiting import recruit, uninvited
from umbel.aggregation.round.retry import late_for, left_out_by_themselves, not_unmasked, unheard
from umbel.aggregation.round.silence import cut_s, silent_words
from umbel.aggregation.round.states import (
    Abandoned,
    Accepted,
    Announce,
    Answer,
    Applied,
    Closing,
    Command,
    Commit,
    Committed,
    Declined,
    Discard,
    Event,
    Fold,
    Gathered,
    Hurried,
    Outage,
    Recruiting,
    Release,
    Reported,
    Resumed,
    Revealed,
    RoundState,
    SecureEnd,
    SecureSide,
    Silent,
    Spoiled,
    Spoke,
    Step,
    Stopped,
    Tick,
    Training,
    with_entries,
    with_entry,
)
from umbel.aggregation.round.weighting import weight_of
from umbel.aggregation.secagg.turns import Exchange, Phase, is_late
from umbel.aggregation.types import ClientId

_NOBODY: Mapping[ClientId, str] = {}


def advance(state: RoundState, event: Event, check: Callable[[], None] = lambda: None) -> Step:
    """The state after `event`, and the commands to carry out.

    `check` is called if a report or a message of a secure round counts, just before it does. It refuses by raising.
    """
    match state:
        case Recruiting():
            return recruit(state, event)
        case Training():
            return _train(state, event, check)
        case Closing():
            return _close(state, event, check)
        case Committed() | Abandoned():
            return state, _answer_after_the_end(state, event)
        case _:
            assert_never(state)


def advance_to_end(state: Training, events: Iterable[Event]) -> RoundState:
    """The state after these events, or after the first that ends the window: `advance` on each, without its commands.

    Much faster than that over many reports: those that cannot end the window are counted together.
    """
    coming = iter(events)
    while True:
        counted, n_certain = dict[ClientId, Accepted](), _n_certain(state)
        for event in coming:
            if not (isinstance(event, Reported) and len(counted) < n_certain and takes(state, event)):
                break
            if event.client in counted or event.client in state.declined:
                break
            counted[event.client] = _as_accepted(state, event)
        else:
            return _with_reports(state, counted)
        following, _ = advance(_with_reports(state, counted), event)
        if not isinstance(following, Training):
            return following
        state = following


def takes(state: RoundState, event: Reported) -> bool:
    """Whether `advance` will count this report."""
    return (
        isinstance(state, Training)
        and event.client in state.cohort
        and event.client not in state.accepted
        and event.now < state.closes_at
        and (not state.secure or event.client in state.secure.exchange.masked)
    )


def hears(state: RoundState, event: Spoke) -> bool:
    """Whether `advance` will count this message of a secure round."""
    match state:
        case Training(secure=SecureSide(exchange)):
            return exchange.hears(event.client, event.turn, state.cohort.keys() - state.declined.keys())
        case Closing(secure=SecureSide(exchange)):
            return exchange.hears(event.client, event.turn, state.accepted.keys())
        case _:
            return False


def refuses(state: RoundState, event: Declined) -> bool:
    """Whether `advance` will count this client's refusal to sign the list of clients in the sum."""
    match state:
        case Closing(secure=SecureSide(exchange)):
            return exchange.hears(event.client, Phase.CONSISTENCY_CHECK, state.accepted.keys())
        case _:
            return False


def next_deadline(state: RoundState, now: float = math.inf) -> float | None:
    """When the next `Tick` (or, while recruiting, `Gathered`) is due if nothing else happens.

    Recruiting after a pause has two deadlines: the end of the pause and the end of patience. `now`: skips earlier ones.
    """
    match state:
        case Recruiting():
            if now < state.not_before:
                return state.not_before
            return state.since + state.plan.patience_s if state.waits_until is None else state.waits_until
        case Training():
            return min(keys.ends_at, state.closes_at) if (keys := state.keys) else state.closes_at
        case Closing(secure=SecureSide(exchange)):
            return exchange.ends_at
        case Closing() | Committed() | Abandoned():
            return None
        case _:
            assert_never(state)


def _train(state: Training, event: Event, check: Callable[[], None]) -> Step:
    match event:
        case Reported(client=client) if client not in state.cohort:
            return state, (uninvited(client),)
        case Reported(client=client) if client in state.accepted:
            return state, (_accepted_answer(client),)
        case Reported() if takes(state, event):
            check()
            return _accept(state, event)
        case Reported(now, client) if now < state.closes_at:
            return state, (_not_masked(client),)
        case Reported(now):
            ended, commands = _settle(state, now)
            assert not isinstance(ended, Recruiting | Training), "a report is late only when the window is over"
            return ended, (*commands, *_answer_after_the_end(ended, event))
        case Spoke(now, client, turn, word) if state.secure and hears(state, event):
            check()
            return _settle(_with_exchange(state, state.secure.exchange.with_word(client, turn, word)), now)
        case Declined(now, client, reason):
            if client not in state.cohort or client in state.accepted or client in state.declined:
                return state, ()  # the first reason counts
            return _settle(replace(state, declined=with_entry(state.declined, client, reason)), now)
        case Tick(now):
            return _settle(state, now)
        case Silent(now, clients):
            return _settle_silent(state, now, clients)
        case Stopped(now, reason):
            return _abandon(state, now, reason)
        case Outage(since, now):
            away_s = max(0.0, now - max(since, state.opened_at, state.back_at))
            if state.secure:
                state = _with_exchange(state, state.secure.exchange.put_off(away_s))
            return replace(state, away_s=state.away_s + away_s, back_at=max(now, state.back_at)), ()
        case Gathered() | Spoke() | Applied() | Hurried() | Resumed() | Spoiled():
            return state, ()
        case _:
            assert_never(event)


def _accept(state: Training, event: Reported) -> Step:
    client, report = event.client, _as_accepted(state, event)
    declined = state.declined
    if client in declined:
        declined = {name: why for name, why in declined.items() if name != client}
    state = replace(state, accepted=with_entry(state.accepted, client, report), declined=declined)
    settled, commands = _settle(state, event.now)
    fold = (Fold(client, report.weight),) if state.plan.adds_up else ()
    if isinstance(settled, Abandoned):  # by this report, because no other client is left
        return settled, (*fold, *commands, *_answer_after_the_end(settled, event))
    return settled, (*fold, _accepted_answer(client), *commands)


def _with_reports(state: Training, reports: Mapping[ClientId, Accepted]) -> Training:
    """`state` with more reports that count, of clients that have neither reported nor declined."""
    return replace(state, accepted=with_entries(state.accepted, reports))


def _n_certain(state: Training) -> int:
    """How many more reports certainly do not end the window, whoever sends them.

    `_settle` waits below the target while a client is open. No report makes a gap in coverage.
    """
    is_drawn_once = state.plan.weighting is Weighting.SAMPLES
    draws_max = 1 if is_drawn_once else max(member.draws for member in state.cohort.values())
    before_target = (state.target - 1 - state.n_reported) // draws_max
    return max(0, min(before_target, state.n_open - 1))


def _as_accepted(state: Training, event: Reported) -> Accepted:
    """A report that counts, with its weight in the sum."""
    draws = state.cohort[event.client].draws
    weight = weight_of(state.plan.weighting, draws, event.work.sample_count)
    return Accepted(1 if state.secure else weight, event.work)  # a masked update carries its weight itself


def _settle(state: Training, now: float) -> Step:
    """Decide whether the round closes, is abandoned, or continues."""
    plan, n_clients = state.plan, len(state.accepted)
    is_over = now >= state.closes_at
    if plan.coverage.strict and (lost := [gap for gap in _gaps(state) if not gap.may_close]):
        return _abandon(state, now, f"strict coverage cannot be met: {words(lost)}")
    if keys := state.keys:
        return _settle_keys(state, keys, now)
    least = _least(state)
    if n_clients >= least or plan.task.tries_clients:
        return _settle_enough(state, now, is_over=is_over)
    shortfall, not_whole = f"{n_clients} of at least {counted(least, 'report')}", _not_whole(state, state.accepted)
    if is_over:
        return _abandon_short(state, now, f"{_window(state)} is over with {shortfall}{not_whole}")
    if state.n_open == 0:
        who = some([client for client, why in state.declined.items() if not is_late(why)])
        by = f"; declined by {who}" if who else ""
        return _abandon_short(state, now, f"everyone who is left has declined, with {shortfall}{not_whole}{by}")
    if state.needs_all and (out := state.declined):  # the others have time left
        without = _not_whole(state, state.cohort.keys() - out.keys())
        return _abandon(state, now, f"{some([*out])} declined, with {shortfall}{without}", out)
    return state, ()


def _least(state: Training) -> int:
    """The fewest reports, or messages of a secure round, with which the phase may end."""
    if state.needs_all:
        return len(state.cohort)
    minimum = state.plan.minimum
    return state.secure.exchange.least(minimum, len(state.cohort)) if state.secure else minimum


def _not_whole(state: Training, came: Collection[ClientId]) -> str:
    """The missing clients, in words, if the round needs all of them."""
    if not state.needs_all:
        return ""
    absent = [client for client in state.cohort if client not in came]
    return f"; {some(absent)} did not come, and sites refuse another sum over this model without any of those asked"


def _settle_keys(state: Training, exchange: Exchange, now: float) -> Step:
    """The phases while clients train: advance to the next, and drop clients that missed this one."""
    phase, plan = exchange.phase, state.plan
    waited_for, spoke = _asked_for_keys(state, exchange), exchange.who(phase)
    least, not_whole = _least(state), _not_whole(state, spoke)
    is_over = exchange.is_over(waited_for, now)
    late = late_for(phase, waited_for, spoke) if is_over or now >= state.closes_at else {}
    out = {**state.declined, **late}  # to blame if it fails: the others were not asked, or have time left
    if now >= state.closes_at:  # no tick came for long, and the rest of the round would be after its end
        reason = f"{_window(state)} is over, and clients have not all {phase.done_words}{not_whole}"
        return _abandon(state, now, reason, out)
    if len({*spoke, *waited_for}) < least or (is_over and len(spoke) < least):
        return _abandon(state, now, f"{_too_few_spoke(phase, len(spoke), least, late, state.declined)}{not_whole}", out)
    if not is_over:
        is_enough = len(spoke) == least
        return (_with_exchange(state, exchange.hurried(now, plan.window_s)) if is_enough else state), ()
    after = replace(_with_exchange(state, exchange.next(now, plan.window_s)), declined=out)
    released = (Release(tuple(late), f"this client has not {phase.done_words} in time"),) if late else ()
    settled, commands = _settle(after, now)
    return settled, (*released, Announce(spoke), *commands)


def _asked_for_keys(state: Training, exchange: Exchange) -> list[ClientId]:
    """The clients that may have sent a message in this phase of keys, or may still send one."""
    asked = state.cohort if exchange.phase is Phase.ADVERTISE_KEYS else exchange.who(Phase.ADVERTISE_KEYS)
    return [client for client in asked if client not in state.declined]


def _too_few_spoke(
    phase: Phase, n_spoke: int, least: int, late: Collection[ClientId], before: Mapping[ClientId, str]
) -> str:
    """Why a phase of keys failed. `late`: missed it; `before`: had declined, or had missed a phase before."""
    when = " in time" if late else ""
    words = (
        f"{n_spoke} of at least {counted(least, 'client')} {agreeing(n_spoke, 'has', 'have')} {phase.done_words}{when}"
    )
    declined = [client for client, why in before.items() if not is_late(why)]
    slow = [client for client, why in before.items() if is_late(why)]
    words += f"; declined by {some(declined)}" if declined else ""
    return words + (f"; too late before: {some(slow)}" if slow else "")


def _settle_enough(state: Training, now: float, *, is_over: bool) -> Step:
    """The minimum is in, or none is needed: close, or wait for the target and for coverage that may still come."""
    plan, n_clients = state.plan, len(state.accepted)
    has_target = state.n_reported >= state.target
    if not (has_target or is_over or state.n_open == 0):
        return state, ()
    uncovered = _gaps(state)
    if not (is_over or state.n_open == 0) and any(gap.may_close for gap in uncovered):
        return state, ()
    if uncovered and plan.coverage.strict:
        return _abandon(state, now, f"strict coverage is not met at the window's end: {words(uncovered)}")
    if has_target and not is_over:
        reason = f"the target of {counted(state.target, plan.target_unit)} is in"
    elif is_over:
        reason = f"the window of {plan.window_s:g} s is over with {counted(n_clients, 'report')}"
    else:
        reason = f"{counted(n_clients, 'report is', 'reports are')} in and nobody is left to wait for"
    return _shut(state, now, Outcome.SURPLUS if has_target and not is_over else Outcome.LATE, reason, uncovered)


def _settle_silent(state: Training, now: float, silent: frozenset[ClientId]) -> Step:
    """End a wait for silent clients alone: close a round with enough reports, or end a phase of keys with enough
    messages. Silence abandons no round.

    Below the minimum nothing is gained by giving up the others' work: the next attempt would wait for the same clients.
    """
    absent, plan, n_clients = awaited(state), state.plan, len(state.accepted)
    is_back_long = now >= state.back_at + cut_s(plan.window_s)  # after an outage clients need time to return
    if now >= state.closes_at or not (absent and silent.issuperset(absent) and is_back_long):
        return state, ()
    if keys := state.keys:
        is_enough = len(keys.who(keys.phase)) >= _least(state) and not plan.coverage.strict
        return _settle_keys(state, keys.ended(now), now) if is_enough else (state, ())
    if n_clients < _least(state) and not plan.task.tries_clients:
        return state, ()
    uncovered = _gaps(state)
    if uncovered and plan.coverage.strict:
        return state, ()
    reason = f"{counted(n_clients, 'report is', 'reports are')} in, and {silent_words(sorted(absent))}"
    return _shut(state, now, Outcome.LATE, reason, uncovered)


def _window(state: Training) -> str:
    away = f", beside {state.away_s:.0f} s in which no coordinator could take reports," if state.away_s else ""
    return f"the window of {state.plan.window_s:g} s{away}"


def _gaps(state: Training) -> tuple[Gap, ...]:
    return gaps(Roll(state.plan, state.cohort, state.accepted, state.declined))


def _shut(state: Training, now: float, late: Outcome, why: str, uncovered: tuple[Gap, ...]) -> Step:
    reason = f"{why}; not covered: {names(uncovered)}" if uncovered else why
    closing = Closing(
        plan=state.plan,
        cohort=state.cohort,
        accepted=dict(state.accepted),
        missing=_missing(state, why),
        late=late,
        reason=reason,
        opened_at=state.opened_at,
        closed_at=max(now, state.opened_at),
        passed_over=state.passed_over,
        away_s=state.away_s,
        back_at=state.back_at,
        secure=state.secure,
    )
    if not state.secure:
        return closing, (*_release(state, reason), Commit())
    closing = _with_exchange(closing, state.secure.exchange.next(now, state.plan.window_s))
    return closing, (*_release(state, reason), Announce(tuple(closing.accepted)))


def _abandon_short(state: Training, now: float, reason: str) -> Step:
    """Abandon for lack of reports.

    A secure round may need more reports than its plan's minimum, which `retry.py` uses, so it blames clients here.
    """
    return _abandon(state, now, reason, _missing(state, reason) if state.secure else _NOBODY)


def _abandon(state: Training, now: float, reason: str, blamed: Mapping[ClientId, str] = _NOBODY) -> Step:
    ended = _abandoned(state, _missing(state, reason), now, reason, blamed)
    return ended, (*_release(state, reason), Discard(reason))


def _abandon_closed(state: Closing, now: float, reason: str, blamed: Mapping[ClientId, str] = _NOBODY) -> Step:
    return _abandoned(state, state.missing, now, reason, blamed), (Discard(reason),)


def _abandoned(
    state: Training | Closing, missing: Mapping[ClientId, str], now: float, reason: str, blamed: Mapping[ClientId, str]
) -> Abandoned:
    return Abandoned(
        plan=state.plan,
        reason=reason,
        cohort=state.cohort,
        accepted=dict(state.accepted),
        missing={client: blamed.get(client, why) for client, why in missing.items()},
        opened_at=state.opened_at,
        closed_at=max(now, state.closed_at if isinstance(state, Closing) else state.opened_at),
        passed_over=state.passed_over,
        away_s=state.away_s,
        secure=_secure_end(state, dict(sorted(blamed.items()))),
    )


def _secure_end(state: Training | Closing, blamed: Mapping[ClientId, str]) -> SecureEnd:
    if not state.secure:
        return SecureEnd(blamed=blamed)
    was_revealed = isinstance(state, Closing) and state.is_unmasking
    return SecureEnd(was_revealed, blamed, state.secure.exchange.refused, state.secure.opened)


def _close(state: Closing, event: Event, check: Callable[[], None]) -> Step:
    match event:
        case Applied() if state.secure and not state.is_unmasking:
            return state, ()  # no model can be made before its sum is unmasked
        case Applied(model_sha256=sha256):
            return Committed(state, sha256), ()
        case Spoke(now, client, turn, word) if state.secure and hears(state, event):
            check()
            return _settle_sum(state, state.secure.exchange.with_word(client, turn, word), now)
        case Declined(now, client, reason) if state.secure and refuses(state, event):
            return _settle_sum(state, state.secure.exchange.with_refusal(client, reason), now)
        case Tick(now, revealed) if state.secure:
            return _settle_sum(state, state.secure.exchange, now, revealed)
        case Outage(since, now) if state.secure:
            exchange = state.secure.exchange
            away_s = max(0.0, now - max(since, state.back_at, exchange.began_at))
            return replace(_with_exchange(state, exchange.put_off(away_s)), back_at=max(now, state.back_at)), ()
        case Reported():
            return state, _answer_after_the_end(state, event)
        case Spoiled(now, reason, blamed):
            return _abandon_closed(state, now, reason, {c: why for c, why in blamed.items() if c in state.cohort})
        case Gathered() | Tick() | Spoke() | Declined() | Stopped() | Hurried() | Resumed() | Outage() | Silent():
            return state, ()
        case _:
            assert_never(event)


def _settle_sum(state: Closing, exchange: Exchange, now: float, revealed: Revealed | None = None) -> Step:
    """The phases of a secure round that has closed: clients sign the list of clients in the sum, then unmask it."""
    state = _with_exchange(state, exchange)
    agreed, least = exchange.who(Phase.CONSISTENCY_CHECK), exchange.least(state.plan.minimum, len(state.cohort))
    if exchange.phase is Phase.UNMASKING:
        return (state, ()) if now < exchange.ends_at else _abandon_masked(state, agreed, least, now, revealed)
    refused = exchange.refused
    waited_for = [client for client in state.accepted if client not in refused]
    is_over = exchange.is_over(waited_for, now)
    if not is_over and len(waited_for) >= least:
        is_enough = len(agreed) == least
        return (_with_exchange(state, exchange.hurried(now, state.plan.window_s)) if is_enough else state), ()
    if len(agreed) >= least:
        return _with_exchange(state, exchange.next(now, state.plan.window_s)), (Announce(agreed), Commit())
    have = agreeing(len(agreed), "has", "have")
    when = " in time" if is_over else ""
    reason = f"{len(agreed)} of at least {counted(least, 'client')} {have} {exchange.phase.done_words}{when}"
    late = late_for(exchange.phase, waited_for, agreed) if is_over else {}  # the others have time left
    if not refused:
        return _abandon_closed(state, now, reason, late)
    blamed = {**left_out_by_themselves(state), **late}
    return _abandon_closed(state, now, f"{reason}; declined by {some([*refused])}", blamed)


def _abandon_masked(
    state: Closing, agreed: Collection[ClientId], least: int, now: float, revealed: Revealed | None
) -> Step:
    """The time to reveal shares is over. If it is unknown which shares were revealed, no client is blamed."""
    why, blamed = not_unmasked(state, agreed, revealed) if revealed is not None else ("", _NOBODY)
    why = why or f"fewer than {least} of {counted(len(agreed), 'client')} revealed shares"
    return _abandon_closed(state, now, f"the sum could not be unmasked in time: {why}", blamed)


_Under = TypeVar("_Under", Training, Closing)


def _with_exchange(state: _Under, exchange: Exchange) -> _Under:
    assert state.secure, "only a secure round has an exchange"
    return replace(state, secure=state.secure.after(exchange))


def _answer_after_the_end(state: Closing | Committed | Abandoned, event: Event) -> tuple[Command, ...]:
    if not isinstance(event, Reported):
        return ()
    client = event.client
    ended = state.closing if isinstance(state, Committed) else state
    if client not in ended.cohort:
        return (uninvited(client),)
    if isinstance(ended, Abandoned):
        return (Answer(client, Outcome.ABANDONED, f"the round was abandoned: {ended.reason}"),)
    if client in ended.accepted:
        return (_accepted_answer(client),)
    return (Answer(client, ended.late, f"this report came after the round had closed: {ended.reason}"),)


def _missing(state: Training, reason: str) -> dict[ClientId, str]:
    return dict(sorted({**unheard(_unreported(state), reason), **state.declined}.items()))


def awaited(state: Training) -> tuple[ClientId, ...]:
    """The clients whose report, or message in a phase of keys, the round waits for."""
    if keys := state.keys:
        return tuple(client for client in _asked_for_keys(state, keys) if not keys.said(client, keys.phase))
    return _unreported(state)


def _unreported(state: Training) -> tuple[ClientId, ...]:
    heard = {*state.accepted, *state.declined}
    return tuple(client for client in state.cohort if client not in heard)


def _release(state: Training, reason: str) -> tuple[Command, ...]:
    unheard = _unreported(state)
    return (Release(unheard, reason),) if unheard else ()


def _accepted_answer(client: ClientId) -> Answer:
    return Answer(client, Outcome.ACCEPTED, "the report counts")


def _not_masked(client: ClientId) -> Answer:
    return Answer(client, Outcome.SURPLUS, "this client has shared no keys in this secure round, or it is not time yet")
