"""An experiment without `[fleet]` is FedAvg as the textbook has it (McMahan et al. 2017, algorithm 1)."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.sim.federation.worlds import attempts_of, table
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.sample_order import sample_order
from umbel.aggregation.types import client_number
from umbel.client.local.batches import split_sizes
from umbel.sim import simulate
from umbel.sim.experiment.file import experiment_of
from umbel.sim.experiment.world import make_world

PLAIN = table(fleet=None, engine={"name": "sequential"}, training={"local_epochs": 2})


def fed_avg(plan: RoundPlan, start: dict[str, torch.Tensor], names: list[Any]) -> dict[str, torch.Tensor]:
    """One round of algorithm 1, written out: two epochs of SGD at each client, then the mean weighted by samples."""
    trial = experiment_of(PLAIN).trials[0]
    made = make_world(trial, Path(), None)
    assert made.world.meter is not None
    model, sums, n_all = made.world.meter.model, {name: torch.zeros_like(v) for name, v in start.items()}, 0
    for name in names:
        data = made.world.population.data_of(torch.tensor([client_number(name)]).numpy()).of(0)
        model.load_state_dict(start)
        optimizer, n = torch.optim.SGD(model.parameters(), lr=0.1), len(data)
        for epoch in range(2):
            order = torch.from_numpy(sample_order(plan.seed_of(name), epoch, n))
            for rows in torch.split(order, split_sizes(n, 10)):
                optimizer.zero_grad()
                cross_entropy(model(data.inputs[rows]), data.targets[rows]).backward()
                optimizer.step()
        n_all += n
        sums = {key: sums[key] + n * value.detach() for key, value in model.state_dict().items()}
    return {key: value / n_all for key, value in sums.items()}


def test_each_round_is_algorithm_1_of_mcmahan() -> None:
    trial = experiment_of(PLAIN).trials[0]
    start = dict(make_world(trial, Path(), None).model.published)
    attempts = attempts_of(PLAIN)
    assert len(attempts) == 4
    for attempt in attempts:
        record = attempt.record
        names = [one.client for one in record.clients]
        expected = fed_avg(trial.run.round_plan(record.round, record.attempt), start, names)
        start = dict(attempt.model.published)
        for key, value in expected.items():
            torch.testing.assert_close(start[key], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rounds": {"over_selection": 2.0, "window_s": 0.5}},
        {"override": [{"first_round": 2, "over_selection": 3.0}]},
        {"codec": {"name": "integer"}, "secure_aggregation": {}, "rounds": {"minimum": 5}, "engine": {"masks": True}},
        {"evaluation": {"every": 2, "clients": 5}, "partition": {"holdout": 0.3}, "canary": {"clients": 3}},
    ],
)
def test_nobody_is_asked_in_excess_cut_or_lost(changes: dict[str, Any]) -> None:
    """The window is shorter than any device's work, and the run file's over-selection would drop the slowest."""
    records = [one.record for one in attempts_of(table(fleet=None, **changes))]
    trained = [one for one in records if one.task.makes_model]
    assert [one.selected for one in trained] == [6] * 4
    for one in records:
        assert one.committed
        assert (one.dropped, one.partial, one.samples_left_out) == (0, 0, 0)
        assert one.open_s < 1e-6
        assert all(client.bytes_down > 0 for client in one.clients)


def test_with_an_empty_fleet_over_selection_drops_the_slowest() -> None:
    records = [one.record for one in attempts_of(table(fleet={}))]
    assert [(one.selected, one.reported) for one in records] == [(8, 6)] * 4


def test_a_key_without_effect_is_named_and_production_keeps_it() -> None:
    described = table(fleet=None, rounds={"over_selection": 1.3, "window_s": 60.0})
    results = simulate(described)
    (note,) = results.notes
    assert note.startswith("rounds.over_selection and rounds.window_s have no effect without [fleet]")
    assert note in repr(results)
    assert results.summary()["notes"] == [note]
    assert '"over_selection":1.3' in experiment_of(described).text
    assert not simulate(table(rounds={"over_selection": 1.3})).notes


def test_with_devices_the_results_say_which_way_the_model_leans() -> None:
    """The slowest of eight are those with most data. The numbers are those of the records, client by client."""
    described = table(fleet={"speed": {"spread": 0.0, "jitter": 0.0}}, partition={"sizes": {"law": "power-law"}})
    described["partition"]["sizes"]["exponent"] = 1.5
    results = simulate(described)
    records = [one.record for one in attempts_of(described)]
    counted = [one for record in records for one in record.clients if one.report_s is not None]
    others = [one for record in records for one in record.clients if one.report_s is None]
    lean = results.points[0].lean
    assert (lean.reported, lean.left_out) == (len(counted), len(others)) == (24, 8)
    assert lean.samples_in == sum(one.sample_count for one in counted)
    assert lean.samples_left_out == sum(one.sample_count for one in others)
    (words,) = results.leans
    assert words in repr(results)
    assert words.endswith("the model leans to clients with little data")
    assert results.summary()["points"][0]["lean"]["samples_in"] == lean.samples_in
    assert {"partial", "left out", "data in"} <= set(re.split(r"\s{2,}", repr(results).splitlines()[1].strip()))


def test_results_without_devices_show_no_virtual_time() -> None:
    header = repr(simulate(table(fleet=None))).splitlines()[1]
    assert "virtual time" not in header
    assert "wasted" not in header
    assert "virtual time" in repr(simulate(table()))
