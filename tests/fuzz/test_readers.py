"""Readers of what strangers send: any bytes, and what they would take with some of it changed, have typed refusals."""

import json
import time
import tomllib
import tracemalloc
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.fuzz import corpus, fuzz
from tests.fuzz.readers import READERS, audit_chain, header, layout, member_list, message, run_file, seeds

SEEDS = seeds()

NUMBERS = st.sampled_from([0, -1, 1, 1 << 31, 1 << 53, 1 << 62, 1 << 63, 1 << 64, 10**400, 0.5, -0.0, 1e308, 5e-324])
WRONG: list[Any] = [
    None,
    True,
    -1,
    1 << 64,
    10**400,
    1e308,
    float("nan"),
    0.5,
    "",
    "\x00",
    "\ud800",
    [],
    {},
    [[]],
    [{}],
]
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.integers() | st.floats() | st.text(max_size=20) | st.just("\ud800\x00"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_any_bytes_are_read_or_refused(name: str, data: st.DataObject) -> None:
    seed = data.draw(st.sampled_from(SEEDS[name]))
    first, last = sorted((data.draw(st.integers(0, len(seed))), data.draw(st.integers(0, len(seed)))))
    READERS[name](seed[:first] + data.draw(st.binary(max_size=100)) + seed[last:])


@pytest.mark.parametrize("name", READERS)
def test_what_a_fuzzer_has_found_is_read_or_refused(name: str) -> None:
    for data in corpus(name):
        READERS[name](data)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("name", READERS)
def test_a_fuzzer_finds_nothing_in_a_few_seconds(name: str) -> None:
    fuzz(name, seconds=2, keep=False)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_hostile_header_costs_little_time_and_memory() -> None:
    """Of a model file: about 1 MB of metadata, of tensors, of brackets, of one name."""
    bombs = [
        b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(50_000)) + b"}}",
        b'{"__metadata__":{"umbel.layout":"' + b"[" * 1_000_000 + b'"}}',
        b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(12_500)) + b"}",
        b'{"a":{"dtype":"F32","shape":' + b"[" * 1_000_000 + b"}}",
        b'{"' + b"a" * 1_000_000 + b'":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[' + b"9," * 500_000 + b'0],"data_offsets":[0,0]}}',
    ]
    for bomb in bombs:
        started = time.process_time()
        header(bomb)
        assert time.process_time() - started < 10.0, bomb[:60]  # about one; what grows with the square takes hours
        tracemalloc.start()  # which makes it several times slower
        header(bomb)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 40 * len(bomb), bomb[:60]


@given(st.data())
def test_any_change_to_an_audit_bundle_is_refused_in_words(data: st.DataObject) -> None:
    lines = [json.loads(line) for line in SEEDS["audit_chain"][0].splitlines()]
    at = data.draw(st.integers(0, len(lines) - 1))
    lines[at] = _changed(lines[at], data)
    audit_chain(b"\n".join(_text(line) for line in lines))


@pytest.mark.parametrize("reader", [header, layout, member_list, message], ids=lambda reader: str(reader.__name__))
@given(data=st.data())
def test_any_change_to_json_is_read_or_refused(reader: Callable[[bytes], None], data: st.DataObject) -> None:
    seed = json.loads(data.draw(st.sampled_from(SEEDS[reader.__name__])))
    reader(_text(_changed(seed, data)))


@given(st.data())
def test_any_change_to_a_run_file_is_read_or_refused(data: st.DataObject) -> None:
    run_file(_run_file(_changed(tomllib.loads(SEEDS["run_file"][0].decode()), data)))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [pytest.param("audit_chain", marks=pytest.mark.slow), "header", "layout", "member_list", "message"]
)
def test_a_wrong_value_at_any_place_of_json_is_read_or_refused(name: str) -> None:
    for seed in SEEDS[name]:
        lines = [json.loads(line) for line in seed.splitlines()]
        for changed in _changed_everywhere(lines):
            if isinstance(changed, list):
                READERS[name](b"\n".join(_text(line) for line in changed))


def test_a_wrong_value_at_any_place_of_a_run_file_is_read_or_refused() -> None:
    for changed in _changed_everywhere(tomllib.loads(SEEDS["run_file"][0].decode())):
        run_file(_run_file(changed))


def _changed_everywhere(value: Any) -> Iterator[Any]:
    """A JSON value with each of its places, one after the other, put as each of `WRONG`, and left out."""
    yield from WRONG
    if isinstance(value, dict | list):
        for place in list(value) if isinstance(value, dict) else range(len(value)):
            for changed in _changed_everywhere(value[place]):
                copy = value.copy()
                copy[place] = changed
                yield copy
            copy = value.copy()
            del copy[place]
            yield copy


def _run_file(value: Any) -> bytes:
    if not isinstance(value, dict):
        return _toml(value).encode()
    return "\n".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()).encode("utf-8", "replace")


def _changed(value: Any, data: st.DataObject) -> Any:
    """A JSON value with one to three of its places put otherwise, left out, or said twice."""
    for _ in range(data.draw(st.integers(1, 3))):
        value = _changed_once(value, data)
    return value


def _changed_once(value: Any, data: st.DataObject) -> Any:
    if not isinstance(value, dict | list) or not value or data.draw(st.integers(0, 7)) == 0:
        return data.draw(JSON)
    places = list(value) if isinstance(value, dict) else list(range(len(value)))
    place = data.draw(st.sampled_from(places))
    changed = value.copy()
    if data.draw(st.integers(0, 7)) == 0:
        del changed[place]
    else:
        changed[place] = _changed_once(value[place], data)
    return changed


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


def _toml(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case float():
            return repr(value)  # also nan and inf
        case None:
            return "1979-05-27T07:32:00Z"
        case _:
            return json.dumps(value)
