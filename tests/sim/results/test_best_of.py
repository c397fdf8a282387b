"""`best_over` names keys of the sweep, and the results name the best of their values for each choice of the others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from tests.sim.federation.worlds import table
from umbel.__main__ import app, mount
from umbel.sim import simulate
from umbel.sim.results.results import Results
from umbel.sim.results.shown import best_table

RATES = {"training.learning_rate": [0.1, 0.2]}
EPOCHS = {"epochs": [{"label": "one"}, {"label": "two", "training.local_epochs": 2}]}
BOTH = table(
    fleet=None,
    seeds=[0, 1],
    rounds={"count": 2},
    target_accuracy=0.8,
    best_over=["training.learning_rate"],
    sweep={**EPOCHS, **RATES},
)


@pytest.fixture(scope="module")
def measured() -> Results:
    return simulate(BOTH)


def with_accuracies(results: Results, accuracies: dict[tuple[str, int], list[float]]) -> Results:
    """The results with these accuracies of the two rounds, by point and seed; 0.1 in others."""
    trials = tuple(
        replace(
            one,
            rows=tuple(
                replace(row, accuracy=accuracy)
                for row, accuracy in zip(
                    one.rows, accuracies.get((one.trial.label, one.trial.seed), [0.1, 0.1]), strict=True
                )
            ),
        )
        for one in results.trials
    )
    return replace(results, trials=trials)


def chosen(results: Results) -> dict[str, object]:
    return {one.label: one.values["training.learning_rate"] for one in results.best_of}


def test_the_fewest_rounds_to_the_target_are_the_best(measured: Results) -> None:
    found = with_accuracies(
        measured,
        {
            ("one, learning_rate=0.1", 0): [0.5, 0.9],
            ("one, learning_rate=0.1", 1): [0.5, 0.9],
            ("one, learning_rate=0.2", 0): [0.8, 0.8],
            ("one, learning_rate=0.2", 1): [0.5, 0.8],
        },
    )
    assert chosen(found)["one"] == 0.2
    best = found.best_of[0]
    assert (best.point.label, best.n_points) == ("one, learning_rate=0.2", 2)
    assert best.point.rounds_to_target is not None
    assert best.point.rounds_to_target.mean == pytest.approx(1.5)


def test_a_value_with_which_more_seeds_reach_the_target_is_better_than_a_fast_one(measured: Results) -> None:
    found = with_accuracies(
        measured,
        {
            ("one, learning_rate=0.1", 0): [0.5, 0.8],
            ("one, learning_rate=0.1", 1): [0.5, 0.8],
            ("one, learning_rate=0.2", 0): [0.9, 0.9],
        },
    )
    assert chosen(found)["one"] == 0.1


def test_where_no_value_reaches_the_target_the_best_accuracy_so_far_decides(measured: Results) -> None:
    found = with_accuracies(
        measured, {("two, learning_rate=0.2", 0): [0.6, 0.2], ("two, learning_rate=0.1", 0): [0.5, 0.5]}
    )
    assert chosen(found) == {"one": 0.1, "two": 0.2}
    assert found.best_of[1].point.reached_target == 0


def test_without_a_target_the_best_accuracy_decides(measured: Results) -> None:
    reached = with_accuracies(
        measured, {("one, learning_rate=0.1", 0): [0.8, 0.8], ("one, learning_rate=0.2", 0): [0.5, 0.95]}
    )
    assert chosen(reached)["one"] == 0.1
    assert chosen(replace(reached, target_accuracy=None))["one"] == 0.2


def test_the_tables_and_the_summary_name_the_best(measured: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.sim.results.plot.curves", lambda _: Figure(figsize=(0.1, 0.1)))
    found = with_accuracies(measured, {("two, learning_rate=0.2", seed): [0.6, 0.9] for seed in (0, 1)})
    shown = best_table(found)
    assert shown is not None
    assert shown.header == ["", "best training.learning_rate", "rounds to 80%", "seeds", "best accuracy"]
    assert shown.rows[1][:4] == ["two", "0.2", "1.7 ± 0.0", "2 of 2"]
    assert shown.rows[0][2:4] == ["-", "0 of 2"]
    html = found._repr_html_()  # pyright: ignore[reportPrivateUsage] - what a notebook calls
    for cell in shown.rows[1]:
        assert cell in repr(found)
        assert f"<td>{cell}</td>" in html
    summary = json.loads(json.dumps(found.summary()))
    assert summary["best_over"] == ["training.learning_rate"]
    two = summary["best_of"][1]
    assert (two["label"], two["values"], two["point"]) == (
        "two",
        {"training.learning_rate": 0.2},
        found.points[3].label,
    )
    assert two["rounds_to_target"]["mean"] == pytest.approx(1 + 2 / 3)
    assert (two["n_points"], two["reached_target"]) == (2, 2)


def test_over_all_keys_there_is_one_best_point(measured: Results) -> None:
    (best,) = replace(measured, best_over=("epochs", "training.learning_rate")).best_of
    assert (best.label, best.n_points) == ("", 4)
    assert best.values.keys() == {"epochs", "training.learning_rate"}


def test_a_file_that_does_not_ask_has_no_such_table(measured: Results) -> None:
    plain = replace(measured, best_over=())
    assert plain.best_of == ()
    assert best_table(plain) is None
    assert plain.summary()["best_of"] == []


@pytest.mark.usefixtures("blank_pictures")
def test_the_command_prints_the_best_and_the_key_may_be_added_to_a_finished_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount()
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(
        'name = "small"\n[data]\nname = "digits"\n[partition]\nscheme = "iid"\nclients = 5\n[model]\nhidden = [8]\n'
        "[rounds]\ncount = 1\ntarget = 2\n[training]\nlearning_rate = 0.1\n"
        '[sweep]\n"training.learning_rate" = [0.1, 0.2]\n'
    )
    first = CliRunner().invoke(app, ["simulate", "small.toml", "--out", "out"])
    assert first.exit_code == 0, first.output
    assert "the best of" not in first.stdout
    asked = ["simulate", "small.toml", "--out", "out", "--set", 'best_over=["training.learning_rate"]']
    again = CliRunner().invoke(app, asked)
    assert again.exit_code == 0, again.output
    assert "the best of training.learning_rate" in again.stdout


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"best_over": ["training.learning_rte"]}, r'best_over: "training\.learning_rte" is not a name of the sweep'),
        ({"best_over": ["training.learning_rate"] * 2}, "best_over has one name twice"),
        ({"best_over": ["training.batch_size"], "sweep": {}}, "the file has no sweep"),
        ({"best_over": "training.learning_rate"}, "best_over"),
    ],
)
def test_a_name_that_is_not_swept_is_refused_with_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        simulate({**BOTH, **changes})
