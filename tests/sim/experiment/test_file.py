"""An experiment's file: a run file and the world, every combination of what is swept, and sentences for mistakes."""

import math
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sim.federation.worlds import table
from umbel.sim.experiment import file as file_module
from umbel.sim.experiment.file import experiment_of, read_experiment


def test_every_combination_of_what_is_swept_is_a_run_for_each_seed() -> None:
    one = experiment_of(table(seeds=[5, 6], sweep={"training.proximal_mu": [0.0, 1.0], "rounds.target": [3, 6]}))
    assert len(one.trials) == 8
    assert {(t.run.training.proximal_mu, t.run.rounds.target, t.seed) for t in one.trials} == {
        (mu, target, seed) for mu in (0.0, 1.0) for target in (3, 6) for seed in (5, 6)
    }
    assert all(t.run.seed == t.seed for t in one.trials)
    assert len({t.folder for t in one.trials}) == 8
    assert one.trials[0].label == "proximal_mu=0.0, target=3"


def test_what_the_world_is_like_can_be_swept_too() -> None:
    one = experiment_of(table(sweep={"partition.alpha": [0.1, 10.0], "fleet.dropouts.per_round": [0.0, 0.5]}))
    assert [
        (t.partition and t.partition.alpha, t.fleet and t.fleet.dropouts and t.fleet.dropouts.per_round)
        for t in one.trials
    ] == [
        (0.1, 0.0),
        (0.1, 0.5),
        (10.0, 0.0),
        (10.0, 0.5),
    ]


TOGETHER = [
    {"label": "all or nothing", "fleet.partial_work": False, "rounds.count": 2},
    {"label": "mu 1", "training.proximal_mu": 1.0},
]


def test_what_goes_together_is_swept_together() -> None:
    one = experiment_of(table(sweep={"rounds.target": [3, 6], "method": TOGETHER}))
    assert [t.label for t in one.trials] == [
        "target=3, all or nothing",
        "target=3, mu 1",
        "target=6, all or nothing",
        "target=6, mu 1",
    ]
    assert [
        (t.fleet and t.fleet.partial_work, t.run.training.proximal_mu, t.run.rounds.count) for t in one.trials[:2]
    ] == [
        (False, 0.0, 2),
        (True, 1.0, 4),
    ]
    assert one.trials[0].point == {"rounds.target": 3, "method": "all or nothing"}


def test_a_whole_section_can_be_swept_as_one_value() -> None:
    sections = [{"scheme": "iid", "clients": 5}, {"scheme": "shards", "clients": 6, "shards_each": 2}]
    one = experiment_of(table(partition=None, sweep={"partition": sections}))
    assert [trial.partition and trial.partition.clients for trial in one.trials] == [5, 6]


def test_a_change_of_what_is_swept_is_refused_for_the_sweep_would_undo_it() -> None:
    described = table(sweep={"rounds.target": [3, 6], "method": TOGETHER})
    for key in ("rounds.target", "rounds.count", "training.proximal_mu"):
        with pytest.raises(ValueError, match=f"{key} is set by the sweep"):
            experiment_of(described, {key: 1})
    (trial,) = experiment_of(described, {"rounds.count": 1, "sweep": {}}).trials
    assert trial.run.rounds.count == 1


def test_equal_experiments_have_equal_texts_and_others_have_not() -> None:
    described = table()
    turned = dict(reversed(described.items()))
    assert experiment_of(described).text == experiment_of(turned).text
    assert experiment_of(described).text != experiment_of(table(target_accuracy=0.5)).text
    assert experiment_of(described).text != experiment_of(described, {"rounds.count": 5}).text
    assert experiment_of(described).text != experiment_of(described, {"target_accuracy": 0.5}).text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": {"counts": 3}}, "unknown key 'counts'"),
        ({"partition": {"alpha": -1.0}}, "alpha"),
        ({"data": {"name": "imagenet"}}, "name must be one of digits"),
        ({"model": {"name": "mlp", "hidden": [0]}}, "hidden"),
        ({"engine": {"name": "warp"}}, "engine"),
        ({"partition": None}, r"\[partition\] is missing"),
        ({"seeds": [1, 1]}, "one seed twice"),
        ({"seed": 3, "seeds": [1]}, "list the seeds"),
        ({"sweep": {"training.proximal_mu": []}}, "no value to try"),
        ({"sweep": {"training.nesterov": [0.9]}}, "unknown key 'nesterov'.*nesterov=0.9"),
        ({"sweep": {"name.first": ["a"]}}, "name is not a section"),
        ({"sweep": {"who": [{"rounds.count": 1}]}}, "unknown key 'who'"),
        ({"sweep": {"who": [{"label": "a"}, {"rounds.count": 1}]}}, "each value of who must be a table with a label"),
        ({"sweep": {"who": [{"label": "a"}, 3]}}, "each value of who must be a table with a label"),
        ({"sweep": {"who": [{"label": ""}]}}, "each value of who must be a table with a label"),
        ({"sweep": {"who": [{"label": "a"}, {"label": "a"}]}}, "two values of who have the same label"),
        (
            {"sweep": {"who": [{"label": "a+"}, {"label": "a-"}, {"label": "a*"}]}},
            'differ only in characters that umbel writes as "_" in folder names',
        ),
        ({"sweep": {"who.is": [{"label": "a"}]}}, "a name without a dot"),
        ({"sweep": {"who": [{"label": "a", "seed": 3}]}}, "seed cannot be swept"),
        ({"sweep": {"who": [{"label": "b", "rounds.counts": 3}]}}, "unknown key 'counts'.*with b"),
        ({"sweep": {"training.proximal_mu": [0.1, 0.1]}}, r"training\.proximal_mu has the value 0\.1 twice"),
        ({"training": {"learning_rate": float("nan")}}, r"training\.learning_rate is nan; it must be a finite number"),
        ({"sweep": {"codec.step": [0.1, float("inf")]}}, r"sweep\.codec\.step is inf"),
        ({"data": {"name": datetime(2026, 1, 1)}}, r"data\.name is a datetime .*; it must be a number, a text"),
        (
            {"sweep": {"rounds.count": [1, 2], "who": [{"label": "a", "rounds.count": 3}]}},
            r"rounds\.count is set in two places",
        ),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"fleet": None, "rounds": {"self_tuning": True}}, r"rounds\.self_tuning learns from .*: add \[fleet\]"),
        ({"fleet": None, "sweep": {"rounds.window_s": [1.0, 2.0]}}, r"sweep: rounds\.window_s has no effect without"),
        (
            {"fleet": None, "sweep": {"how": [{"label": "a"}, {"label": "b", "rounds.over_selection": 2.0}]}},
            r"sweep: rounds\.over_selection has no effect without",
        ),
    ],
)
def test_a_mistake_is_told_with_its_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        experiment_of(table(**changes))


@pytest.mark.parametrize(
    "sweep",
    [
        {"who": [{"label": "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 99 + end} for end in "ab"]},
        {name: [{"label": end * 100} for end in "ab"] for name in ("one", "two", "three")},
        {"fleet.hours.by_hour": [[0.5] * 24, [0.25] * 24], "rounds.count": [1, 2]},
    ],
)
def test_a_long_label_names_a_folder_that_can_be_made(sweep: dict[str, Any], tmp_path: Path) -> None:
    folders = {one.folder for one in experiment_of(table(sweep=sweep)).trials}
    assert len(folders) == math.prod(map(len, sweep.values()))
    for folder in folders:
        (tmp_path / folder).mkdir()


def test_numbers_of_numpy_are_numbers() -> None:
    theirs = table(partition={"clients": np.int64(30), "alpha": np.float64(0.5)})
    assert experiment_of(theirs).text == experiment_of(table(partition={"clients": 30, "alpha": 0.5})).text


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("name = ")
    with pytest.raises(ValueError, match=re.escape(f"{path} is not valid TOML")):
        read_experiment(path)


def test_the_file_of_the_docstring_is_one(tmp_path: Path) -> None:
    text = re.search(r"```toml\n(.*?)```", file_module.__doc__ or "", re.DOTALL)
    assert text is not None
    path = tmp_path / "experiment.toml"
    path.write_text(text.group(1))
    assert len(read_experiment(path).trials) == 18


def test_a_file_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(ValueError, match=r"/dev/zero is no experiment: it has more than 4194304 bytes"):
        read_experiment(Path("/dev/zero"))


def test_a_run_file_as_it_is_has_its_own_seed() -> None:
    whole = {key: value for key, value in table().items() if key != "seeds"}
    (trial,) = experiment_of({**whole, "seed": 7}).trials
    assert (trial.seed, trial.run.seed) == (7, 7)
