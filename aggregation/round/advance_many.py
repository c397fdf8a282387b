"""Many events at once: what `advance` makes of one after another, in time that grows with their number, not its square.

A state is never changed, so each report that counts makes a new map of all that count. Where thousands come in a row,
those of them that cannot end the round are put into one map together.
"""

from collections.abc import Sequence
from dataclasses import replace

from umbel.aggregation.plans.round import CoverageFloor
from umbel.aggregation.round.machine import accepted_answer, advance, as_accepted
from umbel.aggregation.round.states import Accepted, Command, Event, Fold, Reported, RoundState, Training
from umbel.aggregation.types import ClientId

_NO_FLOOR = CoverageFloor()


def advance_all(state: RoundState, events: Sequence[Event]) -> tuple[RoundState, tuple[Command, ...]]:
    """The state after all of them, and the commands of each in turn."""
    commands, done = list[Command](), 0
    while done < len(events):
        together = _that_count(state, events, done)
        if isinstance(state, Training) and len(together) > 1:
            state, following = _accept_all(state, together)
            done += len(together)
        else:
            state, following = advance(state, events[done])
            done += 1
        commands.extend(following)
    return state, tuple(commands)


def _that_count(state: RoundState, events: Sequence[Event], first: int) -> dict[ClientId, Reported]:
    """The next reports, by client, as far as each counts and none of them can close the round.

    That is, as far as draws are missing to the target, and somebody is left to wait for. With coverage to be met, or
    with masked updates, more is to be looked at, so each report goes its own way.
    """
    found = dict[ClientId, Reported]()
    if not isinstance(state, Training) or state.exchange is not None or state.plan.coverage != _NO_FLOOR:
        return found
    n_missing, n_open = state.target - state.n_reported, state.n_open
    for i in range(first, len(events)):
        event = events[i]
        if not isinstance(event, Reported) or event.now >= state.closes_at or event.client not in state.cohort:
            break
        if event.client in state.accepted or event.client in state.declined or event.client in found:
            break
        n_missing, n_open = n_missing - state.cohort[event.client].draws, n_open - 1
        if n_missing <= 0 or n_open <= 0:
            break
        found[event.client] = event
    return found


def _accept_all(state: Training, reports: dict[ClientId, Reported]) -> tuple[Training, tuple[Command, ...]]:
    new: dict[ClientId, Accepted] = {client: as_accepted(state, event) for client, event in reports.items()}
    commands = list[Command]()
    for client, report in new.items():
        if state.plan.task.makes_model:
            commands.append(Fold(client, report.weight))
        commands.append(accepted_answer(client))
    return replace(state, accepted={**state.accepted, **new}), tuple(commands)
