"""Event files, read again with TensorBoard's own reader."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from pydantic import TypeAdapter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginAccumulator
from tensorboard.util.tensor_util import make_ndarray
from typer.testing import CliRunner

from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.quantiles import Quantiles
from umbel.aggregation.run.records import Absent, Judged, RoundRecord
from umbel.client.cli.train import train
from umbel.client.datacenter.train.cost import AttemptCost
from umbel.client.datacenter.train.differences import RankUpdates
from umbel.client.tensorboard import EventFiles, EventFolderRefused, TensorBoardMissing, scalars
from umbel.sim.federation.rows import Row

FILE = TypeAdapter(RunFile).validate_python(
    {
        "name": "curves",
        "rounds": {"count": 10, "target": 2, "minimum": 2},
        "training": {"learning_rate": 0.5, "local_steps": 1, "schedule": {"warm_up_rounds": 2}},
        "aggregation": {"optimizer": "momentum", "server_learning_rate": 0.25},
        "tensors": {"private": ["head[|]*", "![`](http://x/y.png)"]},
    }
)
NO_POINTS = {"round", "opened_at", "secure"}  # the x and the time of points; and what is the same in all rounds
METRICS = {"accuracy": "accuracy/evaluation", "loss": "loss/evaluation", "train_loss": "loss/train"}


def row(number: int, **others: Any) -> dict[str, Any]:
    """A line of a round of training, as `umbel train` writes it."""
    return {"round": number, "task": "training", "ended_at": 1e9 + number, **others}


def shown(folder: Path) -> PluginAccumulator:
    """What TensorBoard shows."""
    found = PluginAccumulator(str(folder))
    found.Reload()
    return found


def points(folder: Path, tag: str) -> list[tuple[int, float, float]]:
    """The step, value and time of each point: the same by TensorBoard and by the class that people use in notebooks."""
    found = EventAccumulator(str(folder))
    found.Reload()
    read = [(one.step, one.value, one.wall_time) for one in found.Scalars(tag)]
    tensors = shown(folder).Tensors(tag)
    assert read == [(one.step, float(make_ndarray(one.tensor_proto)), one.wall_time) for one in tensors]
    return read


def record(**others: Any) -> RoundRecord:
    usual: dict[str, Any] = {
        "run": "curves",
        "round": 3,
        "attempt": 1,
        "committed": True,
        "reason": "",
        "model_version": 3,
        "model_sha256": None,
        "opened_at": 5.0,
        "wall_s": 2.0,
        "selected": 2,
        "reported": 2,
        "partial": 0,
        "dropped": 0,
        "sample_count": 7,
        "bytes_up": 10,
        "bytes_down": 20,
    }
    return RoundRecord(**usual, **others)


def line(found: RoundRecord) -> dict[str, Any]:
    made: dict[str, Any] = TypeAdapter(RoundRecord).dump_python(found, mode="json")
    return made


def numbers(kind: type) -> Iterator[str]:
    """The fields of a dataclass that have a number, or none."""
    hints = get_type_hints(kind)
    for one in fields(kind):
        if hints[one.name] in (int, float, bool, int | None, float | None):
            yield one.name


@pytest.mark.parametrize("kind", [RoundRecord, AttemptCost, Row])
def test_each_number_of_a_line_has_a_tag_that_ends_with_its_name(kind: type) -> None:
    names = set(numbers(kind)) - NO_POINTS
    found = scalars(row(1, **dict.fromkeys(names, 1)), None)
    last_parts = {tag.rpartition("/")[2] for tag in found}
    assert {name for name in names if name not in last_parts and METRICS.get(name) not in found} == set()
    assert names >= {"wall_s", "bytes_up"} or names >= {"sum_s", "sent_bytes"}


def test_metrics_have_a_tag_for_each_kind_of_data() -> None:
    spread = {"loss": Quantiles(3, 1.0, "a", 2.0, 3.0, 4.0, 5.0, "c")}
    found = record(
        metrics={"loss": 0.5, "recall": 0.25},
        evaluation={"loss": 0.75},
        metric_quantiles=spread,
        judged=Judged("evaluation.loss", 0.125, 3, ""),
        absent=Absent(4, 400),
    )
    tags = scalars(line(found), FILE)
    assert (tags["loss/train"], tags["recall/train"], tags["loss/evaluation"]) == (0.5, 0.25, 0.75)
    assert [tags[f"loss/train_{one}"] for one in ("least", "p10", "median", "p90", "greatest")] == [1, 2, 3, 4, 5]
    assert (tags["evaluation.loss/judged"], tags["clients/absent"], tags["samples/absent"]) == (0.125, 4, 400)
    assert (tags["seconds/wall_s"], tags["bytes/bytes_down"], tags["clients/selected"]) == (2, 20, 2)


def test_a_simulation_says_what_it_measured_on_its_test_set() -> None:
    tags = scalars(row(1, accuracy=0.5, loss=1.5, train_loss=2.5, test_metrics={"loss": 1.5, "f1": 0.25}), FILE)
    assert (tags["accuracy/test"], tags["loss/test"], tags["f1/test"], tags["loss/train"]) == (0.5, 1.5, 0.25, 2.5)
    assert "accuracy/evaluation" not in tags


def test_what_was_not_measured_has_no_point() -> None:
    tags = scalars(line(record(epsilon=None, proximal_mu=None)) | asdict(AttemptCost(sent_bytes=None)), FILE)
    assert tags.keys().isdisjoint({"round/epsilon", "round/proximal_mu", "bytes/sent_bytes", "loss/train"})


def test_what_a_sum_costs_has_tags_too() -> None:
    tags = scalars(row(1, compute_share=0.5, work_share=0.25, samples_per_s=100.0, attempt=2, committed=True), FILE)
    assert (tags["share/compute_share"], tags["share/work_share"]) == (0.5, 0.25)
    assert (tags["samples/samples_per_s"], tags["round/attempt"], tags["round/committed"]) == (100, 2, 1)


def test_ranks_have_curves_of_their_own() -> None:
    found = RankUpdates((3.0, None, 5.0), (0.5, None, 1.0))
    tags = scalars(row(1, update_norm=found.update_norm, update_cosine=found.update_cosine, **asdict(found)), FILE)
    assert (tags["update_norms/rank_0"], tags["update_norms/rank_2"], tags["update_cosines/rank_2"]) == (3, 5, 1)
    assert "update_norms/rank_1" not in tags
    assert (tags["updates/update_norm"], tags["updates/update_cosine"]) == (4.0, 0.75)


def test_learning_rates_follow_their_schedules_and_an_evaluation_has_none() -> None:
    rates = [scalars(row(number), FILE) for number in (1, 2, 3)]
    assert [one["learning_rate/client"] for one in rates] == [FILE.training_plan(n).learning_rate for n in (1, 2, 3)]
    assert rates[0]["learning_rate/client"] < rates[2]["learning_rate/client"] == 0.5
    assert rates[0]["learning_rate/server"] == 0.25
    measured = row(1) | {"task": Task.EVALUATION.value}
    assert scalars(measured, FILE).keys().isdisjoint(rates[0].keys())


def test_points_have_the_round_as_x_and_the_time_of_their_line(tmp_path: Path) -> None:
    with EventFiles(tmp_path, FILE, []) as files:
        for number in (1, 2):
            files.add(row(number, train_s=number / 4))
    assert points(tmp_path, "seconds/train_s") == [(1, 0.25, 1e9 + 1), (2, 0.5, 1e9 + 2)]
    with EventFiles(tmp_path / "simulated", FILE, []) as files:
        files.add({"round": 1, "task": "training", "now_s": 86_400.0})
    assert points(tmp_path / "simulated", "seconds/now_s") == [(1, 86_400.0, 86_400.0)]


def test_a_line_can_be_seen_while_the_run_goes_on(tmp_path: Path) -> None:
    with EventFiles(tmp_path, FILE, []) as files:
        files.add(row(1, train_s=2.0))
        assert [step for step, _, _ in points(tmp_path, "seconds/train_s")] == [1]


def test_the_run_file_stands_there_once_as_text(tmp_path: Path) -> None:
    rows = list[Mapping[str, Any]]()
    for number in (1, 2, 3):
        with EventFiles(tmp_path, FILE, rows) as files:
            rows.append(row(number))
            files.add(rows[-1])
    (text,) = shown(tmp_path).Tensors("run_file/text_summary")
    (said,) = text.tensor_proto.string_val
    lines = said.decode().splitlines()
    assert lines[:3] == ["| key | value |", "|---|---|", '| name | `"curves"` |']
    private = """| tensors.private | `["head[\\|]*", "!['](http://x/y.png)"]` |"""
    assert {"| training.learning_rate | `0.5` |", private} <= set(lines)
    assert not [line for line in lines if line.endswith(("| `null` |", "| `[]` |", "| `{}` |"))]


def test_after_a_kill_no_point_stands_twice_and_none_is_missing(tmp_path: Path) -> None:
    """The killed run had gone further than its record, and the last of its event files ends in the middle of an event.
    Its last rounds were written by a start without event files.
    """
    killed = [row(number, train_s=float(number)) for number in range(1, 6)]
    with EventFiles(tmp_path, FILE, killed[:2]) as files:
        for one in killed[2:]:
            files.add(one)
    (path,) = tmp_path.glob("events.*")
    path.write_bytes(path.read_bytes()[:-5])
    kept = [*killed[:3], row(4, train_s=40.0), row(5, train_s=50.0)]
    with EventFiles(tmp_path, FILE, kept) as files:
        files.add(row(6, train_s=60.0))
    found = [(step, value) for step, value, _ in points(tmp_path, "seconds/train_s")]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)]


def test_all_attempts_at_a_round_have_points(tmp_path: Path) -> None:
    abandoned = row(1, train_s=9.0, attempt=1)
    with EventFiles(tmp_path, FILE, [abandoned]) as files:
        files.add(row(1, train_s=1.0, attempt=2))
    assert [(step, value) for step, value, _ in points(tmp_path, "round/attempt")] == [(1, 1.0), (1, 2.0)]


def test_without_the_package_an_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(TensorBoardMissing, match=r"pip install 'umbel\[tensorboard\]'"):
        EventFiles(tmp_path / "events", FILE, [])
    assert not (tmp_path / "events").exists()


@pytest.mark.parametrize("place", ["file", "link to a file", "link to nothing"])
def test_what_is_in_the_way_of_the_event_files_is_named_with_a_remedy(tmp_path: Path, place: str) -> None:
    folder, other = tmp_path / "tensorboard", tmp_path / "other"
    if place == "file":
        folder.write_text("mine")
    else:
        folder.symlink_to(other)
    if place == "link to a file":
        other.write_text("mine")
    what = "no folder" if place == "file" else "a link that leads to no folder"
    words = rf"tensorboard is {what}, and the event files .* move it away, or name another folder \(--out\)"
    with pytest.raises(EventFolderRefused, match=words):
        EventFiles(folder, FILE, [])
    if place != "link to nothing":
        assert (folder if place == "file" else other).read_text() == "mine"
    else:
        assert not other.exists()


def test_a_link_of_this_user_to_an_own_folder_is_followed_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="umbel.client")
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "tensorboard").symlink_to(tmp_path / "large-disk")
    with EventFiles(tmp_path / "tensorboard", FILE, [row(1)]):
        pass
    assert len(list((tmp_path / "large-disk").iterdir())) == 1
    assert f"go to {(tmp_path / 'large-disk').resolve()}, because" in caplog.text


@pytest.mark.parametrize("given", ["link", "folder"])
def test_a_link_to_or_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Only root can give files away; without it, this process takes another number."""
    link, other = tmp_path / "tensorboard", tmp_path / "other"
    other.mkdir()
    link.symlink_to(other)
    if os.geteuid() == 0:
        os.chown(link if given == "link" else other, user := 4711, user, follow_symlinks=False)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(EventFolderRefused, match=rf"and user {user} owns one of them, .*: remove the link, or name"):
        EventFiles(link, FILE, [])
    assert not list(other.iterdir())


def test_a_link_in_the_place_of_an_old_event_file_leads_to_no_write(tmp_path: Path) -> None:
    folder, other = tmp_path / "tensorboard", tmp_path / "precious"
    with EventFiles(folder, FILE, [row(1)]):
        pass
    (old,) = folder.iterdir()
    old.unlink()
    other.write_text("mine")
    old.symlink_to(other)
    with EventFiles(folder, FILE, [row(1)]) as files:
        files.add(row(2))
    assert other.read_text() == "mine"
    assert sum(not one.is_symlink() for one in folder.iterdir()) == 1


def test_the_command_says_what_to_install_before_it_writes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    (tmp_path / "run.toml").write_text('name = "curves"\nrounds = { count = 1, target = 1, minimum = 1 }\n')
    app = typer.Typer()
    app.command()(train)
    words = [str(tmp_path / "run.toml"), "--app", "a:b", "--out", str(tmp_path / "out"), "--tensorboard"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code != 0
    assert "pip install 'umbel[tensorboard]'" in said.stderr
    assert "Traceback" not in said.stderr
    assert not (tmp_path / "out").exists()
