"""What an operator can read: every event in a line, no secret, nothing of a peer's that a terminal obeys."""

import asyncio
import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import Device, House, house, problem, run_file, small_state, update_of
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.server import journal
from umbel.server.journal import LineFormat, Throttle, listening, round_opened


def record(message: str, created: float = 0.0, name: str = "umbel.server.journal.refusals") -> logging.LogRecord:
    made = logging.makeLogRecord({"name": name, "levelno": logging.WARNING, "levelname": "WARNING", "msg": message})
    made.created = created
    return made


def test_a_round_from_the_first_enrolment_to_the_end_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> list[str]:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1), small_state())
            [token] = await it.tokens(1)
            device = Device(it.http, "north")
            await device.enrol(token, {"site": "north"})
            await device.take_part(layout, torch.zeros(layout.n_values))
            [ended] = await it.ended(1)
            assert problem(await device.report("demo.9.9.north", b"")) == "unknown-assignment"
            await it.http.delete("/v1/admin/clients/north", headers=it.admin)
            return [token, it.admin["Authorization"].removeprefix("Bearer "), ended["model_sha256"]]

    token, key, model = asyncio.run(scenario())
    for line in (
        r"started on .*; runs: 0",
        r"run demo created: 1 round from model [0-9a-f]{12}",
        r"made 1 enrolment token",
        r"client north enrolled \(labels: site=north\)",
        r"run demo round 1 attempt 1 opened: 1 client asked, updates as float32",
        rf"run demo round 1 attempt 1 committed after .* s: 1 of 1 client reported, .* lost: none; model {model[:12]} ",
        r"run demo finished: the one round is committed",
        r"refused PUT /v1/assignments/demo.9.9.north/report from north at 127.0.0.1: unknown-assignment: .*",
        r"client north removed",
        r"shut down",
    ):
        assert re.search(line, caplog.text), line
    assert token not in caplog.text
    assert key not in caplog.text


def test_a_stopped_run_and_its_abandoned_round_can_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            await device.work(layout)
            order = json.dumps({"reason": "enough"}).encode()
            await it.http.post("/v1/admin/runs/demo/stop", content=order, headers=it.admin)

    asyncio.run(scenario())
    assert re.search(r"round 1 attempt 1 abandoned .* 0 of 1 client reported.* model none \(.*enough", caplog.text)
    assert "run demo stopped: enough" in caplog.text
    assert "run demo: an operator at 127.0.0.1 ordered: stop (enough)" in caplog.text


def test_orders_are_told_with_their_reason_and_refusals_of_an_operator_as_such(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def order(it: House, verb: str, **body: object) -> None:
        await it.http.post(f"/v1/admin/runs/demo/{verb}", content=json.dumps(body).encode(), headers=it.admin)

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(count=2, target=1), small_state())
            [device] = await it.devices(1)
            await device.take_part(layout, torch.zeros(layout.n_values))
            await it.ended(1)
            await order(it, "pause", reason="night shift", now=True)
            await order(it, "rollback", to=7)
            await order(it, "rollback", to=0, reason="worse")
            await order(it, "resume")

    asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition("ordered: ")[2] for line in said if "ordered: " in line] == [
        "pause at once (night shift)",
        "rollback to version 0 (worse)",
        "resume",
    ]
    assert any("/rollback from an operator at 127.0.0.1: unknown-version: " in line for line in said)


def test_a_canary_and_an_evaluation_are_told_from_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    round_opened(replace(RunFile("demo", RoundsSection(1, 2)).first_plan(10), task=Task.EVALUATION), 2)

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1) + "[canary]\n", small_state())
            [device] = await it.devices(1)
            assignment = await device.work(layout)
            probe = {"steps_full": 4, "step_s": 0.1, "download_bytes_per_s": 1e6}
            update = update_of(layout, torch.zeros(layout.n_values))
            await device.upload(assignment["id"], update)
            answer = await device.report(assignment["id"], update, probe=probe)
            assert answer.status_code == 200, answer.text
            await it.ended(1)

    asyncio.run(scenario())
    assert "run demo evaluation of round 1, attempt 1 opened: 2 clients asked" in caplog.text
    assert "run demo canary of round 1, attempt 1 opened: 1 client asked, updates as float32" in caplog.text
    assert re.search(r"run demo canary of round 1, attempt 1 done after .*; lost: none; \(", caplog.text)


def test_who_is_refused_unverified_is_not_named_and_what_was_sent_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            guess = {"Authorization": "Bearer guessed-key"}
            assert problem(await it.http.get("/v1/admin/runs", headers=guess)) == "admin-key-refused"
            assert problem(await Device(it.http, "north").enrol("guessed-token")) == "unknown-token"
            assert problem(await it.http.post("/v1/check-ins", content=b"x" * 70_000)) == "body-too-large"

    asyncio.run(scenario())
    lines = [line.getMessage() for line in caplog.records if line.name.endswith(".refusals")]
    assert [line.split(": ")[:2] for line in lines] == [
        ["refused GET /v1/admin/runs from an unverified sender at 127.0.0.1", "admin-key-refused"],
        ["refused POST /v1/enrolments from an unverified sender at 127.0.0.1", "unknown-token"],
        ["refused POST /v1/check-ins from an unverified sender at 127.0.0.1", "body-too-large"],
    ]
    assert "guessed" not in caplog.text


def test_a_line_begins_with_date_and_time_and_holds_no_control_character() -> None:
    line = LineFormat().format(record("no \x1b[31mred\n2026-01-31T12:00:00+0000 INFO forged \ud800 ü"))
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} WARNING umbel\.server\.journal\.refusals: no ", line)
    assert r"\x1b[31mred\n2026" in line
    assert line.endswith(r"\ud800 ü")
    assert "\n" not in line


def test_a_traceback_cannot_pass_for_lines_of_the_log() -> None:
    made = record("failed")
    try:
        raise RuntimeError("first\n2026-01-31T12:00:00+0000 INFO forged \x1b[2J")
    except RuntimeError as error:
        made.exc_info = (type(error), error, error.__traceback__)
    first, *rest = LineFormat().format(made).split("\n")
    assert first.endswith("failed")
    assert all(line.startswith("  | ") for line in rest)
    assert "\x1b" not in "".join(rest)


@pytest.mark.parametrize(
    ("method", "kind", "level"),
    [
        ("PUT", "assignment-closed", logging.INFO),
        ("HEAD", "unknown-upload", logging.INFO),
        ("PATCH", "unknown-upload", logging.WARNING),
        ("PUT", "bad-signature", logging.WARNING),
    ],
)
def test_late_work_and_the_question_of_a_restarted_site_are_ordinary(
    caplog: pytest.LogCaptureFixture, method: str, kind: str, level: int
) -> None:
    caplog.set_level(logging.INFO)
    journal.refused({"method": method, "path": "/", "client": None}, kind, "the target was in")
    [line] = caplog.records
    assert line.levelno == level


def test_the_questions_of_a_handshake_are_no_refusals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A client tells its sample count, and applies the run's rules of tensors, only when it is asked to."""
    caplog.set_level(logging.DEBUG, logger="umbel.server.journal")

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file() + '[tensors]\nprivate = ["*.head"]\n', small_state())
            whole = Layout.of_state({**small_state(), "site.head": torch.zeros(3)})
            [device] = await it.devices(1)
            assert problem(await device.check_in(whole, wait_s=0.0)) == "wrong-layout"
            assert problem(await device.check_in(layout, wait_s=0.0, sample_count=0)) == "sample-count-needed"
            shown = {"run": "demo", "layout_digest": whole.digest, "layout": whole.to_json()}
            answer = await device.send("POST", "/v1/check-ins", json.dumps(shown | {"sample_count": 10}).encode())
            assert problem(answer) == "wrong-layout"

    asyncio.run(scenario())
    asked = [
        line for line in caplog.records if "asked d0 at 127.0.0.1 to repeat POST /v1/check-ins" in line.getMessage()
    ]
    assert [(line.levelno, line.getMessage().split(": ")[1]) for line in asked] == [
        (logging.DEBUG, "wrong-layout"),
        (logging.DEBUG, "sample-count-needed"),
    ]
    [refused] = [line.getMessage() for line in caplog.records if line.name.endswith(".refusals")]
    assert "tensor 'site.head' is not in the model" in refused


def test_refusals_are_thinned_out_and_the_others_counted() -> None:
    throttle = Throttle(lines_max=2, window_s=10.0)
    assert [throttle.filter(record("refused", at)) for at in (100.0, 101.0, 102.0, 109.0)] == [True, True, False, False]
    assert throttle.filter(record("a round", 109.0, name="umbel.server.journal"))
    later = record("refused", 110.0)
    assert throttle.filter(later)
    assert later.getMessage() == "refused (2 warnings were left out before this one)"
    assert throttle.filter(record("refused", 50.0)), "a clock that was set back starts a new window"


@pytest.mark.parametrize(
    ("host", "warns"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True), ("fe80::1%lo", True)]
)
def test_plain_http_that_others_can_reach_is_warned_of(
    host: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    listening(host)
    assert ("put TLS in front" in caplog.text) == warns
