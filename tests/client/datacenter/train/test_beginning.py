"""Before the first round: what ranks must have in common, what a group cannot do, and how ranks get their clients."""

import json
import logging
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from tests.contracts.own_clients import make_torch_client
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import RoundRecord
from umbel.client import Client, LocalPlan, TrainResult
from umbel.client.datacenter.ranks.group import Group, GroupError, joined
from umbel.client.datacenter.ranks.names import CLIENTS, RANKS, RankNames
from umbel.client.datacenter.train.beginning import agreed, first_checkpoint, next_checkpoint, require_possible
from umbel.client.datacenter.train.checkpoint import GroupCheckpoint
from umbel.client.datacenter.train.named_client import client_of
from umbel.client.datacenter.train.train import TrainEnd, train_run
from umbel.client.errors import AppError
from umbel.client.files import locked_file

_RUN_FILE = TypeAdapter(RunFile)


def run_file(**sections: Any) -> RunFile:
    rounds = {"count": 2, "target": 1, "minimum": 1, "window_s": 60.0, **sections.pop("rounds", {})}
    return _RUN_FILE.validate_python({"name": "a-run", "rounds": rounds, **sections})


class _OtherRank:
    """A group of two, of which the other rank says the same but for one change."""

    rank, size, is_first = 0, 2, True

    def __init__(self, change: Callable[[dict[str, Any]], None], names: RankNames = RANKS) -> None:
        self._change, self.names = change, names

    def waiting_for(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def gather(self, data: bytes) -> list[bytes]:
        other = json.loads(data)
        self._change(other)
        return [data, json.dumps(other).encode()]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda one: one.update(layout="other"),
            "rank 1 has another model than the other ranks; start all ranks alike",
        ),
        (lambda one: one.update(run_file="{}"), "rank 1 has another run file than the other ranks; start"),
        (lambda one: one["versions"].update(torch="1.0"), r"rank 1 has another torch than the other ranks: 1\.0, but"),
        (lambda one: one["versions"].update(umbel="9"), "rank 1 has another umbel than the other ranks: 9, but"),
    ],
)
def test_ranks_that_differ_are_named(change: Callable[[dict[str, Any]], None], sentence: str) -> None:
    with pytest.raises(GroupError, match=sentence):
        agreed(cast(Group, _OtherRank(change)), run_file(), make_torch_client(0, 2))


def test_first_ranks_of_clients_are_named_as_clients() -> None:
    ranks = cast(Group, _OtherRank(lambda one: one.update(layout="other"), CLIENTS))
    with pytest.raises(GroupError, match="client 1 has another model than the other clients; start all ranks alike"):
        agreed(ranks, run_file(), make_torch_client(0, 2))
    with pytest.raises(
        GroupError, match="target is 4, but there are only 2 clients: set it to 2 at most, or start more"
    ):
        agreed(ranks, run_file(rounds={"target": 4}), make_torch_client(0, 2))


@pytest.mark.parametrize(
    ("file", "n_ranks", "sentence"),
    [
        (
            run_file(rounds={"target": 4}),
            2,
            "target is 4, but there are only 2 ranks: set it to 2 at most",
        ),
        (run_file(rounds={"target": 4, "minimum": 2}), 1, "target is 4, but there is only 1 rank: set it to 1 at most"),
        (run_file(canary={}), 2, r"leave \[canary\] out"),
    ],
)
def test_what_a_group_cannot_do_is_refused(file: RunFile, n_ranks: int, sentence: str) -> None:
    with pytest.raises(GroupError, match=sentence):
        require_possible(file, n_ranks)


def test_a_run_goes_on_only_with_its_own_file_and_model(tmp_path: Path) -> None:
    file, app = run_file(), make_torch_client(0, 1)
    with joined() as group:
        on = agreed(group, file, app)
        first = first_checkpoint(group, file, on)
        saved = GroupCheckpoint(first.standing, first.model, 17, (False,)).encode()
        found = next_checkpoint(group, file, on, saved, tmp_path)
        assert (found.standing, found.rows_bytes) == (first.standing, 17)
        assert found.model.file == first.model.file
        with pytest.raises(GroupError, match="the run file has changed since this run began"):
            next_checkpoint(group, run_file(seed=1), on, saved, tmp_path)
        kept = GroupCheckpoint(first.standing, first.model, 17, (True,)).encode()
        with pytest.raises(GroupError, match=r"0\.safetensors is missing or damaged"):
            next_checkpoint(group, file, on, kept, tmp_path)
        two = GroupCheckpoint(first.standing, first.model, 17, (True, False)).encode()
        with pytest.raises(GroupError, match="it began with 2 ranks: start as many"):
            next_checkpoint(group, file, on, two, tmp_path)
        for damaged in (saved[:-1], b"", b"\0" * 100):
            with pytest.raises(GroupError, match="the checkpoint is damaged"):
                GroupCheckpoint.decode(damaged, on.layout)


def make_numbered(number: int, of: int) -> Client:
    return make_torch_client(number, of)


def make_alone() -> Client:
    return make_torch_client(2, 3)


ALONE = make_torch_client(1, 3)


def test_a_rank_gets_its_client_from_any_kind_of_name() -> None:
    with joined() as group:
        for name, number in (("make_numbered", 0), ("make_alone", 2), ("ALONE", 1)):
            made = client_of(f"{__name__}:{name}", group.rank, group.size, 0)
            assert made.sample_count == make_torch_client(number, 3).sample_count
        with pytest.raises(AppError, match="name a Client, or a function make_client"):
            client_of(f"{__name__}:nothing", group.rank, group.size, 0)


@pytest.mark.slow
def test_what_a_slow_rank_has_done_at_the_end_of_the_window_counts(tmp_path: Path) -> None:
    file = run_file(rounds={"count": 1, "window_s": 0.5}, training={"local_steps": 10_000_000})
    records = list[RoundRecord]()
    end, is_first = train_run(file, f"{__name__}:ALONE", tmp_path, None, lambda attempt: records.append(attempt.record))
    assert is_first
    assert end is not None
    assert (end.rounds, records[0].reported, records[0].partial) == (1, 1, 1)


class _Slow(Client):
    """Takes longer than the window for its first step, and then takes no other one, or does not count it."""

    def __init__(self, n_steps: int) -> None:
        self.model, self.sample_count, self._n_steps = nn.Linear(2, 2), 4, n_steps

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        while plan.seconds_left > 0:
            time.sleep(0.01)
        return TrainResult(4, self._n_steps, 10, {})


SLOW, TOO_SLOW = _Slow(1), _Slow(0)
SHORT = {"count": 1, "window_s": 0.1}


def test_a_first_step_that_is_longer_than_the_window_counts_and_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end, _ = train_run(run_file(rounds={**SHORT, "count": 2}), f"{__name__}:SLOW", tmp_path, None, lambda _: None)
    assert end is not None
    assert end.rounds == 2
    (said,) = [one.getMessage() for one in caplog.records if "first step" in one.getMessage()]
    assert re.fullmatch(
        r"round 1 counts only the first step of a rank. Rank 0 has needed [\d.]+ s, and window_s is 0\.1: set it to "
        r"\d+ or more in \[rounds\], or give this rank less work",
        said,
    )


def test_a_run_that_ends_because_of_its_window_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        GroupError, match=r"round 1 was abandoned 3 times: .* Rank 0 has needed \d.* s, and window_s is 0\.1: set it to"
    ):
        train_run(run_file(rounds=SHORT), f"{__name__}:TOO_SLOW", tmp_path, None, lambda _: None)


class _Refused(Client):
    """Reports a metric that no report may have."""

    def __init__(self) -> None:
        self.model, self.sample_count = nn.Linear(2, 2), 4

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return TrainResult(4, 1, 1, {"<script>": 1.0})


REFUSED = _Refused()


WHY = r"was abandoned {} times.* everyone who is left has declined, .*; 1 client declined: .*<script>"


def test_an_error_after_attempts_that_every_rank_declined_has_the_reason(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match=WHY.format(3)):
        train_run(run_file(rounds={"count": 1}), f"{__name__}:REFUSED", tmp_path, None, lambda _: None)


def test_a_run_that_failed_because_every_rank_declined_has_the_reason(tmp_path: Path) -> None:
    file = run_file(rounds={"count": 1, "attempts_max": 2})
    end, _ = train_run(file, f"{__name__}:REFUSED", tmp_path, None, lambda _: None)
    assert end is not None
    assert end.status is RunStatus.FAILED
    assert re.search(WHY.format(2), end.reason), end.reason


def test_a_folder_is_one_runs_alone_and_its_lines_are_those_of_its_checkpoint(tmp_path: Path) -> None:
    def again(out: Path) -> TrainEnd:
        end, _ = train_run(run_file(), f"{__name__}:ALONE", out, None, lambda _: None)
        assert end is not None
        return end

    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o755)
    (foreign / "rounds.jsonl").write_text("mine")
    with pytest.raises(
        GroupError, match=r"rounds\.jsonl exists, but .* has no checkpoint of a run: name another folder"
    ):
        again(foreign)
    assert (foreign / "rounds.jsonl").read_text() == "mine"
    out = tmp_path / "out"
    done = again(out)
    assert again(out) == done
    rows = (out / "rounds.jsonl").read_bytes()
    with locked_file(out / ".lock", waits=False), pytest.raises(GroupError, match="another run is writing to"):
        again(out)
    for damaged, sentence in ((rows[:-5], "missing or shorter"), (b"{}" + b" " * len(rows), "is damaged")):
        (out / "rounds.jsonl").write_bytes(damaged)
        with pytest.raises(GroupError, match=f"rounds.jsonl .*{sentence}"):
            again(out)
    (out / "rounds.jsonl").write_bytes(rows)
    checkpoint = (out / "checkpoint.safetensors").read_bytes()
    for changed in (b"", checkpoint[:-1] + bytes([checkpoint[-1] ^ 1])):
        (out / "checkpoint.safetensors").write_bytes(changed)
        with pytest.raises(GroupError, match="the checkpoint is damaged"):
            again(out)


def test_a_run_that_goes_on_says_what_it_ignores_and_which_data_have_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="umbel.client")
    first, out = tmp_path / "first.safetensors", tmp_path / "out"
    first.write_bytes(encode_model(ALONE.model.state_dict()))

    def said(name: str, model: Path | None = None) -> list[str]:
        caplog.clear()
        train_run(run_file(), f"{__name__}:{name}", out, model, lambda _: None)
        return [one.getMessage() for one in caplog.records if "round" in one.getMessage() or "rank" in one.getMessage()]

    assert said("ALONE", first) == []
    (ignored,) = said("ALONE", first)
    assert ignored == (
        f"--model {first} is ignored: the run in {out} goes on from its checkpoint, after 2 rounds. To begin with that "
        "file, name another folder (--out)"
    )
    assert said("ALONE") == []
    (changed,) = said("make_alone")
    assert changed.startswith("rank 0 has other training data than before this start (")


def make_swapped(of: int, number: int) -> Client:
    assert (number, of) == (0, 1)
    return make_torch_client(number, of)


def make_of_three(one: int, two: int, three: int) -> Client:
    raise AssertionError("it is not called")


def make_of_ranks(number: int, of: int, mesh: object) -> Client:
    raise AssertionError("it is not called")


def test_parameters_named_number_and_of_are_told_by_their_names() -> None:
    with joined() as group:
        client_of(f"{__name__}:make_swapped", group.rank, group.size, 0)
        with pytest.raises(AppError, match=r"needs 3 arguments: write it as make_client\(number, of\)"):
            client_of(f"{__name__}:make_of_three", group.rank, group.size, 0)
        with pytest.raises(AppError, match=r"takes the mesh of its client's ranks, so say .* --ranks-per-client"):
            client_of(f"{__name__}:make_of_ranks", group.rank, group.size, 0)


def make_nothing(number: int, of: int) -> Client:
    raise OSError("the scanner is off")


def test_what_a_person_has_to_change_is_said_in_a_sentence(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(encode_model({"w": torch.zeros(3)}))
    with pytest.raises(LayoutError, match="the file of --model does not fit the model: "):
        train_run(run_file(), f"{__name__}:ALONE", tmp_path / "out", other, lambda _: None)
    with pytest.raises(GroupError, match=r"could not make client 0 of 1: OSError: the scanner is off \(test_beg"):
        train_run(run_file(), f"{__name__}:make_nothing", tmp_path / "out", None, lambda _: None)


def test_an_environment_that_no_launcher_sets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(GroupError, match="WORLD_SIZE is 'two'; it must be a number"), joined():
        pass
