"""A finished experiment is extended in its folder, and ends as one long run would; other changes are refused by key."""

import shutil
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.sim.federation.worlds import table
from tests.suite.nights import at_night
from umbel.sim import simulate
from umbel.sim.experiment.checkpoint import BEFORE_END_FILE
from umbel.sim.experiment.file import experiment_of
from umbel.sim.experiment.trials import TrialResult, Watcher
from umbel.sim.federation.rows import Row
from umbel.sim.simulation import RUNS_FOLDER

LEFT = {"codec": {"name": "topk", "share": 0.1, "error_feedback": True}}
CHANGES_DOWN = {"codec": {"name": "integer"}, "downlink": {"name": "change"}}
REMEMBERS = {"aggregation": {"optimizer": "adam"}}
ADAPTS = {"training": {"algorithm": "fedprox", "proximal_mu": 0.0, "adaptive_mu": True, "learning_rate": 2.0}}
LOSSES = {"fleet": {"dropouts": {"per_round": 0.3, "returns": 0.5}}, "rounds": {"minimum": 5}}
SCORED = {"engine": {"name": "sequential", "score_every": 2}}


def bare(results: Any) -> list[tuple[str, list[dict[str, Any]]]]:
    """Each run's model and rows, without real seconds."""
    rows = [[{**asdict(row), "wall_s": 0.0} for row in one.rows] for one in results.trials]
    return [(one.model_sha256, found) for one, found in zip(results.trials, rows, strict=True)]


def sized(described: dict[str, Any], count: int) -> dict[str, Any]:
    return {**described, "rounds": {**described["rounds"], "count": count}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, (2, 3, 5)),
        (CHANGES_DOWN, (1, 5)),
        (ADAPTS, (3, 5)),
        *product([LEFT, LOSSES, SCORED, REMEMBERS, {"fleet": None}], [(1, 5)]),
        *at_night(({}, (1, 5)), (CHANGES_DOWN, (2, 3, 5))),
        *at_night(*product([LEFT, LOSSES, SCORED, REMEMBERS, {"fleet": None}], [(2, 3, 5)])),
    ],
)
def test_more_rounds_end_as_one_long_run(tmp_path: Path, changes: dict[str, Any], counts: tuple[int, ...]) -> None:
    described = table(**changes)
    extended = [simulate(sized(described, count), tmp_path) for count in counts]
    assert bare(extended[-1]) == bare(simulate(sized(described, counts[-1])))


@pytest.mark.slow
def test_a_run_that_stopped_early_ends_where_it_did(tmp_path: Path) -> None:
    stop = {"metric": "training.loss", "mode": "min", "target": 100.0, "minimum": 1}
    described = table(stop=stop, training={"evaluate": True}, partition={"holdout": 0.2})
    first = simulate(sized(described, 3), tmp_path)
    assert len(first.trials[0].rows) == 1
    again = simulate(sized(described, 6), tmp_path)
    assert bare(again) == bare(first)


@pytest.mark.slow
def test_more_seeds_and_points_leave_the_runs_that_are_there(tmp_path: Path) -> None:
    first = simulate(table(rounds={"count": 2}, sweep={"training.proximal_mu": [0.0]}), tmp_path)
    sweep = {"training.proximal_mu": [1.0, 0.0]}
    told = Told()
    both = simulate(table(rounds={"count": 2}, seeds=[3, 0], sweep=sweep), tmp_path, watcher=told)
    assert len(both.trials) == 4
    assert bare(first)[0] in bare(both)
    assert len(told.rows) == 6, "the run of the folder is not simulated again"
    assert bare(both) == bare(simulate(table(rounds={"count": 2}, seeds=[3, 0], sweep=sweep)))


class Told(Watcher):
    def __init__(self) -> None:
        self.rows = list[Row]()

    def row(self, trial: Any, row: Row) -> None:
        self.rows.append(row)

    def ends(self, result: TrialResult) -> None:
        assert result.rows


class Interrupt(Told):
    """Ends the process, as it were, after some rows."""

    def row(self, trial: Any, row: Row) -> None:
        super().row(trial, row)
        if len(self.rows) == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_extension_that_is_interrupted_is_resumed(tmp_path: Path) -> None:
    described = table(**LEFT)
    simulate(sized(described, 3), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        simulate(sized(described, 6), tmp_path, watcher=Interrupt())
    assert bare(simulate(sized(described, 6), tmp_path)) == bare(simulate(sized(described, 6)))


@pytest.mark.slow
def test_only_the_last_rounds_are_simulated_again(tmp_path: Path) -> None:
    simulate(sized(table(), 30), tmp_path)
    told = Told()
    simulate(sized(table(), 31), tmp_path, watcher=told)
    assert (tmp_path / RUNS_FOLDER / "seed-0" / BEFORE_END_FILE).exists()
    assert 2 <= len(told.rows) < 31
    assert told.rows[-1].round == 31


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    simulate(SWEPT, out)
    return out


SWEPT = table(rounds={"count": 1}, seeds=[0, 1], sweep={"training.proximal_mu": [0.0, 1.0]})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rounds.target": 5},
            r"rounds\.target is 6 there, and 5 here\. An experiment can be extended in its folder by",
        ),
        (
            {"partition.alpha": 1.0, "model.hidden": [4]},
            r"model\.hidden is \[8\] there, and \[4\] here, partition\.alpha is",
        ),
        ({"codec.name": "integer"}, r'codec\.name is "float32" there, and "integer" here'),
        ({"fleet.dropouts.per_round": 0.1}, r"fleet\.dropouts\.per_round is not set there, and 0\.1 here"),
        ({"seeds": [0]}, r"seeds is \[0, 1\] there, and \[0\] here"),
        (
            {"sweep": {"training.proximal_mu": [0.0, 2.0]}},
            r"sweep is .*\[0, 1\].* there, and .*\[0, 2\].* here",
        ),
        ({"name": "other"}, r'name is "small" there, and "other" here'),
    ],
)
def test_other_changes_are_refused_with_their_keys_and_both_values(
    finished: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        simulate(SWEPT, finished, changes=changes)


def test_fewer_rounds_are_refused(tmp_path: Path) -> None:
    simulate(sized(table(), 2), tmp_path)
    with pytest.raises(ValueError, match=r"rounds\.count is 2 there, and 1 here"):
        simulate(sized(table(), 1), tmp_path)


def test_what_only_the_summary_uses_may_change_and_so_may_a_default_be_written_out(
    finished: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(finished, tmp_path / "out"))
    told = Told()
    results = simulate(SWEPT, copy, changes={"target_accuracy": 0.1, "rounds.minimum": 1}, watcher=told)
    assert results.target_accuracy == 0.1
    assert not told.rows


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"training": {"schedule": {"name": "cosine"}}},
            r"learning rate of \[training\.schedule\] depends on the number",
        ),
        (
            {"aggregation": {"schedule": {"name": "cosine"}}},
            r"server's learning rate of \[aggregation\.schedule\] depends on the number",
        ),
        (
            {
                "codec": {"name": "integer"},
                "secure_aggregation": {},
                "rounds": {"minimum": 5, "over_selection": 1.0},
                "privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0},
            },
            r"the noise of \[privacy\] is planned for all rounds together",
        ),
    ],
)
def test_a_run_whose_first_rounds_depend_on_their_number_is_not_extended(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    described = table(**changes)
    simulate(sized(described, 2), tmp_path)
    with pytest.raises(ValueError, match=words):
        simulate(sized(described, 3), tmp_path)


def test_a_folder_whose_experiment_cannot_be_read_is_left_alone(finished: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(finished, tmp_path / "out"))
    text = experiment_of(SWEPT).text.replace('"rounds"', '"hourglass"')
    (copy / "experiment.json").write_text(text)
    with pytest.raises(ValueError, match=r"which this version of umbel cannot read \(.*hourglass"):
        simulate(SWEPT, copy)
