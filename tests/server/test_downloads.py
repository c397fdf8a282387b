"""Model downloads: entity tags, ranges, and the ranges that are none."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.server_device import house, problem
from umbel.aggregation.artifact import encode_model
from umbel.server.downloads import Span, parse_range
from umbel.server.problems import Refused


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
            sha = await it.put_model({"w": torch.arange(200_000, dtype=torch.float32)})
            url = f"/v1/models/{sha}"
            [device] = await it.devices(1)
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
