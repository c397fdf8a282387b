"""Canaries: whom they ask, when a client passes, and what the machine and the run file make of them."""

import math
import tomllib
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.messages import Outcome
from umbel.aggregation.plans.assignment import assignment_id
from umbel.aggregation.plans.round import CoverageFloor, Task
from umbel.aggregation.reports import Probe, WorkDone
from umbel.aggregation.round.cohort import choose, spread
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import (
    Abandoned,
    Answer,
    Closing,
    Commit,
    Declined,
    Gathered,
    Recruiting,
    Reported,
    Stopped,
    Tick,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.canary import CanaryTerms, CanaryUpdate, CanaryVerdict, conclusion, judge_clients
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import CanarySection, Override, RoundsSection
from umbel.aggregation.types import BYTES_MAX, ClientId, RunId

FILES, PROBES = TypeAdapter(RunFile), TypeAdapter(Probe)
TERMS = CanaryTerms(window_s=600.0, max_abs=64.0, model_bytes=100_000_000)
FINE = Probe(60, 2.0, 2e7, 10**9, 10**9, None, None, 2.5, 2.4)
NORTH = ClientId("north")
ROUNDS = RoundsSection(9, target=8, window_s=100.0)
FILE = RunFile("demo", ROUNDS, canary=CanarySection(minimum=2))


def done(probe: Probe | None, up: float | None = None) -> WorkDone:
    return WorkDone(10, 1, 1, "ab" * 32, upload_bytes_per_s=up, probe=probe)


def verdict(probe: Probe, largest: float = 0.01, terms: CanaryTerms = TERMS, up: float | None = None) -> CanaryVerdict:
    (found,) = judge_clients(terms, {NORTH: CanaryUpdate(done(probe, up), 96_000_000, largest)}, {})
    return found


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_a_client_that_passes_says_what_was_measured() -> None:
    found = verdict(FINE, up=5e6)
    assert found.passes
    assert found.reason == (
        "a whole round takes 144 s: 2 s a step x 60 steps + 19.2 s up at 5 MB/s + 5 s down at 20 MB/s; "
        "loss 2.5 to 2.4; largest change 0.01 of max_abs 64; peak memory 1 GB"
    )


def test_a_client_that_measured_nothing_but_its_steps_passes() -> None:
    found = verdict(Probe(1, 0.0))
    assert found.passes
    assert found.reason == "a whole round takes 0 s: 0 s a step x 1 step; largest change 0.01 of max_abs 64"


@pytest.mark.parametrize(
    ("probe", "largest", "cause"),
    [
        (
            Probe(60, 12.1, download_bytes_per_s=1.25e6),
            0.01,
            "window_s of at least 968 needed, not 600: 12.1 s a step x 60 steps + 80 s down at 1.25 MB/s",
        ),
        (
            Probe(1, 0.1, is_loss_finite=False),
            0.01,
            "the training loss is not finite: check the data, then try a smaller learning_rate",
        ),
        (
            Probe(1, 0.1, first_loss=2.0, last_loss=20.1),
            0.01,
            "the training loss grows from 2 to 20.1: try a smaller learning_rate",
        ),
        (
            Probe(1, 0.1),
            40.0,
            "the largest change of one value is 40, too near to max_abs 64: raise max_abs to at least 80, or try a "
            "smaller learning_rate",
        ),
        (
            Probe(1, 0.1, memory_bytes=8_000_000_000, memory_free_bytes=700_000_000),
            0.01,
            "only 700 MB of memory are free beside its peak of 8 GB: try a smaller batch_size",
        ),
        (
            Probe(1, 0.1, device_memory_bytes=23_500_000_000, device_memory_total_bytes=24_000_000_000),
            0.01,
            "it uses 23.5 GB of the accelerator's 24 GB: try a smaller batch_size",
        ),
    ],
)
def test_each_cause_says_what_to_do(probe: Probe, largest: float, cause: str) -> None:
    found = verdict(probe, largest)
    assert found.causes == (cause,)
    assert not found.passes


@pytest.mark.parametrize(("first", "last"), [(2.0, 19.9), (0.1, 9.0), (-2.0, 15.9)])
def test_a_loss_that_grows_less_than_tenfold_passes(first: float, last: float) -> None:
    """A loss nearer to zero than 1 may grow as much as a loss of 1."""
    assert verdict(Probe(1, 0.1, first_loss=first, last_loss=last)).passes


def test_a_client_may_fail_for_several_reasons_and_hears_them_all() -> None:
    assert len(verdict(Probe(10**9, 1.0, is_loss_finite=False), largest=64.0).causes) == 3


def test_who_did_not_report_fails_with_its_own_words() -> None:
    verdicts = judge_clients(TERMS, {NORTH: CanaryUpdate(done(FINE), 1, 0.0)}, {ClientId("east"): "too many samples"})
    assert [(one.client, one.passes, one.reason[:16]) for one in verdicts] == [
        ("east", False, "too many samples"),
        ("north", True, "a whole round ta"),
    ]
    assert conclusion(verdicts, 1) == (True, "1 of 2 clients passes the canary. east: too many samples")
    assert conclusion(verdicts, 2) == (
        False,
        "1 of 2 clients passes the canary, at least 2 must. east: too many samples",
    )


def test_a_conclusion_stays_short_however_many_fail_and_whatever_they_say() -> None:
    verdicts = [CanaryVerdict(ClientId(f"c{i}"), ("x" * 500,)) for i in range(100)]
    passes, words = conclusion(verdicts, 1)
    assert not passes
    assert words.endswith("and 92 more")
    assert len(words) < 2000
    assert conclusion([], 1) == (False, "0 of 0 clients pass the canary, at least 1 must")


RATES = st.none() | st.floats(1e-6, 1e15)
BYTES = st.none() | st.integers(0, BYTES_MAX)
LOSSES = st.none() | st.floats(-1e30, 1e30)
ANY_PROBE = st.builds(
    Probe,
    st.integers(1, 1 << 62),
    st.floats(0, 1e9),
    RATES,
    *(BYTES, BYTES, BYTES, BYTES),
    *(LOSSES, LOSSES),
    st.booleans(),
)


@given(ANY_PROBE, st.floats(0, 2.0**64), RATES)
def test_every_probe_that_may_come_is_judged_with_a_cause_or_passes(
    probe: Probe, largest: float, up: float | None
) -> None:
    found = verdict(probe, largest, up=up)
    assert found.passes == (found.causes == ())
    assert all(found.causes)
    assert found.measured
    assert "nan" not in found.reason


@given(ANY_PROBE, RATES)
def test_a_window_as_long_as_is_asked_for_is_long_enough(probe: Probe, up: float | None) -> None:
    causes = verdict(probe, up=up).causes
    if not causes or not causes[0].startswith("window_s of at least "):
        return
    asked = float(causes[0].split()[4])
    longer = CanaryTerms(asked, TERMS.max_abs, TERMS.model_bytes)
    assert not any(cause.startswith("window_s") for cause in verdict(probe, terms=longer, up=up).causes)
    if asked < 2**53:
        shorter = CanaryTerms(asked - 1, TERMS.max_abs, TERMS.model_bytes)
        assert verdict(probe, terms=shorter, up=up).causes[0].startswith("window_s")


@given(ANY_PROBE, st.floats(0, 64), st.floats(0, 64))
def test_a_smaller_update_never_fails_where_a_larger_one_passes(probe: Probe, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert verdict(probe, small).passes or not verdict(probe, large).passes


@pytest.mark.parametrize(
    "field",
    [
        {"steps_full": 0},
        {"steps_full": 1 << 63},
        {"step_s": -1.0},
        {"step_s": math.nan},
        {"step_s": math.inf},
        {"download_bytes_per_s": 0.0},
        {"download_bytes_per_s": math.nan},
        {"download_bytes_per_s": math.inf},
        {"memory_bytes": -1},
        {"memory_free_bytes": BYTES_MAX + 1},
        {"device_memory_bytes": -1},
        {"first_loss": math.nan},
        {"last_loss": 1e31},
        {"is_loss_finite": "perhaps"},
    ],
)
def test_a_hostile_probe_is_refused(field: Mapping[str, object]) -> None:
    with pytest.raises(ValidationError):
        PROBES.validate_python({"steps_full": 1, "step_s": 0.1, **field})


# --- who is asked -----------------------------------------------------------------------------------------------------

FLEET = [
    *(Candidate(ClientId(f"h{i}"), 100 * i, "hospital") for i in range(1, 5)),
    *(Candidate(ClientId(f"p{i}"), i, "phone") for i in range(1, 5)),
    Candidate(ClientId("lab"), 50, "lab"),
]


def test_tiers_take_turns_and_the_largest_and_the_smallest_are_in() -> None:
    assert list(spread(FLEET, 3)) == ["h4", "lab", "p4"]
    assert list(spread(FLEET, 5)) == ["h1", "h4", "lab", "p1", "p4"]
    alike = [Candidate(ClientId(f"s{i}"), i) for i in range(1, 8)]
    assert list(spread(alike, 3)) == ["s1", "s6", "s7"]
    assert list(spread(FLEET, 3, {ClientId("p2")})) == ["h4", "lab", "p2"]


CANDIDATES = st.dictionaries(
    st.from_regex(r"[a-z]{1,3}", fullmatch=True), st.tuples(st.integers(1, 9), st.sampled_from(["", "x", "y"]))
)


@given(CANDIDATES, st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_spread_is_a_set_of_the_right_size_whatever_the_order(
    found: dict[str, tuple[int, str]], n_wanted: int, random: object
) -> None:
    candidates = [Candidate(ClientId(name), count, tier) for name, (count, tier) in found.items()]
    chosen = spread(candidates, n_wanted)
    assert len(chosen) == min(n_wanted, len(candidates))
    assert set(chosen) <= {one.client for one in candidates}
    assert set(chosen.values()) <= {1}
    random.shuffle(candidates)  # type: ignore[attr-defined]  # hypothesis has no public type for it
    assert spread(candidates, n_wanted) == chosen
    tiers = {one.tier for one in candidates}
    if n_wanted >= len(tiers):
        assert {one.tier for one in candidates if one.client in chosen} == tiers
    if candidates:
        assert max(candidates, key=lambda one: (one.sample_count, one.client)).client in chosen


def test_named_sites_are_asked_and_waited_for_until_patience_runs_out() -> None:
    file = RunFile("demo", ROUNDS, coverage=CoverageFloor(sites=(ClientId("p2"),)), canary=CanarySection())
    plan = file.first_plan(10)
    assert list(choose(plan, FLEET, 0.0).cohort or ()) == ["h4", "lab", "p2"]
    without = [one for one in FLEET if one.client != "p2"]
    assert choose(plan, without, 0.0).cohort is None
    assert list(choose(plan, without, plan.patience_s).cohort or ()) == ["h4", "lab", "p4"]


def test_who_has_failed_is_asked_again_only_where_there_are_too_few_others_or_it_is_named() -> None:
    plan = FILE.canary_plan(2)
    failed = (ClientId("h4"), ClientId("lab"))
    others = [one for one in FLEET if one.client not in failed]
    assert choose(plan, FLEET, 0.0, failed).cohort == choose(plan, others, 0.0).cohort
    everybody_but_two = [one.client for one in FLEET if one.client not in ("h1", "p3")]
    assert list(choose(plan, FLEET, 0.0, everybody_but_two).cohort or ()) == ["h1", "h4", "p3"]
    named = RunFile("demo", ROUNDS, coverage=CoverageFloor(sites=(ClientId("p2"),)), canary=CanarySection())
    assert ClientId("p2") in (choose(named.canary_plan(2), FLEET, 0.0, (ClientId("p2"),)).cohort or ())


# --- the machine ------------------------------------------------------------------------------------------------------


def opened() -> Training:
    state, commands = advance(Recruiting(FILE.first_plan(10), since=0.0), Gathered(1.0, tuple(FLEET)))
    assert isinstance(state, Training)
    assert commands
    return state


def test_a_canary_folds_nothing_and_closes_when_all_have_reported() -> None:
    state, commands = advance(opened(), Reported(2.0, ClientId("h4"), done(FINE)))
    assert commands == (Answer(ClientId("h4"), Outcome.ACCEPTED, "the report counts"),)
    state, _ = advance(state, Declined(3.0, ClientId("lab"), "no"))
    state, commands = advance(state, Reported(4.0, ClientId("p4"), done(FINE)))
    assert isinstance(state, Closing)
    assert commands[-1] == Commit()
    assert state.missing == {"lab": "no"}


def test_a_canary_closes_with_whatever_has_come() -> None:
    state, commands = advance(opened(), Tick(101.0))
    assert isinstance(state, Closing)
    assert state.reason == "the window of 100 s is over with 0 reports"
    assert commands[-1] == Commit()
    assert state.missing.keys() == {"h4", "lab", "p4"}


def test_an_operator_ends_a_canary_as_any_round() -> None:
    state, _ = advance(opened(), Stopped(2.0, "not now"))
    assert isinstance(state, Abandoned)


# --- the run file -----------------------------------------------------------------------------------------------------


def test_a_run_begins_with_its_canary_if_it_has_one() -> None:
    plan = FILE.first_plan(10)
    assert (plan.task, plan.number, plan.attempt) == (Task.CANARY, 1, 1)
    assert (plan.target, plan.minimum, plan.n_wanted, plan.window_s) == (3, 2, 3, 100.0)
    assert FILE.canary_plan(4).attempt == 4
    assert RunFile("demo", ROUNDS).first_plan(10) == RunFile("demo", ROUNDS).round_plan(1, 1)
    assert assignment_id(RunId("demo"), 1, 2, NORTH, Task.CANARY) == "demo.1.c2.north"
    slow = RunFile("demo", ROUNDS, canary=CanarySection(), override=(Override(1, 1, window_s=7.0),))
    assert (slow.first_plan(10).window_s, slow.first_plan(10).minimum) == (7.0, 2)


def test_an_empty_section_is_a_canary() -> None:
    file = FILES.validate_python(tomllib.loads('name = "demo"\nrounds = { count = 1, target = 3 }\n[canary]\n'))
    assert file.canary == CanarySection(3, None, 0.01, None, "pause")
    small = FILES.validate_python(
        {"name": "x", "rounds": {"count": 1, "target": 2, "over_selection": 1.0}, "canary": {}}
    )
    assert small.canary == CanarySection(2), "no more than round 1 asks"
    assert [CanarySection(n).n_least for n in range(1, 6)] == [1, 2, 2, 3, 3], "more than half"


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"clients": 0}, "clients must lie between 1 and 1048576, not 0"),
        ({"minimum": 0}, "minimum must lie between 1 and clients = 3"),
        ({"minimum": 4}, "minimum must lie between 1 and clients = 3"),
        ({"share": 0.0}, "share must lie between 1e-06 and 1"),
        ({"share": 1.5}, "share must lie between 1e-06 and 1"),
        ({"share": math.nan}, "share must lie between 1e-06 and 1"),
        ({"window_s": 0.0}, "window_s must lie between 0.1 and 31622400 .366 days., not 0.0"),
        ({"clients": 12}, "the canary asks 12 clients, but round 1 asks only 11; lower canary.clients"),
        ({"on_failure": "hope"}, "Input should be 'pause', 'stop' or 'widen'"),
        ({"color": "yellow"}, "Unexpected keyword argument"),
    ],
)
def test_a_canary_that_makes_no_sense_is_refused(section: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        FILES.validate_python({"name": "x", "rounds": {"count": 1, "target": 8}, "canary": section})
