"""The error of a simulation, figure by figure."""

from dataclasses import replace

import pytest

from tests.aggregation.run.test_trace import DONE, LOST, RECORD
from umbel.aggregation.run.records import Fate
from umbel.aggregation.run.trace import trace_of
from umbel.sim.recorded.asked_again import FigureError, compare

RECORDED = trace_of([RECORD, replace(RECORD, round=4, open_s=37.5, committed=False)])


def rows(*, other: bool) -> dict[str, FigureError]:
    late = replace(DONE, client="late", report_s=99.0, fate=Fate.RELEASED)
    partly = replace(DONE, client="partly", report_s=30.0, fate=Fate.PARTIAL)
    simulated = [replace(RECORD, open_s=50.0, bytes_up=75, clients=(DONE, LOST, late, partly), selected=4)]
    return {row.what: row for row in compare(RECORDED, [trace_of(simulated) if other else RECORDED])}


def test_a_run_is_without_error_beside_itself() -> None:
    assert {row.relative for row in rows(other=False).values()} == {0.0, None}


def test_figures_are_means_and_quantiles_over_attempts_and_clients() -> None:
    found = {what: (row.recorded, row.simulated.mean) for what, row in rows(other=True).items()}
    assert found["open, mean"] == (25.0, 50.0)
    assert found["open, median"] == (25.0, 50.0)
    assert found["committed"] == (0.5, 1.0)
    assert found["clients asked"] == (2.0, 4.0)
    assert found["reports in"] == (1.0, 2.0)
    assert found["partial reports"] == (0.0, 1.0)
    assert found["drop-outs: asked and not in"] == (1.0, 2.0)
    assert found["lost or declined"] == (1.0, 1.0)
    assert found["report after, median client"] == (12.5, 30.0)
    assert found["bytes up"] == (50.0, 75.0)


def test_an_error_is_relative_to_what_was_recorded() -> None:
    found = rows(other=True)
    assert found["bytes up"].relative == pytest.approx(0.5)
    assert found["partial reports"].relative is None
