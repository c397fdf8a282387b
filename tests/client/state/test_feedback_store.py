"""What an update leaves out is on disk for the next one: through kills, and only where it counted."""

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.client.doubles.double import TOKEN, URL, Double, Handler, answer, kind_of
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.client import Client, LocalPlan, RunEnd, TrainResult, run_client

TOP_K = CodecPlan(Codec.TOPK, key=3, parameters={"share": 0.125, "precision": "float32"}, feedback=True)
N_ROUNDS = 4


class Growing(Client):
    """Changes weight i of eight by 1 + i / 8: the same each round."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 2, bias=False)
        self.sample_count = 5

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(CHANGE.view(2, 4))
        return TrainResult(5, 1, 1)


CHANGE = 1 + torch.arange(8) / 8


class Crash(BaseException):
    """Stands for kill -9: nothing in the client may catch it."""


def double_of(codec: CodecPlan = TOP_K) -> Double:
    double = Double(Growing().model, rounds=N_ROUNDS)
    double.codec = codec
    return double


def take_part(tmp_path: Path, double: Double, wrap: Callable[[Handler], Handler] = lambda handler: handler) -> RunEnd:
    token = None if double.keys else TOKEN
    return run_client(Growing(), URL, tmp_path, "demo", token, "ward-7", transport=double.transport(wrap))


def kept(tmp_path: Path) -> dict[int, torch.Tensor]:
    found = [load_file(path) for path in sorted(tmp_path.glob("*/feedback/*"))]
    return {int(one["version"]): one["residual"] for one in found}


def expected_updates() -> list[torch.Tensor]:
    """One weight a round: the greatest of what has come together."""
    waiting, sent = torch.zeros(8), list[torch.Tensor]()
    for _ in range(N_ROUNDS):
        waiting = waiting + CHANGE
        update = torch.where(waiting == waiting.max(), waiting, 0.0)
        waiting = waiting - update
        sent.append(update)
    return sent


def assert_undisturbed(double: Double) -> None:
    for found, expected in zip(double.updates, expected_updates(), strict=True):
        torch.testing.assert_close(found, expected)


def test_what_was_left_out_is_added_to_the_next_change(tmp_path: Path) -> None:
    double = double_of()
    assert take_part(tmp_path, double).accepted == N_ROUNDS
    assert_undisturbed(double)
    states = kept(tmp_path)
    assert sorted(states) == [N_ROUNDS - 2, N_ROUNDS - 1], "the last two versions, and no more"
    torch.testing.assert_close(sum(double.updates) + states[N_ROUNDS - 1], N_ROUNDS * CHANGE)


def test_it_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    take_part(tmp_path, double_of())
    [folder] = tmp_path.glob("*/feedback")
    assert all(path.stat().st_mode & 0o77 == 0 for path in (folder, *folder.iterdir()))


@pytest.mark.parametrize("when", ["POST update", "PUT report", "after the report"])
def test_a_client_that_is_killed_in_every_round_sends_what_one_does_that_lives(tmp_path: Path, when: str) -> None:
    double, killed = double_of(), set[int]()

    def dying(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            is_now = kind_of(request) == when.replace("after the report", "PUT report")
            number = double.round
            told = handler(request) if is_now and when == "after the report" else None
            if is_now and number not in killed:
                killed.add(number)
                raise Crash
            return told or handler(request)

        return handle

    for _ in range(N_ROUNDS):
        with pytest.raises(Crash):
            take_part(tmp_path, double, dying)
    assert take_part(tmp_path, double).status == "finished"
    assert killed == {1, 2, 3, 4}
    assert_undisturbed(double)


def test_a_client_that_missed_a_version_begins_with_nothing_left_over(tmp_path: Path) -> None:
    double = double_of()

    def missing(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if kind_of(request) == "POST check-ins" and double.round == 3:
                double.round = 4  # others made a round without it
            return handler(request)

        return handle

    take_part(tmp_path, double, missing)
    first, second, _, _ = expected_updates()
    for found, expected in zip(double.updates, (first, second, first), strict=True):
        torch.testing.assert_close(found, expected)


def test_after_a_rollback_in_mid_round_nothing_is_left_over(tmp_path: Path) -> None:
    """The report was accepted, but the next version is a copy of an old one, and the round is tried again."""
    double, rolled = double_of(), list[int]()

    def rolling(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            told = handler(request)
            if kind_of(request) == "PUT report" and double.round == 3 and not rolled:
                rolled.append(double.round)
                double.repeats_round(2)
            return told

        return handle

    take_part(tmp_path, double, rolling)
    first, second, _, _ = expected_updates()
    for found, expected in zip(double.updates[:3], (first, second, first), strict=True):
        torch.testing.assert_close(found, expected)


def test_an_update_of_an_attempt_that_was_abandoned_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its report was accepted, and another attempt, without this client, has made the next version."""
    double = double_of()

    def abandoning(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if kind_of(request) == "PUT report" and double.round == 2:
                double.uncounted.add(request.url.path.split("/")[-2])
            return handler(request)

        return handle

    assert take_part(tmp_path, double, abandoning).accepted == N_ROUNDS
    first, second, _, _ = expected_updates()
    for found, expected in zip(double.updates, (first, second, first, second), strict=True):
        torch.testing.assert_close(found, expected)


def test_an_update_that_did_not_count_leaves_nothing_behind(tmp_path: Path) -> None:
    double, late = double_of(), list[str]()

    def refusing(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if kind_of(request) == "PUT report" and double.round == 2 and not late:
                late.append(request.url.path)
                double.attempt += 1
                return answer({"outcome": "late", "reason": "the window was over"})
            return handler(request)

        return handle

    assert take_part(tmp_path, double, refusing).accepted == N_ROUNDS
    assert late
    assert_undisturbed(double)


def test_a_state_that_is_damaged_is_dropped_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = double_of()

    def damaging(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if kind_of(request) == "POST check-ins" and double.round == 2:
                for path in tmp_path.glob("*/feedback/*"):
                    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}")
            return handler(request)

        return handle

    take_part(tmp_path, double, damaging)
    first, second, third, _ = expected_updates()
    for found, expected in zip(double.updates, (first, first, second, third), strict=True):
        torch.testing.assert_close(found, expected)
    assert "the residual of error feedback cannot be read, and is dropped" in caplog.text


@pytest.mark.parametrize("rest", [b"", b"\x08\0\0\0\0\0\0\0{}"])
def test_what_waits_beside_an_update_and_is_damaged_is_dropped_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rest: bytes
) -> None:
    """As by a disk that lost its power: the update counts, its report is answered, and the client goes on."""
    double = double_of()

    def damaging(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if kind_of(request) == "POST update" and double.round == 2:
                for path in tmp_path.glob("*/pending/feedback.safetensors"):
                    path.write_bytes(rest)
            return handler(request)

        return handle

    assert take_part(tmp_path, double, damaging).accepted == N_ROUNDS
    first, second, _, _ = expected_updates()
    for found, expected in zip(double.updates, (first, second, first, second), strict=True):
        torch.testing.assert_close(found, expected)
    assert "the residual of error feedback cannot be read, and is dropped" in caplog.text
    assert list(tmp_path.glob("*/pending/*")) == []


def test_it_is_on_disk_before_the_report_that_stands_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = list[str](), os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        sync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    take_part(tmp_path, double_of())
    ours = [name for name in synced if name in ("feedback.tmp", "report.json.tmp")]
    assert ours == ["feedback.tmp", "report.json.tmp"] * N_ROUNDS


def test_without_feedback_nothing_is_kept(tmp_path: Path) -> None:
    double = double_of(CodecPlan(Codec.TOPK, key=3, parameters={"share": 0.125, "precision": "float32"}))
    take_part(tmp_path, double)
    assert kept(tmp_path) == {}
    for update in double.updates:
        torch.testing.assert_close(update, double.updates[0])
