"""Resumable uploads: cut, resumed, repeated, begun again; what counts is whole chunks that match their digests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.federations.server_device import (
    Device,
    House,
    house,
    problem,
    repr_digest,
    rows,
    run_file,
    sha256,
    small_state,
    stored_update,
    stored_updates,
    update_of,
)
from umbel.aggregation.update.wire import least_chunk_bytes
from umbel.server.runs import uploads
from umbel.server.runs.uploads import EACH_MAX
from umbel.server.sums import updates

pytestmark = pytest.mark.usefixtures("any_database_in_time")

Test = Callable[[House, Device, str, bytes], Awaitable[None]]


def with_assignment(data: Path, test: Test) -> None:
    """Run `test` with a device that has an assignment, and an update for it."""

    async def scenario() -> None:
        async with house(data) as it:
            layout = await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            assignment = await device.work(layout)
            await test(it, device, assignment["id"], update_of(layout, torch.full((layout.n_values,), 0.5)))

    asyncio.run(scenario())


async def begin(device: Device, assignment: str, update: bytes, n_bytes: int) -> int:
    fields = {"Upload-Length": str(len(update)), "Upload-Complete": "?0", "Repr-Digest": repr_digest(update)}
    answer = await device.send("POST", f"/v1/assignments/{assignment}/update", update[:n_bytes], fields)
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/v1/assignments/{assignment}/update"
    return int(answer.headers["upload-offset"])


async def look(device: Device, assignment: str) -> tuple[int, str, str]:
    answer = await device.send("HEAD", f"/v1/assignments/{assignment}/update")
    assert answer.status_code == 204
    return answer.status_code, answer.headers["upload-offset"], answer.headers["upload-complete"]


def test_an_update_in_three_chunks_counts(tmp_path: Path) -> None:
    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        assert await begin(device, assignment, update, 70) == 70
        answer = await device.patch(assignment, update[70:100], 70, is_last=False)
        assert (answer.status_code, answer.headers["upload-offset"]) == (204, "100")
        assert await look(device, assignment) == (204, "100", "?0")
        answer = await device.patch(assignment, update[100:], 100, is_last=True)
        assert (answer.status_code, answer.headers["upload-complete"]) == (204, "?1")
        assert (await device.report(assignment, update)).json()["outcome"] == "accepted"
        [record] = await it.ended(1)
        assert record["bytes_up"] == len(update)

    with_assignment(tmp_path, test)


def test_a_chunk_that_was_cut_does_not_count_and_the_upload_goes_on(tmp_path: Path) -> None:
    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        await begin(device, assignment, update, 70)
        before = rows(it.settings)
        url, chunk = f"/v1/assignments/{assignment}/update", update[70:]

        async def cut() -> AsyncIterator[bytes]:
            yield chunk[:10]

        fields = {
            "Content-Type": "application/partial-upload",
            "Content-Length": str(len(chunk)),
            "Upload-Offset": "70",
            "Upload-Complete": "?1",
        }
        headers = {**device.headers("PATCH", url, chunk), **fields}
        assert problem(await device.http.request("PATCH", url, content=cut(), headers=headers)) == "lying-length"
        assert rows(it.settings) == before
        assert await look(device, assignment) == (204, "70", "?0")
        assert (await device.patch(assignment, chunk, 70, is_last=True)).status_code == 204
        assert (await device.report(assignment, update)).status_code == 200

    with_assignment(tmp_path, test)


def test_a_chunk_from_the_wrong_place_is_told_the_right_one(tmp_path: Path) -> None:
    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        await begin(device, assignment, update, 70)
        answer = await device.patch(assignment, update[60:], 60, is_last=True)
        assert problem(answer) == "mismatching-upload-offset"
        assert answer.headers["upload-offset"] == "70"

    with_assignment(tmp_path, test)


def test_a_chunk_that_is_too_short_is_refused_unless_it_is_the_rest(tmp_path: Path) -> None:
    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        least = least_chunk_bytes(len(update))
        await begin(device, assignment, update, 70)
        before = rows(it.settings)
        for n_bytes in (1, least - 1):
            answer = await device.patch(assignment, update[70 : 70 + n_bytes], 70, is_last=False)
            assert problem(answer) == "short-chunk"
        assert rows(it.settings) == before
        end = len(update) - 1
        for first, last in ((70, 70 + least), (70 + least, end)):
            assert (await device.patch(assignment, update[first:last], first, is_last=False)).status_code == 204
        assert (await device.patch(assignment, update[end:], end, is_last=False)).status_code == 204
        assert (await device.patch(assignment, b"", len(update), is_last=True)).status_code == 204
        assert (await device.report(assignment, update)).json()["outcome"] == "accepted"

    with_assignment(tmp_path, test)


def test_a_coordinator_that_takes_short_chunks_only_takes_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, chunk_bytes_max=4096) as it:
            layout = await it.begin(run_file(target=1), {"weight": torch.zeros(300_000)})
            [device] = await it.devices(1)
            assignment, update = (await device.work(layout))["id"], update_of(layout, torch.ones(layout.n_values))
            assert least_chunk_bytes(len(update)) > 4096
            assert await begin(device, assignment, update, 4096) == 4096
            assert problem(await device.patch(assignment, update[4096:6000], 4096, is_last=False)) == "short-chunk"
            assert (await device.patch(assignment, update[4096:6144], 4096, is_last=False)).status_code == 204

    asyncio.run(scenario())


def test_of_a_client_s_chunks_under_way_a_third_takes_the_place_of_the_oldest(tmp_path: Path) -> None:
    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        url, chunk = f"/v1/assignments/{assignment}/update", update[70:]
        first_sent, end = asyncio.Event(), asyncio.Event()
        await begin(device, assignment, update, 70)

        async def without_end() -> AsyncIterator[bytes]:
            yield chunk[:10]
            first_sent.set()
            await end.wait()
            yield chunk[10:]

        async def send() -> httpx.Response:
            fields = {
                "Content-Type": "application/partial-upload",
                "Content-Length": str(len(chunk)),
                "Upload-Offset": "70",
                "Upload-Complete": "?1",
            }
            headers = {**device.headers("PATCH", url, chunk), **fields}
            return await device.http.request("PATCH", url, content=without_end(), headers=headers)

        older: list[asyncio.Task[httpx.Response]] = []
        for _ in range(EACH_MAX):
            older.append(asyncio.create_task(send()))
            await first_sent.wait()
            first_sent.clear()
        assert (await device.patch(assignment, chunk, 70, is_last=True)).status_code == 204
        answer = await older[0]
        assert (problem(answer), answer.headers["connection"]) == ("too-many-chunks", "close")
        end.set()
        assert problem(await older[1]) == "mismatching-upload-offset"
        assert (await device.report(assignment, update)).json()["outcome"] == "accepted"

    with_assignment(tmp_path, test)


def test_a_whole_upload_may_come_again_but_no_other(tmp_path: Path) -> None:
    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        first = await device.upload(assignment, update)
        again = await device.upload(assignment, update)
        assert first.status_code == again.status_code == 201
        assert first.headers["upload-offset"] == again.headers["upload-offset"] == str(len(update))
        before = rows(it.settings)
        assert problem(await device.upload(assignment, update[:-4] + bytes(4))) == "upload-complete"
        wrong = await device.report(assignment, update, update_sha256=sha256(b"another"))
        assert problem(wrong) == "report-refused"
        assert rows(it.settings) == before

    with_assignment(tmp_path, test)


def test_a_begun_upload_may_be_begun_again_or_forgotten(tmp_path: Path) -> None:
    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        await begin(device, assignment, update, 100)
        assert await begin(device, assignment, update, 70) == 70
        url = f"/v1/assignments/{assignment}/update"
        assert (await device.send("DELETE", url)).status_code == 204
        assert (await device.send("HEAD", url)).status_code == 404
        assert problem(await device.send("DELETE", url)) == "unknown-upload"
        assert (await device.upload(assignment, update)).status_code == 201

    with_assignment(tmp_path, test)


def test_an_update_with_a_nan_in_its_first_chunk_is_forgotten_at_its_last(tmp_path: Path) -> None:
    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        bad = update[:64] + b"\x00\x00\xc0\x7f" + update[68:]
        await begin(device, assignment, bad, 80)
        answer = await device.patch(assignment, bad[80:], 80, is_last=True)
        assert problem(answer) == "non-finite-update"
        assert (await device.send("HEAD", f"/v1/assignments/{assignment}/update")).status_code == 404
        assert stored_updates(it.settings) == []
        assert (await device.upload(assignment, update)).status_code == 201

    with_assignment(tmp_path, test)


def test_of_two_requests_for_one_part_the_first_to_be_whole_counts(tmp_path: Path) -> None:
    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        await begin(device, assignment, update, 70)
        url, chunk = f"/v1/assignments/{assignment}/update", update[70:]
        half_sent, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield chunk[:10]
            half_sent.set()
            await go_on.wait()
            yield chunk[10:]

        fields = {
            "Content-Type": "application/partial-upload",
            "Content-Length": str(len(chunk)),
            "Upload-Offset": "70",
            "Upload-Complete": "?1",
        }
        headers = {**device.headers("PATCH", url, chunk), **fields}
        older = asyncio.create_task(device.http.request("PATCH", url, content=slow(), headers=headers))
        await half_sent.wait()
        assert (await device.patch(assignment, chunk, 70, is_last=True)).status_code == 204
        go_on.set()
        assert problem(await older) == "mismatching-upload-offset"
        assert (await device.report(assignment, update)).json()["outcome"] == "accepted"

    with_assignment(tmp_path, test)


def test_a_superseded_request_cannot_touch_the_update_that_was_checked(tmp_path: Path) -> None:
    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        url, poisoned = (
            f"/v1/assignments/{assignment}/update",
            update[:64] + b"\x00\x60\x6a\x46" * (len(update) // 4 - 16),
        )
        most_sent, go_on = asyncio.Event(), asyncio.Event()

        async def stalling() -> AsyncIterator[bytes]:
            yield poisoned[:-1]
            most_sent.set()
            await go_on.wait()

        fields = {
            "Content-Length": str(len(poisoned)),
            "Upload-Length": str(len(poisoned)),
            "Upload-Complete": "?1",
            "Repr-Digest": repr_digest(poisoned),
        }
        headers = {**device.headers("POST", url, poisoned), **fields}
        older = asyncio.create_task(device.http.request("POST", url, content=stalling(), headers=headers))
        await most_sent.wait()
        assert (await device.upload(assignment, update)).status_code == 201
        go_on.set()
        await older
        [file] = stored_update(it.settings, assignment)
        assert file.read_bytes() == update
        assert (await device.report(assignment, update)).json()["outcome"] == "accepted"

    with_assignment(tmp_path, test)


def test_an_upload_begun_again_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        await begin(device, assignment, update, 70)
        assert (await device.upload(assignment, update)).status_code == 201
        [file] = stored_updates(it.settings)
        assert file.read_bytes() == update

    with_assignment(tmp_path, test)


def test_of_many_requests_that_finish_one_upload_only_one_checks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = 0
    real = updates.check_update

    def counted(*arguments: Any) -> None:
        nonlocal checks
        checks += 1
        real(*arguments)

    monkeypatch.setattr(uploads, "check_update", counted)

    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        await begin(device, assignment, update, len(update))
        ends = (device.patch(assignment, b"", len(update), is_last=True) for _ in range(12))
        statuses = sorted([answer.status_code for answer in await asyncio.gather(*ends)])
        assert statuses[0] == 204
        assert set(statuses) <= {204, 409, 503}
        assert checks == 1

    with_assignment(tmp_path, test)


def test_an_address_with_a_nul_is_refused(tmp_path: Path) -> None:
    async def test(it: House, device: Device, assignment: str, update: bytes) -> None:
        assert problem(await device.send("GET", f"/v1/assignments/{assignment}%00")) == "malformed-request"

    with_assignment(tmp_path, test)
