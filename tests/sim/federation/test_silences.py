"""A simulated coordinator that notices lost devices ends its wait for them when the machine would."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.federation.worlds import attempts_of, table
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.cohort import Member
from umbel.aggregation.round.silence import cut_s, is_silence
from umbel.aggregation.round.states import Abandoned, Training
from umbel.aggregation.run.records import Fate, RoundRecord
from umbel.aggregation.types import ClientId, RunId
from umbel.sim.federation.window import Cohort, Played, Window
from umbel.sim.fleet.fates import CohortAsk, DeviceStage, Fates, LineRates

WINDOW_S = 600.0
OPENED_AT = 1000.0


@dataclass(frozen=True, slots=True)
class Luck:
    """One device: when its report comes, and when it is lost and back, in seconds from the opening; inf is never."""

    report_s: float
    lost_s: float = math.inf
    back_s: float = math.inf


seconds = st.integers(1, 700).map(float)
reporting = st.builds(Luck, seconds)
lost = st.builds(Luck, st.just(math.inf), seconds)
back = st.builds(lambda at, away, more: Luck(at + away + more, at, at + away), seconds, seconds, seconds)


def fates_of(lucks: list[Luck], noticed_s: float) -> Fates:
    k = len(lucks)
    ones, zeros = np.ones(k), np.zeros(k, np.int8)
    ask = CohortAsk(np.array([5]), 10, np.array([100]), np.array([100]), WINDOW_S)
    report_s = np.array([one.report_s for one in lucks])
    return Fates(
        devices=np.arange(k),
        ask=ask,
        lines=LineRates(ones, ones, ones, ones),
        fetched_s=ones,
        step_s=ones,
        trained_s=report_s,
        steps_done=np.full(k, 5),
        report_s=report_s,
        lost_s=np.array([one.lost_s for one in lucks]),
        back_s=np.array([one.back_s for one in lucks]),
        stage=np.array(
            [DeviceStage.NONE if math.isinf(one.lost_s) else DeviceStage.TRAINING for one in lucks], np.int8
        ),
        fault=zeros,
        noticed_s=noticed_s,
    )


def played(lucks: list[Luck], minimum: int, target: int, noticed_s: float) -> Played:
    names = [ClientId(f"d{rank}") for rank in range(len(lucks))]
    plan = RoundPlan(RunId("run"), 1, 1, target, minimum, 1.0, WINDOW_S, Weighting.SAMPLES, 1000, 64.0, seed=7)
    opened = Training(plan, {name: Member(1, 10) for name in names}, OPENED_AT)
    works = [WorkDone(10, 5, 5, "0" * 64) for _ in names]
    return Window(opened, Cohort(names, fates_of(lucks, noticed_s), works)).play({})


def closes_s(lucks: list[Luck], minimum: int, target: int) -> float:
    """When the window of these devices is over: each second is looked at."""
    bound_s = cut_s(WINDOW_S)
    for at in range(int(WINDOW_S)):
        reported = [one for one in lucks if one.report_s <= at]
        silent = [one for one in lucks if one.lost_s + bound_s <= at < min(one.back_s, one.report_s)]
        is_settled = len(reported) + len(silent) == len(lucks)
        if len(reported) >= target or (is_settled and len(reported) >= minimum):
            return at
    return WINDOW_S


@given(st.lists(st.one_of(reporting, lost, back), min_size=1, max_size=8), st.data())
def test_the_wait_ends_when_every_device_has_reported_or_is_silent(lucks: list[Luck], data: st.DataObject) -> None:
    target = data.draw(st.integers(1, len(lucks)))
    minimum = data.draw(st.integers(1, target))
    ended = played(lucks, minimum, target, cut_s(WINDOW_S)).ended
    assert ended.closed_at - OPENED_AT == pytest.approx(closes_s(lucks, minimum, target))
    n_in_time = sum(one.report_s <= ended.closed_at - OPENED_AT and one.report_s < WINDOW_S for one in lucks)
    assert isinstance(ended, Abandoned) is (n_in_time < minimum)


def test_by_default_lost_devices_are_waited_for_until_the_window_is_over() -> None:
    lucks = [Luck(8.0), Luck(9.0), Luck(math.inf, 3.0)]
    assert played(lucks, 2, 3, math.inf).ended.closed_at == OPENED_AT + WINDOW_S
    ended = played(lucks, 2, 3, cut_s(WINDOW_S)).ended
    assert ended.closed_at == OPENED_AT + 13.0
    assert is_silence(ended.missing[ClientId("d2")])


@pytest.mark.parametrize("masked", [False, True])
def test_a_federation_that_loses_devices_spends_seconds_and_not_windows(masked: bool) -> None:
    sections = {"secure_aggregation": {}, "codec": {"name": "integer"}} if masked else {}
    rounds = {"count": 4, "target": 8, "minimum": 3, "over_selection": 1.0, "window_s": WINDOW_S}
    dropouts = {"per_round": 0.2, "download": 0.0, "upload": 0.0, "advertise_keys": 0.0, "share_keys": 0.0}
    stages = {"consistency_check": 0.0, "unmasking": 0.0}

    def lost_rounds(notices_lost: bool) -> list[RoundRecord]:
        fleet = {"dropouts": dropouts | stages, "notices_lost": notices_lost}
        records = [one.record for one in attempts_of(table(rounds=rounds, fleet=fleet, **sections))]
        return [one for one in records if one.committed and any(client.fate is Fate.LOST for client in one.clients)]

    waited, noticed = lost_rounds(notices_lost=False), lost_rounds(notices_lost=True)
    assert waited
    assert noticed
    assert min(record.open_s for record in waited) > WINDOW_S / 10, "a phase of keys costs an eighth of the window"
    for record in noticed:
        report_s = [client.report_s for client in record.clients if client.report_s is not None]
        lost_s = [record.open_s - client.silent_s for client in record.clients if client.fate is Fate.LOST]
        assert record.open_s == pytest.approx(max(*report_s, max(lost_s) + cut_s(WINDOW_S)))
