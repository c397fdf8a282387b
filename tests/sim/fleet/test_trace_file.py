"""A trace is read from its file as it was written, and what is none is refused with the place that is wrong."""

import json
import re
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.run.test_trace import DONE, LOST, RECORD
from tests.repository import ROOT
from umbel.aggregation.canonical import canonical
from umbel.aggregation.run.trace import Trace, TracedAttempt, TracedClient, trace_of
from umbel.sim.fleet.files import NotTrace, read_trace

TRACE = trace_of([RECORD])


def written(folder: Path, data: str | bytes) -> Path:
    (folder / "trace.json").write_bytes(data.encode() if isinstance(data, str) else data)
    return folder / "trace.json"


def test_a_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    assert {DONE.client, LOST.client} == {"north", "south"}
    assert read_trace(written(tmp_path, canonical(TRACE))) == TRACE
    assert read_trace(written(tmp_path, json.dumps(json.loads(canonical(TRACE)), indent=2))) == TRACE


def test_the_trace_of_the_documentation_is_one_and_its_table_has_every_key(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "traces.md").read_text().split("## How a run went")[1]
    assert read_trace(written(tmp_path, page.split("```json")[1].split("```")[0])).clients == 3
    table = {
        name
        for line in page.splitlines()
        if line.startswith("| `")
        for name in re.findall("`(.*?)`", line[: line.find("|", 2)])
    }
    keys = {field.name for kind in (Trace, TracedAttempt, TracedClient) for field in fields(kind)}
    assert table == keys


def changed(*place: str | int, to: object) -> str:
    """The trace as JSON with one thing changed."""
    found = json.loads(canonical(TRACE))
    inner: Any = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = to
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "JSON"),
        ("[]", "object"),
        (changed("format", to=2), "format 2, but this version of umbel reads format 1"),
        (changed("format", to="1"), "format: .*integer"),
        (changed("name", to="ward"), "name: "),
        (changed("clients", to=2), "round 3 names client 2, but the trace has 2"),
        (changed("clients", to=10_000_000), "`clients` is 10000000, but the attempts mention only [0-9]+ clients"),
        (changed("attempts", 0, "open_s", to=-1), "attempts.0: open_s must lie"),
        (changed("attempts", 0, "open_s", to=float("nan")), "attempts.0.*open_s"),
        (changed("attempts", 0, "clients", 1, "fate", to="gone"), "attempts.0.clients.1.fate: "),
        (changed("attempts", 0, "clients", 0, "steps_done", to=9), "attempts.0.clients.0: steps_done"),
        (changed("attempts", 0, "committed", to=1), "attempts.0.committed: "),
    ],
)
def test_what_is_no_trace_is_refused_with_the_place(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(NotTrace, match=f"trace.json is not a trace: .*{why}"):
        read_trace(written(tmp_path, text))


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.sim.fleet.files.TRACE_BYTES_MAX", 100)
    with pytest.raises(NotTrace, match="longer than the 100 bytes"):
        read_trace(written(tmp_path, canonical(TRACE)))


places = st.sampled_from(
    [
        ("format",),
        ("clients",),
        ("attempts",),
        *(("attempts", 0, key) for key in json.loads(canonical(TRACE))["attempts"][0]),
    ]
    + [("attempts", 0, "clients", 0, key) for key in json.loads(canonical(TRACE))["attempts"][0]["clients"][0]]
)
values: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})
)


@given(st.binary(max_size=50) | st.builds(lambda place, value: changed(*place, to=value), places, values))
def test_no_bytes_lead_to_another_error(tmp_path_factory: pytest.TempPathFactory, data: str | bytes) -> None:
    with suppress(NotTrace):
        trace = read_trace(written(tmp_path_factory.mktemp("trace"), data))
        assert canonical(trace)
