"""What is stored of a round is the round: head and rows, changed row by row, give the state back after any events."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.cohort import Member
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import (
    Applied,
    Declined,
    Event,
    Gathered,
    Recruiting,
    Reported,
    SecureSide,
    Spoiled,
    Stopped,
    Tick,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.secagg.turns import Exchange, Phase, Spoken
from umbel.aggregation.types import ClientId, RunId
from umbel.server.store.round_rows import (
    ClientFacts,
    accepted_of,
    changed_columns,
    head_of,
    spoken_of,
    state_of,
    with_head,
    with_rows,
)

CLIENTS = tuple(ClientId(f"c{i}") for i in range(5))
PLAN = RoundPlan(RunId("demo"), 1, 1, 3, 2, 1.5, 50.0, Weighting.PROPORTIONAL, 100, 64.0, seed=3)
clients, times = st.sampled_from(CLIENTS), st.floats(0, 60)
works = st.builds(
    lambda n, done, loss: WorkDone(n, done, 4, "0" * 64, metrics={"loss": loss}),
    st.integers(1, 100),
    st.integers(1, 4),
    st.floats(-1e30, 1e30),
)
everybody = tuple(Candidate(client, 10 + i, tier="ward" if i else "") for i, client in enumerate(CLIENTS))
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Reported, times, clients, works),
    st.builds(Reported, times, clients, works),
    st.builds(Declined, times, clients, st.text(min_size=1, max_size=9)),
    st.builds(Tick, times),
    st.builds(Stopped, times, st.just("enough")),
    st.builds(Applied, times, st.just("f" * 64)),
    st.builds(Spoiled, times, st.just("false shares"), st.dictionaries(clients, st.text(min_size=1, max_size=9))),
)


@dataclass
class Table:
    """The assignments' rows, as a database would hold them."""

    rows: dict[ClientId, dict[str, Any]] = field(default_factory=dict)

    def write(self, changed: dict[ClientId, dict[str, object]]) -> None:
        for client, columns in changed.items():
            self.rows.setdefault(client, {"declined": None, "missing": None}).update(columns)

    def read(self, clients: set[ClientId]) -> list[ClientFacts]:
        return [self._row(client, self.rows[client]) for client in sorted(clients)]

    def _row(self, client: ClientId, row: dict[str, Any]) -> ClientFacts:
        member = Member(row["draws"], row["sample_count"], row["tier"])
        return ClientFacts(client, member, accepted_of(row["weight"], row["work"]), row["declined"], row["missing"])


@given(st.lists(events, max_size=12), st.integers(0, 12))
def test_head_and_rows_are_the_state_after_any_events(happened: list[Event], left_at: int) -> None:
    """`left_at`: when another replica looked last, which then catches up with what has changed since."""
    table, state = Table(), advance(Recruiting(PLAN, since=0.0), Gathered(0.0, everybody))[0]
    table.write(changed_columns(Recruiting(PLAN, since=0.0), state))
    known, unseen = state, set[ClientId]()
    for index, event in enumerate(happened):
        after, _ = advance(state, event)
        changed = changed_columns(state, after)
        table.write(changed)
        unseen |= changed.keys()
        state = after
        if index == left_at:
            known, unseen = state, set()
    head = head_of(state)
    assert state_of(head, table.read(set(table.rows))) == state
    assert with_rows(with_head(head, known), table.read(unseen)) == state


def test_a_report_changes_one_row_and_a_small_head() -> None:
    crowd = tuple(Candidate(ClientId(f"phone-{i}"), 10) for i in range(400))
    plan = RoundPlan(RunId("demo"), 1, 1, 256, 200, 1.2, 50.0, Weighting.SAMPLES, 100, 64.0, seed=3)
    before, _ = advance(Recruiting(plan, since=0.0), Gathered(0.0, crowd))
    assert isinstance(before, Training)
    client = next(iter(before.cohort))
    after, _ = advance(before, Reported(1.0, client, WorkDone(10, 4, 4, "0" * 64)))
    assert list(changed_columns(before, after)) == [client]
    assert len(head_of(after)) < 2000


def test_who_has_refused_a_sum_stands_in_its_row_and_what_was_stored_before_has_nobody_that_did() -> None:
    before = Exchange.begun(bytes(48), 0.0, 60.0).with_word(CLIENTS[0], Phase.CONSISTENCY_CHECK, "signed")
    after = before.with_refusal(CLIENTS[1], "not with so few")
    cohort = dict.fromkeys(CLIENTS, Member(1, 10))
    state = Training(PLAN, cohort, 0.0, secure=SecureSide(before))
    changed = changed_columns(state, replace(state, secure=SecureSide(after)))
    assert list(changed) == [CLIENTS[1]]
    spoken = spoken_of(str(changed[CLIENTS[1]]["spoken"]))
    assert spoken == Spoken(refused="not with so few")
    read = with_rows(state, [ClientFacts(CLIENTS[1], Member(1, 10), spoken=spoken)])
    assert read == replace(state, secure=SecureSide(after))
    assert spoken_of('{"keys": "k", "shares": "s", "agreed": "a"}') == Spoken("k", "s", "a", refused="")


def test_an_attempt_that_was_stored_before_anybody_was_blamed_is_read_with_nobody_to_blame() -> None:
    state, _ = advance(Recruiting(PLAN, since=0.0), Stopped(1.0, "enough"))
    head = json.loads(head_of(state))
    assert head.pop("blamed") == head.pop("refused") == {}
    assert state_of(json.dumps(head), []) == state
