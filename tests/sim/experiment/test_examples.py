"""Every experiment of examples/simulate/ is one, and its rounds run."""

import gzip
import json
import os
from dataclasses import replace
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from examples.simulate.heart_optimizers import N_INPUTS, EndlessBatches, make_client
from examples.simulate.sampling_curves import courses, lines
from examples.simulate.shakespeare_roles import CharacterLstm, in_sequences
from tests.repository import ROOT
from tests.servers.real_data import real_files
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.round import Task
from umbel.client import LocalPlan
from umbel.sim import simulate
from umbel.sim.data.sets.fetch import SOURCES
from umbel.sim.data.sets.shakespeare import CHARACTERS, roles_data
from umbel.sim.engines.clients.app import ClientShare
from umbel.sim.experiment.file import Experiment, TrialSpec, read_experiment

EXAMPLES = sorted((ROOT / "examples" / "simulate").glob("*.toml"))
OF_PAPERS = (
    "fairness",
    "partial-work",
    "stale-control",
    "fedavg-2nn",
    "fedavg-cnn",
    "fedprox-paper",
    "fedopt",
    "fedopt-rates",
    "sampling",
    "sampling-shakespeare",
)  # slow
READ_BY_EXAMPLES = {"examples.simulate.shakespeare_roles:load": "shakespeare"}


def data_for(experiment: Experiment) -> Path | None:
    """The folder of its data sets, if it has any that are read from files; the test is skipped where they are not."""
    trial = experiment.trials[0]
    assert trial.data is not None
    name = READ_BY_EXAMPLES.get(trial.data.name, trial.data.name)
    folder = real_files(SOURCES[name]) if name in SOURCES else None
    phones = trial.fleet and trial.fleet.network and trial.fleet.network.phones
    if phones and not (Path(os.environ.get("UMBEL_DATA", "")) / phones).exists():
        pytest.skip(f"the data sets of UMBEL_DATA lack {phones}")
    return folder


def shortened(trial: TrialSpec) -> TrialSpec:
    """Its first round alone, with one pass or some steps."""
    run = trial.run
    training = (
        replace(run.training, local_epochs=1) if run.training.local_epochs else replace(run.training, local_steps=5)
    )
    return replace(trial, run=replace(run, rounds=replace(run.rounds, count=1), training=training))


def one_of_each(experiment: Experiment) -> tuple[TrialSpec, ...]:
    """The runs of one seed, with one of the values that `best_over` compares."""
    first = experiment.trials[0]
    return tuple(
        trial
        for trial in experiment.trials
        if trial.seed == first.seed and all(trial.point[key] == first.point[key] for key in experiment.best_over)
    )


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in OF_PAPERS else [], id=path.stem) for path in EXAMPLES],
)
def test_the_first_round_of_every_point_of_an_example_is_committed(path: Path) -> None:
    experiment = read_experiment(path)
    assert experiment.name == path.stem
    data = data_for(experiment)
    results = simulate(replace(experiment, trials=tuple(map(shortened, one_of_each(experiment)))), data=data)
    assert all(one.status is RunStatus.FINISHED for one in results.trials)
    assert all(point.accuracy is not None for point in results.points)


@pytest.mark.slow
def test_the_digits_reach_the_accuracy_that_their_file_asks_for() -> None:
    experiment = read_experiment(ROOT / "examples" / "simulate" / "digits.toml")
    results = simulate(replace(experiment, trials=tuple(one for one in experiment.trials if one.seed == 0)))
    assert len(results.points) == 2
    assert all(point.reached_target == 1 for point in results.points)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_begins_with_the_command_that_simulates_it(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert f"umbel simulate {path.relative_to(ROOT).as_posix()}" in first


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem != "digits"], ids=lambda path: path.stem)
def test_an_example_has_a_page_with_its_command_that_others_link_to(path: Path) -> None:
    """A recipe, which the front page lists, or a page of results, which theirs lists."""
    recipes, results = ROOT / "docs" / "tutorial" / "recipes", ROOT / "docs" / "explanation" / "results"
    command = f"umbel simulate {path.relative_to(ROOT).as_posix()}"
    if (recipe := recipes / f"{path.stem}.md").exists():
        assert command in recipe.read_text()
        assert f"recipes/{recipe.name}" in (ROOT / "docs" / "README.md").read_text()
        return
    pages = [page for page in results.glob("*.md") if command in page.read_text()]
    assert pages
    assert all(f"({page.name})" in (results / "README.md").read_text() for page in pages if page.name != "README.md")


def test_the_batches_of_a_hospital_go_on_in_the_next_round_where_the_last_one_ended() -> None:
    """Eleven samples in batches of four: three batches a pass, in another order in each pass."""
    batches = EndlessBatches(TensorDataset(torch.arange(11)))
    batches.batch_size, batches.seed = 4, 7
    whole: list[list[int]] = [one[0].tolist() for one in islice(batches, 9)]
    assert [len(one) for one in whole] == [4, 4, 3] * 3
    passes = [[*chain(*whole[first : first + 3])] for first in (0, 3, 6)]
    assert [sorted(one) for one in passes] == [[*range(11)]] * 3
    assert passes[0] != passes[1] != passes[2]
    batches.place = 4
    assert [one[0].tolist() for one in islice(batches, 5)] == whole[4:]


def test_a_hospital_keeps_its_place_and_its_order_over_rounds() -> None:
    data = ClientShare(TensorDataset(torch.randn(11, N_INPUTS), torch.arange(11) % 2), None)
    states = [dict[str, Any](), dict[str, Any]()]
    for state, lengths in zip(states, [(4, 3), (7,)], strict=True):
        hospital = make_client(0, 1, data)
        with torch.no_grad():
            hospital.model.load_state_dict({"linear.weight": torch.zeros(1, N_INPUTS), "linear.bias": torch.zeros(1)})
        for number, n_steps in enumerate(lengths):
            hospital.train(hospital.model, LocalPlan(steps=n_steps, batch_size=4, seed=100 + number, state=state))
        state["model"] = hospital.model.state_dict()
    assert states[0]["place"] == states[1]["place"] == 7
    assert torch.equal(states[0]["model"]["linear.weight"], states[1]["model"]["linear.weight"])


def test_the_texts_of_a_role_follow_each_other_and_each_target_is_the_next_character() -> None:
    said = "".join(CHARACTERS[10 + number % 60] for number in range(300))
    data = in_sequences(roles_data({"Lear: A": [said[:200], said[200:], "x" * 90], "Lear: B": ["y" * 100, "z" * 170]}))
    assert data.natural is not None
    assert data.natural.names == ("Lear: A", "Lear: B")
    assert [len(shard) for shard in data.natural.shards] == [3, 1]
    text = said[:200] + " " + said[200:]
    for number, row in enumerate(data.natural.shards[0].tolist()):
        first = 80 * number
        inputs, targets = (
            "".join(CHARACTERS[one] for one in part[row].tolist())
            for part in (data.samples.inputs, data.samples.targets)
        )
        assert (inputs, targets) == (text[first : first + 80], text[first + 1 : first + 81])
    assert data.test.inputs.shape == (3, 80)
    assert CharacterLstm(width=8)(data.test.inputs).shape == (3, 80, len(CHARACTERS))


def test_curves_of_how_clients_are_drawn_compare_runs_after_equally_many_samples(tmp_path: Path) -> None:
    """Of each way two runs with a seed each: one with 10 samples a round, and one with 20 that learns as fast."""
    rows = [
        {
            "point": f"weighting={weighting}, power law",
            "seed": seed,
            "round": number,
            "sample_count": each,
            "accuracy": each * number / 1000 if number % 2 else None,
        }
        for weighting, each in (("samples", 10), ("proportional", 20))
        for seed in (0, 1)
        for number in range(1, 10)
    ]
    (tmp_path / "rounds.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = courses(tmp_path)
    assert [run.samples.tolist() for run in found["power law"]["proportional"]] == [[20, 60, 100, 140, 180]] * 2
    *_, uniform, proportional, gain = (line.split(" | ") for line in lines(found))
    assert (uniform[2], proportional[2]) == ("5.0 ± 0.0", "10.0 ± 0.0")
    assert uniform[4] == proportional[4] == "9.0 ± 0.0"
    assert (uniform[5], proportional[5]) == ("10 |", "20 |")
    assert gain[2:5] == ["5.0 ± 0.0", "2.0 ± 0.0", "0.0 ± 0.0"]


@pytest.mark.slow
def test_own_clients_train_under_masks_and_the_sums_of_their_counts_give_figures() -> None:
    """The run file that also deploys them."""
    path, app = ROOT / "examples" / "own_client.toml", "examples.own_client:make_client"
    (trial,) = simulate(path, changes={"clients.app": app, "clients.count": 4, "rounds.count": 3}).trials
    assert trial.status is RunStatus.FINISHED
    assert [(row.round, row.reported) for row in trial.rows] == [(1, 4), (2, 4), (3, 4), (3, 4)]
    *_, last, measured = trial.rows  # the clients measure the last model, too
    assert measured.task == Task.EVALUATION
    assert sum(measured.evaluation_counts["scores"]) == 112
    assert sum(last.evaluation_counts["confusion"]) == sum(last.evaluation_counts["scores"]) == 112
    assert last.test_metrics["scores.auc"] > 0.9
    assert last.accuracy == last.test_metrics["confusion.accuracy"] > 0.8


@pytest.mark.slow
def test_of_the_example_with_adapters_only_adapters_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its base is made first, and its hash goes into the experiment, as the file's first lines say."""
    rows = [f"{n}\t{play}\t\t{speaker}\tWhat, is it {n}?" for play in "AB" for speaker in "XY" for n in range(500)]
    with gzip.open(tmp_path / "lines.tsv.gz", "wt") as file:
        file.write("\n".join(["line_id\tplay\tline_number\tspeaker\ttext", *rows]))
    monkeypatch.setenv("SHAKESPEARE_DATA", str(tmp_path / "lines.tsv.gz"))
    monkeypatch.setenv("SHAKESPEARE_BASE", str(tmp_path / "base.safetensors"))
    monkeypatch.setenv("STEPS", "2")
    monkeypatch.syspath_prepend(ROOT)
    example = import_module("examples.shakespeare_adapters")
    example.roles.cache_clear()
    example.main()
    base_sha256 = capsys.readouterr().out.split("base_sha256=")[1].strip()
    small = {"clients.count": 2, "rounds.count": 1, "rounds.target": 2, "engine": {"name": "sequential"}}
    path = ROOT / "examples" / "shakespeare_adapters.toml"
    (adapters,) = simulate(path, changes={**small, "base_sha256": base_sha256}).trials
    whole = {"clients.app": "examples.shakespeare_adapters:make_whole_client"}
    (all_of_it,) = simulate(path, changes={**small, **whole}).trials
    example.roles.cache_clear()
    assert adapters.status is all_of_it.status is RunStatus.FINISHED
    assert 10 * adapters.rows[0].update_bytes < all_of_it.rows[0].update_bytes
