"""`Results.frame` and `Results.client_rows`: rows with one value a column."""

import sys
from types import ModuleType
from typing import Any

import pytest

from tests.sim.federation.worlds import table
from umbel.sim import simulate
from umbel.sim.results.frames import flat
from umbel.sim.results.results import Results


@pytest.fixture(scope="module")
def results() -> Results:
    described = table(rounds={"count": 2}, seeds=[0, 1], measure={"clients": True})
    return simulate({**described, "sweep": {"training.proximal_mu": [0.0, 1.0]}})


@pytest.fixture
def frames_are_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for pandas, which is not among this repository's tools: a frame is the list that it is made of."""
    pandas: Any = ModuleType("pandas")
    pandas.DataFrame = list
    monkeypatch.setitem(sys.modules, "pandas", pandas)


@pytest.mark.usefixtures("frames_are_lists")
def test_a_frame_has_a_row_for_each_attempt_with_its_point_and_seed(results: Results) -> None:
    frame = results.frame()
    assert len(frame) == len(list(results.rows)) == 8
    assert {(row["point"], row["seed"]) for row in frame} == {
        (one.trial.label, one.trial.seed) for one in results.trials
    }
    assert all(not isinstance(value, dict | list | tuple) for row in frame for value in row.values())
    assert [row["test_metrics.accuracy"] for row in frame] == [row["accuracy"] for row in results.rows]


@pytest.mark.usefixtures("frames_are_lists")
def test_a_frame_of_clients_has_a_row_for_each_client_of_each_attempt(results: Results) -> None:
    frame = results.frame("clients")
    assert len(frame) == sum(len(row["clients"]) for row in results.rows) > 8
    samples = sum(row["sample_count"] for row in frame if row["fate"] == "accepted" and row["committed"])
    assert samples == sum(row["sample_count"] for row in results.rows if row["committed"])
    assert {"point", "seed", "round", "client", "metrics.loss", "update_norm"} <= frame[0].keys()


@pytest.mark.usefixtures("frames_are_lists")
def test_a_frame_of_clients_that_were_not_measured_is_refused_with_the_key() -> None:
    plain = simulate(table(rounds={"count": 1}))
    with pytest.raises(ValueError, match=r"add `clients = true` to \[measure\]"):
        plain.frame("clients")
    with pytest.raises(ValueError, match='of "rounds" or of "clients", not of \'runs\''):
        plain.frame("runs")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_without_pandas_a_sentence_says_what_to_install(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="a frame needs pandas, which is not installed; install it with pip install"):
        results.frame()


def test_tables_become_columns_and_lists_are_left_out() -> None:
    row = {"round": 1, "accuracy": None, "metrics": {"auc": 0.5, "loss": 1.0}, "clients": [{"client": "a"}]}
    assert flat(row) == {"round": 1, "accuracy": None, "metrics.auc": 0.5, "metrics.loss": 1.0}
