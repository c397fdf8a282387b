"""`umbel run export-trace`: a coordinator's own records become a trace that a simulation can be made of."""

import asyncio
import json
import math
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from tests.aggregation.run.test_trace import DONE, LOST, RECORD
from tests.client.cli.answers import operator_that_hears
from tests.client.cli.test_runs import RUN
from tests.contracts.test_audit import in_house, values_of
from tests.federations.audit_house import operating
from tests.federations.server_device import Device, House, run_file, small_state, update_for
from tests.sim.fleet.test_recorded import HONEST
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.records import Fate, RoundRecord, RunProgress
from umbel.client.cli.trace import export_trace
from umbel.client.errors import ClientError
from umbel.client.operator.operator import Operator
from umbel.sim import simulate
from umbel.sim.fleet.files import read_trace
from umbel.sim.fleet.recorded import recorded_fleet

N_CLIENTS = 3


async def play(it: House, layout: Layout, devices: list[Device], n_rounds: int, first: int = 1) -> None:
    """Rounds in which all devices report, with times as the SDK would tell them."""
    for number in range(first, first + n_rounds):
        await asyncio.gather(*(report(one, layout, number * 10 + i) for i, one in enumerate(devices)))
        await it.ended(number)


async def report(device: Device, layout: Layout, seed: int) -> None:
    assignment = await device.work(layout)
    await device.send("GET", f"/v1/models/{assignment['model']['sha256']}")
    update = update_for(assignment, layout, values_of(layout, seed))
    assert (await device.upload(assignment["id"], update)).status_code == 201
    told = {"train_s": 0.01, "upload_bytes_per_s": 5e4}
    answer = await device.report(assignment["id"], update, **told)
    assert answer.status_code == 200, answer.text


@pytest.mark.usefixtures("any_database_in_time")
def test_a_run_under_way_becomes_a_trace_that_a_fleet_can_be_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"

    async def act(it: House) -> None:
        layout = await it.begin(run_file(count=9, target=N_CLIENTS), small_state())
        await play(it, layout, await it.devices(N_CLIENTS), 2)
        await operating(it, lambda operator: export_trace(operator, ["demo"], out, force=False, as_json=False))

    in_house(tmp_path / "data", act)
    trace = read_trace(out)
    assert trace.clients == N_CLIENTS
    assert [(one.round, one.committed, one.reports_wanted, one.reports_needed) for one in trace.attempts] == [
        (1, True, 3, 1),
        (2, True, 3, 1),
    ]
    for attempt in trace.attempts:
        assert [one.fate for one in attempt.clients] == [Fate.ACCEPTED] * N_CLIENTS
        assert all(one.train_s == 0.01 and one.upload_bytes_per_s == 5e4 for one in attempt.clients)
        assert attempt.bytes_up == sum(one.bytes_up for one in attempt.clients) > 0
    assert recorded_fleet(trace, 1, HONEST).speed.unit == "step"
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    for name in ("demo", "d0", "d1", "d2"):
        assert f'"{name}"' not in out.read_text()
    told = capsys.readouterr().out
    assert "3 clients in 2 attempts at rounds, 2 committed" in told
    assert f'[fleet] recorded = "{out}"' in told
    assert "unknown" not in told


def test_a_run_of_which_nothing_has_ended_and_one_that_there_is_not_are_told_apart(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"

    async def act(it: House) -> None:
        await it.begin(run_file(), small_state())

        def export(operator: Operator) -> None:
            with pytest.raises(ValueError, match="demo: no training attempt with invited clients has ended yet"):
                export_trace(operator, ["demo"], out, force=False, as_json=False)
            with pytest.raises(ClientError, match="nowhere"):
                export_trace(operator, ["nowhere"], out, force=False, as_json=False)

        await operating(it, export)

    in_house(tmp_path / "data", act)
    assert not out.exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_file_that_is_there_is_written_over_only_when_told_to(tmp_path: Path, force: bool) -> None:
    out, asked = tmp_path / "trace.json", list[str]()
    out.write_text("mine")
    operator = operator_that_hears({"GET /runs/ward/progress": pages(RECORD)}, asked)
    if force:
        export_trace(operator, ["ward"], out, force=True, as_json=False)
        assert read_trace(out).clients == 3
        return
    with pytest.raises(ValueError, match="--force"):
        export_trace(operator, ["ward"], out, force=False, as_json=False)
    assert (out.read_text(), asked) == ("mine", [])


def pages(*records: RoundRecord) -> list[RunProgress]:
    """A page for each, and the last, which has none."""
    found = [RunProgress(RUN, (record,), number, None) for number, record in enumerate(records, 1)]
    return [*found, RunProgress(RUN, (), len(records), None)]


def test_runs_of_the_same_clients_become_one_trace_in_the_order_of_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = [replace(RECORD, round=1, opened_at=1e9 + 100 * i) for i in range(4)]
    evaluation = replace(at[1], task=Task.EVALUATION)
    answers = {
        "GET /runs/ward/progress": pages(at[0], evaluation, at[2]),
        "GET /runs/later/progress": pages(at[1], at[3]),
    }
    out = tmp_path / "trace.json"
    export_trace(operator_that_hears(answers), ["ward", "later"], out, force=False, as_json=True)
    assert [one.opened_at for one in read_trace(out).attempts] == [one.opened_at for one in at]
    assert read_trace(out).clients == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["runs"], told["attempts_ended"], told["attempts"]) == (["ward", "later"], 5, 4)
    with pytest.raises(ValueError, match="named twice"):
        export_trace(operator_that_hears({}), ["ward", "ward"], tmp_path / "t.json", force=False, as_json=True)


def test_what_a_trace_does_not_tell_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masked = replace(DONE, train_s=None, upload_bytes_per_s=None, steps_done=0, steps_planned=0)
    secure = replace(RECORD, secure=True, clients=(masked, LOST), absent=None)
    operator = operator_that_hears({"GET /runs/ward/progress": pages(secure, replace(RECORD, away_s=9.0))})
    export_trace(operator, ["ward"], tmp_path / "trace.json", force=False, as_json=False)
    told = capsys.readouterr().out
    assert "left out: 1 attempt without training times" in told
    assert "how long clients trained, in 1 of 1 report, whose updates were masked" in told
    assert "but not another codec" in told
    assert "which clients were absent, in 1 of 1 attempt" in told


def test_a_folder_that_there_is_not_is_named_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        export_trace(operator_that_hears({}), ["ward"], tmp_path / "nowhere" / "t.json", force=True, as_json=True)


N_SITES, N_ROUNDS, UPLOAD_RATE = 6, 5, 5e4


async def live(device: Device, layout: Layout, train_s: float) -> None:
    """Train for so long in each round until the run is over; come too late for it, if need be."""
    while True:
        answer = (await device.check_in(layout)).json()
        if answer["run_status"] == "finished":
            return
        if not (assignment := answer["assignment"]):
            continue
        await device.send("GET", f"/v1/models/{assignment['model']['sha256']}")
        await asyncio.sleep(train_s)
        update = update_for(assignment, layout, values_of(layout, assignment["round"]))
        if (await device.upload(assignment["id"], update)).status_code == 201:
            await device.report(assignment["id"], update, train_s=train_s, upload_bytes_per_s=UPLOAD_RATE)


@pytest.mark.slow
def test_a_real_federation_becomes_a_trace_and_the_trace_a_fleet_that_answers_alike(tmp_path: Path) -> None:
    """Four of six sites are enough, so two are too late each time; then it is asked what two would have done."""
    out = tmp_path / "trace.json"

    async def act(it: House) -> None:
        layout = await it.begin(run_file(count=N_ROUNDS, target=4, over_selection=1.5), small_state())
        sites = await it.devices(N_SITES)
        await asyncio.gather(*(live(one, layout, 0.05 * (i + 1)) for i, one in enumerate(sites)))
        await operating(it, lambda operator: export_trace(operator, ["demo"], out, force=False, as_json=False))

    in_house(tmp_path / "data", act)
    experiment = {
        "name": "what-if",
        "data": {"name": "digits"},
        "partition": {"scheme": "iid", "clients": N_SITES},
        "model": {"name": "mlp", "hidden": [8]},
        "fleet": {"recorded": str(out)},
        "rounds": {"count": 2, "target": 4, "over_selection": 1.5, "window_s": 600.0},
        "training": {"local_steps": 4},
        "sweep": {"rounds.target": [4, 2]},
        "seeds": [0, 1],
    }
    (found,) = simulate(experiment).against
    recorded, again = found.calibration.courses
    assert (recorded.clients, recorded.attempts) == (N_SITES, N_ROUNDS)
    errors = {one.what: one for one in found.errors}
    for one in errors.values():
        assert math.isfinite(one.recorded), one
        assert math.isfinite(one.simulated.mean), one
    for what in ("committed", "clients asked", "reports in"):
        assert errors[what].relative == 0.0, errors[what]
    assert (again.update_bytes, again.fetched_bytes) == (recorded.update_bytes, recorded.fetched_bytes)
    for what in ("bytes up", "bytes down"):  # of those who were stopped, more or less had moved
        error = errors[what].relative
        assert error is not None
        assert abs(error) < 0.5, errors[what]
    assert 0.05 < errors["report after, median client"].simulated.mean < 60.0
    same, two = found.points
    assert (same.unlike, two.unlike) == ((), ("target 2, not 4",))
    assert all("bytes of an update" in one.work_unlike[0] for one in found.points), "another model than the sites'"
    assert same.recorded_work is None
    assert two.recorded_work is not None
    assert (two.recorded_work.asked, two.recorded_work.reports) == (3.0, 2.0)
    assert two.recorded_work.update_bytes == recorded.update_bytes
