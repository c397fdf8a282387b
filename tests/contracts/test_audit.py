"""Audit bundles end to end: what a coordinator signs, an auditor verifies and makes again; what is tampered with."""

import asyncio
import json
import re
import sqlite3
import stat
from collections.abc import Awaitable, Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load

from tests.federations.audit_house import bundles, operating
from tests.federations.server_device import (
    Device,
    House,
    house,
    problem,
    run_file,
    small_state,
    stored_updates,
    update_of,
)
from tests.servers.waits import until
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import STEPS, HasMean, ServerStep, slot_name, write_next
from umbel.aggregation.model.state import Values
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.client.cli.audit import audit_run, replay_run, verify_file
from umbel.client.operator.operator import Operator

N_CLIENTS = 3
NUMBER_MAX = (1 << 31) - 1  # PostgreSQL's integer column holds no more


def values_of(layout: Layout, seed: int) -> torch.Tensor:
    return torch.randn(layout.n_values, generator=torch.Generator().manual_seed(seed))


async def play(it: House, updates: str, rounds: int = 2, more: str = "", last: int | None = None) -> list[Device]:
    """A run of some rounds, over; its devices. `more`: of [aggregation]. `last`: the last round that is played."""
    text = run_file(count=rounds, target=N_CLIENTS) + f'[retention]\nupdates = "{updates}"\n'
    await it.begin(text.replace("[aggregation]", f"[aggregation]\n{more}"), small_state())
    devices = await it.devices(N_CLIENTS)
    for number in range(rounds if last is None else last):
        await train(it, devices, number)
    return devices


async def train(it: House, devices: list[Device], number: int) -> None:
    """Round `number`, from 0."""
    layout = Layout.of_state(small_state())
    await asyncio.gather(*(one.take_part(layout, values_of(layout, 10 * number + i)) for i, one in enumerate(devices)))
    await it.ended(number + 1)


def in_house(data: Path, act: Callable[[House], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with house(data) as it:
            await act(it)

    asyncio.run(scenario())


@contextmanager
def failing() -> Generator[None]:
    with pytest.raises(typer.Exit) as raised:
        yield
    assert raised.value.exit_code == 1


@pytest.mark.usefixtures("any_database_in_time")
def test_a_run_is_verified_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def act(it: House) -> None:
        await play(it, "all")
        await operating(it, lambda operator: replay_run(operator, "demo", all_=True))
        out = tmp_path / "audit.jsonl"
        await operating(it, lambda operator: audit_run(operator, "demo", out))
        key = (await it.http.get("/v1/audit-key")).json()["public_key"]
        head = (await it.http.get("/v1/admin/runs/demo", headers=it.admin)).json()["audit_head"]
        assert head == (await bundles(it))[-1]["sha256"]
        verify_file(out, [key], [head], as_json=True)

    in_house(tmp_path / "data", act)
    told = capsys.readouterr().out
    assert told.count("the same hash") == 2
    assert "3 bundles are verified, 2 committed rounds, 6 reports with their clients' signatures" in told
    assert "pass the key with --key" in told
    assert stat.S_IMODE((tmp_path / "data" / "audit.key").stat().st_mode) == 0o600


def test_before_its_first_round_an_audit_and_a_replay_say_what_to_type_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def act(it: House) -> None:
        await it.begin(run_file(), small_state())
        await operating(it, lambda operator: audit_run(operator, "demo"))
        with failing():
            await operating(it, lambda operator: replay_run(operator, "demo", all_=True))

    in_house(tmp_path, act)
    told = capsys.readouterr()
    assert "demo: 1 bundle is verified, 0 committed rounds, 0 reports with their clients' signatures\n" in told.out
    assert "privacy" not in told.out
    assert "member list" not in told.out
    assert "umbel run watch demo" in told.out
    assert "umbel run show demo" in told.err


@pytest.mark.parametrize("content", [None, ""])
def test_a_file_without_bundles_is_told_from_one_that_was_tampered_with(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "a.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"umbel run audit NAME --out {file}")):
        verify_file(file, [public_key_text(bytes(32))])


def test_a_part_of_a_head_is_told_from_a_head_that_is_not_there(tmp_path: Path) -> None:
    async def act(it: House) -> None:
        await it.begin(run_file(), small_state())
        head = (await bundles(it))[0]["sha256"]

        def audit(operator: Operator) -> None:
            with pytest.raises(ValueError, match="must be 64 lower-case hex digits"):
                audit_run(operator, "demo", head=[head[:16]], as_json=False)
            audit_run(operator, "demo", head=[head], as_json=False)

        await operating(it, audit)

    in_house(tmp_path, act)


def test_updates_that_are_not_kept_leave_a_chain_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def act(it: House) -> None:
        await play(it, "none")
        with failing():
            await operating(it, lambda operator: replay_run(operator, "demo", 1))
        await until("a store without updates", lambda: not stored_updates(it.settings))
        gone = await it.http.get("/v1/admin/runs/demo/audit/1/updates/d0", headers=it.admin)
        assert problem(gone) == "unknown-upload"

    in_house(tmp_path, act)
    told = capsys.readouterr()
    assert "3 bundles are verified" in told.out
    assert (
        "round 1 cannot be computed again: its updates were deleted when the round had ended: the run file says "
        'retention.updates = "none"' in told.err
    )


@pytest.mark.usefixtures("any_database_in_time")
def test_updates_are_kept_for_as_many_rounds_as_the_policy_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def act(it: House) -> None:
        await play(it, "2 rounds", rounds=3)
        lines = await bundles(it)
        assert [one["bundle"]["facts"].get("updates", {}).get("deleted") for one in lines] == [None, [], [], [1]]
        assert [one["updates_deleted_at"] is None for one in lines] == [True, False, True, True]
        with failing():
            await operating(it, lambda operator: replay_run(operator, "demo", all_=True))

    in_house(tmp_path, act)
    told = capsys.readouterr()
    assert told.out.count("the same hash") == 2
    assert "round 1 cannot be computed again: its updates were deleted at 20" in told.err
    assert "by the run's policy, retention.updates = '2 rounds'\n" in told.err

    async def again(it: House) -> None:
        await operating(it, lambda operator: replay_run(operator, "demo", 3))

    in_house(tmp_path, again)  # the sweep at the start keeps what is kept


def test_an_update_that_was_changed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def act(it: House) -> None:
        await play(it, "all", rounds=1)
        path = next(path for path in stored_updates(it.settings) if ".d1" in str(path))
        data = bytearray(path.read_bytes())
        data[70] ^= 1
        path.write_bytes(data)
        with failing():
            await operating(it, lambda operator: replay_run(operator, "demo", 1))
        path.unlink()
        with failing():
            await operating(it, lambda operator: replay_run(operator, "demo", 1))

    in_house(tmp_path, act)
    assert "round 1: the update of d1 was changed" in capsys.readouterr().err


def test_a_model_that_was_changed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def act(it: House) -> None:
        await play(it, "all", rounds=1)
        [_, line] = await bundles(it)
        path = tmp_path / "blobs" / "models" / line["bundle"]["facts"]["model_in"]["master_sha256"]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)
        with failing():
            await operating(it, lambda operator: replay_run(operator, "demo", 1))

    in_house(tmp_path, act)
    assert "the downloaded model does not have the SHA-256" in capsys.readouterr().err


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_coordinator_that_remembers_something_else_than_it_must_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """The published model is right, and what the server's optimizer remembers for the next round is not."""

    def forge(layout: Layout, start: Values, mean: HasMean, step: ServerStep, public: Values, master: Values) -> None:
        write_next(layout, start, mean, step, public, master)
        slot = slot_name(next(iter(step.optimizer.first)), "embed.weight")
        master.write(slot, 3, master.read(slot, torch.float32, 3, 1) + 1.0)

    async def act(it: House) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("umbel.server.sums.model_files.write_next", forge)
            await play(it, "all", rounds=1, more=f'optimizer = "{optimizer}"')
        await operating(it, lambda operator: audit_run(operator, "demo"))
        with failing():
            await operating(it, lambda operator: replay_run(operator, "demo", 1))

    in_house(tmp_path, act)
    assert "round 1: the computed full-precision model has the hash" in capsys.readouterr().err


@pytest.mark.usefixtures("any_database_in_time")
def test_a_run_whose_optimizer_remembers_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over a restart in its middle: what is remembered lies beside the model."""
    more = 'optimizer = "adam"\nbias_correction = true\nschedule = { name = "cosine", warm_up_rounds = 1 }'

    devices = list[Device]()

    async def first(it: House) -> None:
        devices.extend(await play(it, "all", more=more, rounds=3, last=2))

    async def act(it: House) -> None:
        for device in devices:
            device.http = it.http
        await train(it, devices, 2)
        await operating(it, lambda operator: replay_run(operator, "demo", all_=True))
        facts = [one["bundle"]["facts"] for one in await bundles(it)]
        assert [one["server_learning_rate"] for one in facts[1:]] == [0.01, 0.01, 0.005]
        start = await it.http.get("/v1/admin/runs/demo/audit/3/model", headers=it.admin)
        master = load(start.content)
        assert master[STEPS].item() == 2
        assert master[slot_name("second_moment", "half.weight")].dtype is torch.float32

    in_house(tmp_path, first)
    in_house(tmp_path, act)
    assert capsys.readouterr().out.count("the same hash") == 3


def test_a_model_with_names_of_what_an_optimizer_remembers_makes_no_run_with_one(tmp_path: Path) -> None:
    async def act(it: House) -> None:
        state = {**small_state(), "umbel.steps": torch.zeros(1)}
        sha256 = await it.put_model(state)
        text = run_file().replace("[aggregation]", '[aggregation]\noptimizer = "adam"')
        refused = await it.put_run(text, sha256)
        assert problem(refused) == "malformed-request"
        assert "'umbel.steps' has a name that begins with" in refused.json()["detail"]
        assert (await it.put_run(run_file(), sha256)).status_code == 201

    in_house(tmp_path, act)


def _execute(data: Path, *statements: str) -> None:
    with closing(sqlite3.connect(data / "umbel.db")) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE audits SET bundle = replace(bundle, '\"round\":1', '\"round\":7') WHERE number = 1", "it was changed"),
        ("UPDATE audits SET sha256 = (SELECT sha256 FROM audits WHERE number = 0) WHERE number = 1", "it was changed"),
        ("UPDATE audits SET signature = (SELECT signature FROM audits WHERE number = 0) WHERE number = 1", "signature"),
        (
            "DELETE FROM audits WHERE number = 1",
            "bundle 1 (round 2): it has number 2 instead of 1: a bundle is missing",
        ),
        ("DELETE FROM audits WHERE number = 2", "bundles are missing, or were replaced"),
        ("DELETE FROM audits WHERE number = 0", "bundle 0 (round 1): it has number 1 instead of 0"),
        (
            "UPDATE audits SET number = CASE number WHEN 1 THEN 12 ELSE 11 END WHERE number > 0",
            "bundle 1 (round 2): it has number 2 instead of 1",
        ),
    ],
)
def test_what_is_changed_in_the_database_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], statement: str, said: str
) -> None:
    async def prepare(it: House) -> None:
        await play(it, "none")

    async def act(it: House) -> None:
        with failing():
            await operating(it, lambda operator: audit_run(operator, "demo"))

    in_house(tmp_path, prepare)
    _execute(tmp_path, statement)
    in_house(tmp_path, act)
    assert said in capsys.readouterr().err


def test_a_chain_cut_off_together_with_its_head_is_noticed_by_who_noted_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = ""

    async def prepare(it: House) -> None:
        nonlocal noted
        await play(it, "none")
        noted = (await bundles(it))[-1]["sha256"]

    async def act(it: House) -> None:
        await operating(it, lambda operator: audit_run(operator, "demo", as_json=True))
        with failing():
            await operating(it, lambda operator: audit_run(operator, "demo", head=[noted], as_json=True))

    in_house(tmp_path, prepare)
    cut = "UPDATE runs SET audit_number = 1, audit_sha256 = (SELECT sha256 FROM audits WHERE number = 1)"
    _execute(tmp_path, "DELETE FROM audits WHERE number = 2", cut)
    in_house(tmp_path, act)
    assert f"no bundle of this chain has the noted hash {noted[:16]}…" in capsys.readouterr().err


def test_another_key_than_the_pinned_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def act(it: House) -> None:
        await play(it, "none", rounds=1)
        pinned = [public_key_text(Ed25519PrivateKey.generate().public_key().public_bytes_raw())]
        with failing():
            await operating(it, lambda operator: audit_run(operator, "demo", key=pinned))

    in_house(tmp_path, act)
    assert "which is not trusted" in capsys.readouterr().err


def test_a_key_that_was_replaced_in_mid_run_is_seen_and_may_be_trusted_beside_the_old_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def first(it: House) -> None:
        await it.begin(run_file(target=1), small_state())

    async def act(it: House) -> None:
        [device] = await it.devices(1)
        layout = Layout.of_state(small_state())
        await device.take_part(layout, values_of(layout, 1))
        await it.ended(1)
        with failing():
            await operating(it, lambda operator: audit_run(operator, "demo"))
        keys = [one["bundle"]["key"] for one in await bundles(it)]
        assert len(set(keys)) == 2
        await operating(it, lambda operator: audit_run(operator, "demo", key=keys))

    in_house(tmp_path, first)
    (tmp_path / "audit.key").unlink()
    in_house(tmp_path, act)
    assert "bundle 0: it names the audit key" in capsys.readouterr().err


def test_every_attempt_has_its_bundle_and_a_restart_goes_on_with_the_chain(tmp_path: Path) -> None:
    async def begin(it: House) -> None:
        layout = await it.begin(run_file(count=2, target=2, minimum=2, window_s=60.0), small_state())
        devices = await it.devices(2)
        await asyncio.gather(*(one.work(layout) for one in devices))
        for one in devices:
            answer = await one.send(
                "PUT", f"/v1/assignments/demo.1.1.{one.name}/decline", json.dumps({"reason": "no data"}).encode()
            )
            assert answer.status_code == 204
        await it.ended(1)

    async def go_on(it: House) -> None:
        stopped = await it.http.post("/v1/admin/runs/demo/stop", json={"reason": "enough"}, headers=it.admin)
        assert stopped.status_code == 200
        await it.ended(2)
        lines = await bundles(it)
        facts = [one["bundle"]["facts"] for one in lines]
        assert [(one.get("round"), one.get("attempt")) for one in facts] == [(None, None), (1, 1), (1, 2)]
        assert next(one["reason"] for one in facts[1]["clients"]) == "no data"
        assert not facts[1]["committed"]
        assert facts[2]["run_status"] == "stopped"
        await operating(it, lambda operator: audit_run(operator, "demo"))

    in_house(tmp_path, begin)
    in_house(tmp_path, go_on)


def test_a_report_to_an_address_in_another_spelling_is_refused(tmp_path: Path) -> None:
    async def act(it: House) -> None:
        layout = await it.begin(run_file(target=1), small_state())
        [device] = await it.devices(1)
        assignment = await device.work(layout)
        update = update_of(layout, values_of(layout, 1))
        assert (await device.upload(assignment["id"], update)).status_code == 201
        for url in (f"/v1/assignments/{assignment['id']}/report?a=1", "/v1/assignments/demo%2E1.1.d0/report"):
            body = {"sample_count": 10, "steps_done": 1, "steps_planned": 1, "update_sha256": "a" * 64}
            refused = await device.send("PUT", url, json.dumps(body).encode())
            assert problem(refused) == "malformed-request"
            assert "must be sent to exactly" in refused.json()["detail"]

    in_house(tmp_path, act)


def test_bundles_and_updates_are_the_operators_alone_and_the_key_is_anyones(tmp_path: Path) -> None:
    async def act(it: House) -> None:
        await play(it, "all", rounds=1)
        for path in ("", "/1/updates/d0", "/1/model"):
            refused = await it.http.get(f"/v1/admin/runs/demo/audit{path}")
            assert problem(refused) == "admin-key-refused"
        assert (await it.http.get("/v1/audit-key")).json()["algorithm"] == "ed25519"
        update = await it.http.get("/v1/admin/runs/demo/audit/1/updates/d0", headers=it.admin)
        assert update.content[:4] == b"UMBL"
        for path in ("/9/model", f"/{NUMBER_MAX}/model", f"/{NUMBER_MAX}/updates/d0"):
            unknown = await it.http.get(f"/v1/admin/runs/demo/audit{path}", headers=it.admin)
            assert problem(unknown) == "not-found"
        for path in (
            "/-1/model",
            f"/{NUMBER_MAX + 1}/model",
            f"/{NUMBER_MAX + 1}/updates/d0",
            f"?after={NUMBER_MAX + 1}",
        ):
            unfit = await it.http.get(f"/v1/admin/runs/demo/audit{path}", headers=it.admin)
            assert problem(unfit) == "malformed-request", path

    in_house(tmp_path, act)
