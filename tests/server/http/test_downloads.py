"""Model downloads: entity tags, ranges, and the ranges that are none."""

import asyncio
import hashlib
from collections.abc import Generator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.federations.server_device import Device, House, house, problem, run_file, update_of
from tests.servers.s3_server import ANSWER_S, S3Server, Wire, bucket_fields, s3_server
from umbel.aggregation.model.artifact import encode_model
from umbel.server.blobs import s3
from umbel.server.blobs.local import LocalBlobs
from umbel.server.http.downloads import MEDIA_TYPE, Download, FileAnswer, LocalCopies, Span, parse_range
from umbel.server.problems import Refused


async def asked(it: House, state: Mapping[str, torch.Tensor], count: int = 1) -> tuple[str, list[Device]]:
    """A model's hash, and devices that have just been asked to train from it."""
    layout, devices = await it.begin(run_file(target=count), state), await it.devices(count)
    assignments = await asyncio.gather(*(device.work(layout) for device in devices))
    return assignments[0]["model"]["sha256"], devices


@pytest.mark.parametrize(
    ("header", "span"),
    [
        (None, None),
        ("bytes=0-9", Span(0, 10)),
        ("bytes=90-", Span(90, 100)),
        ("bytes=90-1000", Span(90, 100)),
        ("bytes=-10", Span(90, 100)),
        ("bytes=-1000", Span(0, 100)),
        ("bytes=5-4", None),
        ("bytes=0-1,5-6", None),
        ("lines=0-1", None),
        ("bytes=a-b", None),
    ],
)
def test_a_range_is_read_as_rfc_9110_says(header: str | None, span: Span | None) -> None:
    assert parse_range(header, 100) == span


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_a_range_outside_the_file_is_refused(header: str) -> None:
    with pytest.raises(Refused) as refusal:
        parse_range(header, 100)
    assert refusal.value.headers == {"Content-Range": "bytes */100"}


def test_a_model_comes_whole_in_ranges_or_not_at_all(tmp_path: Path) -> None:
    data = encode_model({"w": torch.arange(200_000, dtype=torch.float32)})

    async def scenario() -> None:
        async with house(tmp_path) as it:
            sha, [device] = await asked(it, {"w": torch.arange(200_000, dtype=torch.float32)})
            url = f"/v1/models/{sha}"
            whole = await device.send("GET", url)
            assert whole.content == data
            assert whole.headers["etag"] == f'"{sha}"'
            known = await device.send("GET", url, headers={"If-None-Match": f'W/"x", "{sha}"'})
            assert (known.status_code, known.content) == (304, b"")
            head = await device.send("HEAD", url)
            assert (head.status_code, head.headers["content-length"]) == (200, str(len(data)))
            part = await device.send("GET", url, headers={"Range": "bytes=100000-", "If-Range": f'"{sha}"'})
            assert (part.status_code, part.content) == (206, data[100_000:])
            assert part.headers["content-range"] == f"bytes 100000-{len(data) - 1}/{len(data)}"
            other = await device.send("GET", url, headers={"Range": "bytes=5-", "If-Range": '"other"'})
            assert (other.status_code, other.content) == (200, data)
            outside = await device.send("GET", url, headers={"Range": f"bytes={len(data)}-"})
            assert problem(outside) == "range-not-satisfiable"

    asyncio.run(scenario())


def test_what_was_sent_of_a_file_of_many_pieces_is_counted_once(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    blobs.prepare()
    data = bytes(range(250)) * 4000  # a million bytes
    with blobs.scratch() as path:
        path.write_bytes(data)
        blobs.put(path, "models/one")
    counted, got = list[int](), bytearray()

    async def send(message: MutableMapping[str, Any]) -> None:
        got.extend(message.get("body", b""))

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> None:
        wanted = Download(206, {}, Span(10, len(data)), MEDIA_TYPE)
        await FileAnswer(LocalCopies(blobs), "models/one", wanted, counted.append)({"type": "http"}, receive, send)

    asyncio.run(scenario())
    assert bytes(got) == data[10:]
    assert len(counted) > 1
    assert sum(counted) == len(data) - 10


@pytest.fixture(scope="module")
def bucket_server() -> Generator[S3Server]:
    with s3_server() as running:
        yield running


STATE = {"w": torch.arange(200_000, dtype=torch.float32)}


def test_a_client_is_sent_to_the_bucket_and_an_operator_is_not(bucket_server: S3Server, tmp_path: Path) -> None:
    data = encode_model(STATE)

    async def scenario() -> None:
        async with house(tmp_path, **bucket_fields(bucket_server)) as it:
            layout = await it.begin(run_file(target=1), STATE)
            [device] = await it.devices(1)
            assignment = await device.work(layout)
            model = assignment["model"]
            url = f"/v1/models/{model['sha256']}"
            sent = await device.send("GET", url)
            assert (sent.status_code, sent.content) == (307, b"")
            assert sent.headers["cache-control"] == "no-store"
            async with httpx.AsyncClient(timeout=ANSWER_S) as anyone:
                assert (await anyone.get(sent.headers["location"])).content == data
            rest = await device.send("GET", url, headers={"Range": "bytes=700000-"})
            assert rest.status_code == 307
            head = await device.send("HEAD", url)
            assert (head.status_code, head.headers["content-length"]) == (200, str(len(data)))
            known = await device.send("GET", url, headers={"If-None-Match": f'"{model["sha256"]}"'})
            assert known.status_code == 304
            outside = await device.send("GET", url, headers={"Range": f"bytes={len(data)}-"})
            assert problem(outside) == "range-not-satisfiable"
            direct = await device.send("GET", url + "?direct=true", headers={"Range": "bytes=5-9"})
            assert (direct.status_code, direct.content) == (206, data[5:10])
            assert (await it.model(model["sha256"]))["w"].equal(STATE["w"])
            update = update_of(layout, torch.zeros(layout.n_values))
            assert (await device.upload(assignment["id"], update)).status_code == 201
            assert (await device.report(assignment["id"], update)).json()["outcome"] == "accepted"
            [record] = await it.ended(1)
            assert record["bytes_down"] == len(data) + (len(data) - 700_000) + 5

    asyncio.run(scenario())


def test_a_client_is_sent_to_the_bucket_for_a_change_too(bucket_server: S3Server, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, **bucket_fields(bucket_server)) as it:
            layout = await it.begin(run_file(count=2, target=1) + '[downlink]\nname = "change"\n', STATE)
            [device] = await it.devices(1)
            assignment = await device.work(layout)
            update = update_of(layout, torch.ones(layout.n_values))
            assert (await device.upload(assignment["id"], update)).status_code == 201
            assert (await device.report(assignment["id"], update)).json()["outcome"] == "accepted"
            [change] = (await device.work(layout))["changes"]
            url = f"/v1/models/{change['sha256']}"
            sent = await device.send("GET", url)
            assert sent.status_code == 307
            async with httpx.AsyncClient(timeout=ANSWER_S) as anyone:
                linked = (await anyone.get(sent.headers["location"])).content
            (tmp_path / "cache" / change["sha256"]).unlink()
            direct = await device.send("GET", url + "?direct=true")
            assert direct.content == linked
            assert hashlib.sha256(linked).hexdigest() == change["sha256"]
            assert len(linked) == change["size_bytes"]

    asyncio.run(scenario())


def test_links_can_be_turned_off(bucket_server: S3Server, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, download_links=False, **bucket_fields(bucket_server)) as it:
            sha, [device] = await asked(it, STATE)
            answer = await device.send("GET", f"/v1/models/{sha}")
            assert (answer.status_code, answer.content) == (200, encode_model(STATE))

    asyncio.run(scenario())


def test_a_model_that_is_gone_and_one_that_cannot_be_had_now_are_told_apart(
    bucket_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "RETRY_S", 0.5)
    wire = Wire(bucket_server.url)
    fields = bucket_fields(bucket_server, s3_endpoint=wire.url)

    async def scenario() -> None:
        async with house(tmp_path, **fields) as it:
            sha, [device] = await asked(it, STATE)
            url = f"/v1/models/{sha}?direct=true"
            (tmp_path / "cache" / sha).unlink()
            wire.go_down()
            away = await device.send("GET", url)
            assert problem(away) == "storage-unavailable"
            assert int(away.headers["retry-after"]) > 0
            wire.come_back()
            answer = await device.send("GET", url)
            while answer.status_code == 503:
                answer = await device.send("GET", url)
            assert answer.content == encode_model(STATE)
            await asyncio.to_thread(it.state.services.blobs.delete, [f"models/{sha}"])
            assert problem(await device.send("GET", url)) == "unknown-model"

    asyncio.run(scenario())
    wire.close()


def test_many_who_want_a_model_at_once_have_it_fetched_once(bucket_server: S3Server, tmp_path: Path) -> None:
    async def scenario() -> None:
        fields = bucket_fields(bucket_server)
        async with house(tmp_path, **fields, download_links=False) as it:
            sha, devices = await asked(it, STATE, 20)
            (tmp_path / "cache" / sha).unlink()
            answers = await asyncio.gather(*(device.send("GET", f"/v1/models/{sha}") for device in devices))
            assert {answer.content for answer in answers} == {encode_model(STATE)}
            assert it.state.copies.n_in_use == 0

    asyncio.run(scenario())
