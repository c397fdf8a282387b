"""A file that says when devices are there is read as it is, or refused with the line that is wrong."""

import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.sim.fleet.files import NotPresence, read_presence

HEAD = "device,from_s,until_s\n"


def written(folder: Path, name: str, data: str | bytes) -> Path:
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder / name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", HEAD + "x,10,20\r\ny,0,5.5\n\nx,0,10"),
        (
            "a.jsonl",
            '{"device": "x", "from_s": 10, "until_s": 20}\n{"device": "y", "until_s": 5.5, "from_s": 0}\n'
            '{"device": "x", "from_s": 0, "until_s": 10}\n',
        ),
        ("a.jsonl", '{"device":7,"from_s":0,"until_s":20}\n{"device":-1,"from_s":0,"until_s":5.5}'),
    ],
)
def test_both_formats_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    found = read_presence(written(tmp_path, name, text))
    assert (found.n, found.cycle_s) == (2, 20.0)
    for now, expected in ((0.0, [True, True]), (6.0, [True, False]), (15.0, [True, False]), (22.0, [True, True])):
        assert found.is_present(np.array([0, 1]), now).tolist() == expected


def test_a_longer_cycle_is_empty_at_its_end(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", HEAD + "x,0,10\n")
    assert not read_presence(path, 100.0).is_present(np.array([0]), 50.0).any()
    with pytest.raises(NotPresence, match="line 2: until_s is after the end of the cycle of 5 s"):
        read_presence(path, 5.0)


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.txt", "", "must end in .csv or .jsonl"),
        ("a.csv", "", "names no device"),
        ("a.csv", HEAD, "names no device"),
        ("a.csv", "device,from,until\n", "line 1: it must be 'device,from_s,until_s'"),
        ("a.csv", HEAD + "x,1,2\nx,3\n", "line 3: it has 2 cells"),
        ("a.csv", HEAD + "x,1,two\n", "line 2: 'two' is not a number"),
        ("a.csv", HEAD + "x,nan,2\n", "line 2: 'nan' is not a number"),
        ("a.csv", HEAD + "x,1_0,20\n", "line 2: '1_0' is not a number"),
        ("a.csv", HEAD + "x,0,\uff15\n", "line 2: '\uff15' is not a number"),
        ("a.jsonl", '{"device": 1, "device": 2, "from_s": 0, "until_s": 5}', "it is not JSON, or a key is repeated"),
        ("a.csv", HEAD + "x,0,inf\n", "line 2: 'inf' is not a number"),
        ("a.csv", HEAD + "x,5,5\n", "line 2: from_s must be"),
        ("a.csv", HEAD + "x,-1,5\n", "line 2: from_s must be"),
        ("a.csv", HEAD + ",1,5\n", "line 2: `device` must be"),
        ("a.csv", HEAD + "x\x07,1,5\n", "line 2: `device` must be"),
        ("a.csv", HEAD + "x" * 101 + ",1,5\n", "line 2: `device` must be"),
        ("a.csv", HEAD + "x,1,5" + " " * 2000, "line 2: it is longer"),
        ("a.csv", HEAD.encode() + b"\xff,1,5\n", "line 2: it is not UTF-8"),
        ("a.csv", HEAD + "x,1,5\ny,1,5\nx,4,6\n", "line 4: the time of device x overlaps with its time in line 2"),
        ("a.jsonl", '{"device": "x"}', "line 1: it must be an object with the keys"),
        ("a.jsonl", "[1]", "line 1: it must be an object"),
        ("a.jsonl", "{", "line 1: it is not JSON"),
        ("a.jsonl", "[" * 990, "line 1: it is not JSON"),
        ("a.jsonl", '{"device": true, "from_s": 0, "until_s": 1}', "line 1: `device` must be a name"),
        ("a.jsonl", '{"device": 1, "from_s": "0", "until_s": 1}', "line 1: from_s and until_s must be numbers"),
        ("a.jsonl", '{"device": 1, "from_s": 0, "until_s": 1' + "0" * 400 + "}", "line 1: from_s must be"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, name: str, data: str | bytes, why: str) -> None:
    path = written(tmp_path, name, data)
    with pytest.raises(NotPresence, match=why) as refused:
        read_presence(path)
    assert name in str(refused.value)


cells = st.sampled_from(["", "x", "0", "5", "1e3", "nan", "-1", "9" * 30, '"', "\x00", "é"])
lines = st.lists(cells, max_size=4).map(",".join) | st.text(max_size=8)
objects = st.dictionaries(
    st.sampled_from(["device", "from_s", "until_s", "x"]), st.none() | st.integers() | st.floats() | st.text(max_size=3)
).map(json.dumps)


@given(
    st.tuples(st.just("a.csv"), st.lists(lines).map(lambda rows: (HEAD + "\n".join(rows)).encode()) | st.binary())
    | st.tuples(st.just("a.jsonl"), st.lists(objects).map(lambda rows: "\n".join(rows).encode()) | st.binary())
)
def test_no_bytes_lead_to_another_error(tmp_path_factory: pytest.TempPathFactory, file: tuple[str, bytes]) -> None:
    path = written(tmp_path_factory.mktemp("presence"), *file)
    with suppress(NotPresence):
        found = read_presence(path)
        assert found.is_present(np.arange(found.n), 0.5).shape == (found.n,)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=8),
    st.floats(0, 99),
)
def test_a_device_is_there_in_its_stretches_and_in_no_other(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]], now: float
) -> None:
    text = HEAD + "".join(f"{device},{start},{start + length}\n" for device, start, length in rows)
    path = written(tmp_path_factory.mktemp("presence"), "a.csv", text)
    ordered = sorted(rows)
    if any(one[0] == other[0] and other[1] < one[1] + one[2] for one, other in pairwise(ordered)):
        with pytest.raises(NotPresence, match="overlaps with its time"):
            read_presence(path)
        return
    found = read_presence(path)
    order = list(dict.fromkeys(device for device, _, _ in rows))
    moment = now % max(start + length for _, start, length in rows)
    expected = [any(d == device and s <= moment < s + n for d, s, n in rows) for device in order]
    assert found.is_present(np.arange(found.n), now).tolist() == expected
