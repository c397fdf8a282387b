"""What [measure] asks for is in every row, and is what slow and obvious arithmetic gives."""

import itertools
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.federation.worlds import attempts_of, table
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.run.derived_metrics import derived_metrics
from umbel.aggregation.run.quantiles import quantiles
from umbel.aggregation.run.records import ClientRecord, Fate, RoundRecord
from umbel.aggregation.types import ClientId, client_name
from umbel.sim import simulate
from umbel.sim.data.data_set import DataSet
from umbel.sim.data.sets.arrays import dataset
from umbel.sim.experiment.file import experiment_of
from umbel.sim.experiment.world import make_world
from umbel.sim.federation.measures import CannotMeasure, MeasureSection, UpdateSums, of_clients
from umbel.sim.federation.rows import Row, row_of
from umbel.sim.federation.window import DeviceTime
from umbel.sim.results.findings import BestSoFar
from umbel.sim.results.frames import flat
from umbel.sim.results.quantile_plot import quantile_plot

HERE = __name__
ALL = {"train_loss": True, "updates": True, "clients": True, "groups": True, "smooth": 2}
MEASURED = table(
    fleet=None, measure=ALL, partition={"holdout": 0.3}, training={"evaluate": True}, engine={"name": "sequential"}
)
_FLOATS = st.floats(-100, 100, width=32)


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[list[list[float]], list[int], list[int]]:
    n, k = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    values = draw(st.lists(st.lists(_FLOATS, min_size=n, max_size=n), min_size=k, max_size=k))
    weights = draw(st.lists(st.integers(1, 1000), min_size=k, max_size=k))
    cuts = draw(st.lists(st.integers(0, k), max_size=3).map(sorted))
    return values, weights, cuts


@given(cohorts())
def test_figures_of_updates_are_those_of_the_definition(drawn: tuple[list[list[float]], list[int], list[int]]) -> None:
    """In whatever groups the updates come. Python's own floats, client by client, are the oracle."""
    values, weights, cuts = drawn
    sums, names = UpdateSums(len(values[0])), [ClientId(f"c{i}") for i in range(len(values))]
    for first, last in itertools.pairwise([0, *cuts, len(values)]):
        rows = torch.tensor(values[first:last]).reshape(last - first, len(values[0]))
        sums.add(names[first:last], rows, weights[first:last])
    found = sums.figures()
    assert found is not None
    total = sum(weights)
    mean = [math.fsum(w * u[j] for w, u in zip(weights, values, strict=True)) / total for j in range(len(values[0]))]
    norms, length = [math.hypot(*u) for u in values], math.hypot(*mean)
    squares = [w * math.dist(u, mean) ** 2 for w, u in zip(weights, values, strict=True)]
    assert list(found.norms.values()) == pytest.approx(norms)
    assert found.norm == pytest.approx(float(np.mean(norms)))
    assert found.norm_deviation == pytest.approx(float(np.std(norms)), abs=1e-5)
    assert found.spread == pytest.approx(math.sqrt(math.fsum(squares) / total), abs=1e-4)
    if length > 1e-3:
        cosines = [
            sum(a * b for a, b in zip(u, mean, strict=True)) / (n * length) if n else 0.0
            for u, n in zip(values, norms, strict=True)
        ]
        assert found.cosine == pytest.approx(float(np.mean(cosines)), abs=1e-5)
        square = math.fsum(w * n**2 for w, n in zip(weights, norms, strict=True)) / total
        assert found.dissimilarity == (pytest.approx(math.sqrt(square) / length) if len(values) > 1 else None)


def test_equal_updates_have_dissimilarity_one_and_updates_without_a_mean_have_none() -> None:
    sums, names = UpdateSums(2), [ClientId("a"), ClientId("b")]
    sums.add(names, torch.tensor([[3.0, 4.0], [3.0, 4.0]]), [1, 7])
    alike = sums.figures()
    assert alike is not None
    assert alike.dissimilarity == pytest.approx(1.0)
    sums = UpdateSums(2)
    sums.add(names, torch.tensor([[3.0, 4.0], [-3.0, -4.0]]), [5, 5])
    opposite = sums.figures()
    assert opposite is not None
    assert opposite.dissimilarity is None


def test_no_update_has_no_figures() -> None:
    assert UpdateSums(3).figures() is None


def test_every_row_has_what_is_asked_and_nothing_else_has() -> None:
    rows = list(simulate(MEASURED).rows)
    assert len(rows) == 4
    for row in rows:
        assert row["update_spread"] > 0
        assert -1 <= row["update_cosine"] <= 1
        assert row["update_dissimilarity"] >= 1
        assert 0 <= row["groups_accuracy_least"] <= row["groups_accuracy"] <= 1
        assert [one["fate"] for one in row["clients"]] == ["accepted"] * 6
        assert all(one["evaluation"].keys() == {"loss", "accuracy"} for one in row["clients"])
        norms = [one["update_norm"] for one in row["clients"]]
        assert row["update_norm"] == pytest.approx(float(np.mean(norms)))
        weights, losses = zip(*((one["sample_count"], one["metrics"]["loss"]) for one in row["clients"]), strict=True)
        assert row["train_loss"] == pytest.approx(float(np.average(losses, weights=weights)))
    plain = list(simulate({**MEASURED, "measure": {}}).rows)
    assert [one["model_sha256"] for one in plain] == [one["model_sha256"] for one in rows], "measuring changes no bit"
    assert all(one["update_norm"] is one["train_loss_all"] is one["groups_loss"] is None for one in plain)
    assert all(one["clients"] == [] and "best_accuracy" not in one for one in plain)


def test_training_loss_and_groups_are_those_of_all_clients_one_by_one() -> None:
    results = simulate(MEASURED, None)
    trial = experiment_of(MEASURED).trials[0]
    made = make_world(trial, Path(), None)
    meter = made.world.meter
    assert meter is not None
    for attempt, row in zip(attempts_of(MEASURED), results.trials[0].rows, strict=True):
        meter.load(attempt.model.layout.full_state(attempt.model.published))
        everyone = np.arange(30)
        data, held = made.world.population.data_of(everyone), made.world.population.holdout_of(everyone)
        assert held is not None
        scores = [meter.of(data.of(i)) for i in range(30)]
        mean = np.average([one["loss"] for one in scores], weights=data.sizes)
        assert row.train_loss_all == pytest.approx(float(mean))
        found = [meter.of(held.of(i)) for i in range(30) if held.sizes[i]]
        assert row.groups_accuracy == pytest.approx(float(np.mean([one["accuracy"] for one in found])))
        assert row.groups_loss == pytest.approx(float(np.mean([one["loss"] for one in found])))
        assert row.groups_accuracy_least == min(one["accuracy"] for one in found)
        of_each = {client_name(i): meter.of(held.of(i)) for i in range(30) if held.sizes[i]}
        assert row.groups_quantiles == {name: asdict(one) for name, one in quantiles(of_each.items()).items()}
        assert row.groups_quantiles["accuracy"]["clients"] == len(found)


def test_rows_have_the_quantiles_of_what_clients_measured_whatever_is_asked() -> None:
    for row in simulate({**MEASURED, "measure": {"clients": True}}).rows:
        for means, by_metric in (("metrics", "train_quantiles"), ("evaluation", "evaluation_quantiles")):
            of_each = [(one["client"], one[means]) for one in row["clients"]]
            assert row[by_metric] == {name: asdict(one) for name, one in quantiles(of_each).items()}
            assert row[by_metric]["loss"]["clients"] == 6


def test_the_worst_and_the_tenth_of_the_groups_are_in_the_table_and_drawn_behind_the_mean() -> None:
    results = simulate(MEASURED, None)
    last, (point,) = results.trials[0].rows[-1], results.points
    assert point.groups_worst is not None
    assert point.groups_p10 is not None
    found = last.groups_quantiles["accuracy"]
    assert (point.groups_worst.mean, point.groups_p10.mean) == (found["least"], found["p10"])
    assert "worst group" in repr(results)
    late = results.trials[0].rows[-2:]
    assert len(results.trials[0].rows) == 4
    for which, estimate in (("least", point.late_groups_worst), ("p10", point.late_groups_p10)):
        assert estimate is not None
        values = [row.groups_quantiles["accuracy"][which] for row in late]
        assert estimate.mean == pytest.approx(float(np.mean(values)))
    assert point.late_groups_mean is not None
    means = [row.groups_accuracy for row in late if row.groups_accuracy is not None]
    assert point.late_groups_mean.mean == pytest.approx(sum(means) / 2)
    figure = quantile_plot(results)
    assert figure is not None
    (axes,) = figure.axes
    worst, mean = (line.get_ydata() for line in axes.lines)
    assert np.asarray(worst)[-1] == found["least"]
    assert np.asarray(mean)[-1] == last.groups_accuracy
    assert len(axes.collections) == 1, "the band"
    assert flat(list(results.rows)[-1])["groups_quantiles.accuracy.p10"] == found["p10"]
    assert quantile_plot(simulate(table(rounds={"count": 1}))) is None


def wards() -> DataSet:
    torch.manual_seed(3)
    names = ["big"] * 80 + ["small"] * 20
    return dataset(torch.randn(100, 4), torch.arange(100) % 3, groups=names, test_share=0.3)


def test_natural_holders_have_the_same_weight_each() -> None:
    described = table(partition=None, fleet=None, rounds={"count": 2, "target": 2}, measure={"groups": True})
    described |= {"data": {"name": f"{HERE}:wards"}, "partition": {"scheme": "natural"}, "model": {"name": "logistic"}}
    results = simulate(described)
    (run,) = results.trials
    mean = sum(one["accuracy"] for one in run.groups.values()) / 2
    assert run.rows[-1].groups_accuracy == pytest.approx(mean)
    assert results.points[0].groups_mean is not None
    assert results.points[0].groups_mean.mean == pytest.approx(mean)
    assert "mean of groups" in repr(results)


def test_groups_have_no_figures_if_no_client_has_enough_samples_to_hold_one_back() -> None:
    described = table(partition={"holdout": 0.01}, fleet=None, measure={"groups": True}, rounds={"count": 1})
    (row,) = simulate(described).trials[0].rows
    assert row.groups_loss is None
    assert row.groups_accuracy is None


def test_groups_without_held_out_data_are_refused_before_the_first_round() -> None:
    with pytest.raises(CannotMeasure, match=r"\[measure\] groups needs held-out data of each client: set holdout"):
        simulate(table(measure={"groups": True}))


@pytest.mark.parametrize(
    "codec", [{"codec": {"name": "integer"}, "secure_aggregation": {}}, {"codec": {"name": "sign"}}]
)
def test_updates_are_measured_before_codecs_and_masks(codec: dict[str, Any]) -> None:
    described = table(fleet=None, measure={"updates": True}, rounds={"count": 1, "minimum": 5})
    plain, other = (simulate({**described, **more}).trials[0].rows[0] for more in ({}, codec))
    assert plain.update_norm == other.update_norm
    assert plain.update_spread == pytest.approx(other.update_spread)


@given(st.lists(st.none() | st.floats(0, 1), max_size=12), st.integers(1, 4))
def test_best_and_smoothed_are_those_of_the_list(accuracies: list[float | None], smooth: int) -> None:
    (row,) = simulated_rows()
    best = BestSoFar(smooth)
    for n, accuracy in enumerate(accuracies, 1):
        found = best.after(replace(row, accuracy=accuracy))
        known = [one for one in accuracies[:n] if one is not None]
        assert found["best_accuracy"] == (max(known) if known else None)
        is_full = accuracy is not None and len(known) >= smooth
        assert found["smoothed_accuracy"] == (pytest.approx(float(np.mean(known[-smooth:]))) if is_full else None)


_ROWS: list[Any] = []


def simulated_rows() -> list[Any]:
    if not _ROWS:
        _ROWS.extend(simulate(table(rounds={"count": 1})).trials[0].rows)
    return _ROWS


def test_a_smoothed_target_is_reached_when_the_mean_of_the_last_models_reaches_it() -> None:
    described = table(
        rounds={"count": 12}, training={"local_epochs": 5}, target_accuracy=0.3, measure={"smooth": 3}, fleet=None
    )
    results = simulate(described)
    rows = list(results.rows)
    reached = [row["round"] for row in rows if (row["smoothed_accuracy"] or 0.0) >= 0.3]
    point = results.points[0]
    assert reached, "the target is low enough for this test"
    assert point.smoothed_rounds_to_target is not None
    assert point.rounds_to_target is not None
    assert point.smoothed_rounds_to_target.mean == reached[0] >= point.rounds_to_target.mean
    assert "to 30%, smoothed" in repr(results)


def test_a_row_has_the_sums_of_counts_and_their_figures_and_clients_have_their_own() -> None:
    work = WorkDone(
        10,
        1,
        1,
        "0" * 64,
        metrics={"loss": 0.5},
        counts={"n": (3,)},
        evaluation_counts={"confusion": (3, 0, 1, 4)},
        evaluation_sample_count=8,
    )
    record = RoundRecord(
        *("demo", 1, 1, True, "why", 1, "a" * 64, 0.0, 62.0, 3, 1, 0, 2, 10, 0, 0),
        metrics={"loss": 0.5},
        evaluation=derived_metrics(work.evaluation_counts),
        clients=(ClientRecord("a", Fate.ACCEPTED, "", 10), ClientRecord("b", Fate.LOST, "", 10)),
        counts=work.counts,
        evaluation_counts=work.evaluation_counts,
    )
    row = Row.of(record, None, 1.0, 2.0, DeviceTime())
    assert (row.train_metrics, row.counts) == ({"loss": 0.5}, {"n": (3,)})
    assert (row.evaluation["confusion.sensitivity"], row.evaluation_counts) == (0.75, {"confusion": (3, 0, 1, 4)})
    line = json.loads(json.dumps(asdict(row)))
    assert json.loads(json.dumps(asdict(row_of(line)))) == line
    trained, lost = of_clients(MeasureSection(clients=True), record, {ClientId("a"): work}, None)
    assert trained["evaluation"]["confusion.specificity"] == 1.0
    assert (lost["metrics"], lost["evaluation"]) == ({}, {})


def test_without_an_accuracy_a_row_has_the_accuracy_of_its_confusion_counts() -> None:
    record = RoundRecord(*("demo", 1, 1, True, "why", 1, "a" * 64, 0.0, 62.0, 3, 1, 0, 2, 10, 0, 0))
    figures = derived_metrics({"confusion": (3, 0, 1, 4)})
    assert Row.of(record, figures, 1.0, 2.0, DeviceTime()).accuracy == 7 / 8
    assert Row.of(record, {**figures, "accuracy": 0.25}, 1.0, 2.0, DeviceTime()).accuracy == 0.25
    assert Row.of(record, {"loss": 0.5}, 1.0, 2.0, DeviceTime()).accuracy is None
