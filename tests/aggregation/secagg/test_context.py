"""What a context's digest tells apart: everything; and what is no context, because it would have two spellings."""

import dataclasses
import hashlib
import json
import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.aggregation.secagg.federation import context_of, identity
from umbel.aggregation.canonical import canonical, parsed
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import SLUG, ClientId, RunId

KEYS = [public_key_text(identity(f"member {n}").public_key().public_bytes_raw()) for n in range(6)]

sha256s = st.binary(min_size=32, max_size=32).map(bytes.hex)
slugs = st.from_regex(SLUG, fullmatch=True)
cohorts = st.tuples(st.lists(slugs, min_size=3, max_size=5, unique=True), st.permutations(KEYS)).map(
    lambda found: tuple(zip(sorted(found[0]), found[1], strict=False))
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "run": slugs,
    "round": st.integers(1, 2**63),
    "attempt": st.integers(1, 2**63),
    "attempt_id": st.binary(min_size=16, max_size=16).map(bytes.hex),
    "model_sha256": sha256s,
    "layout_digest": sha256s,
    "config_sha256": sha256s,
    "members_sha256": st.just("") | sha256s,
    "cohort": cohorts,
    "minimum": st.just(3),
    "opening_commitment": sha256s,
    "window_s": st.floats(min_value=1e-3, max_value=1e9),
}
contexts = st.fixed_dictionaries(FIELDS).map(lambda fields: Context(**fields))


def test_every_field_is_in_the_digest() -> None:
    assert {*FIELDS, "protocol"} == {field.name for field in dataclasses.fields(Context)}
    assert json.loads(canonical(context_of(4))).keys() == {*FIELDS, "protocol"}


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "minimum"])
@given(context=contexts, data=st.data())
def test_contexts_that_differ_in_one_field_have_two_digests(name: str, context: Context, data: st.DataObject) -> None:
    other = dataclasses.replace(context, **{name: data.draw(FIELDS[name])})
    assume(other != context)
    assert other.digest != context.digest


def test_the_minimum_is_in_the_digest() -> None:
    assert len({context_of(6, minimum=minimum).digest for minimum in (3, 4, 5, 6)}) == 4


@given(context=contexts)
def test_what_was_hashed_can_be_read_and_is_the_context(context: Context) -> None:
    """Nothing is lost in the text, so there are no two contexts with one."""
    text = canonical(context)
    found: Any = parsed(text)
    assert hashlib.sha256(text.encode()).digest() == context.digest
    numbers = {name: int(found[name]) for name in ("round", "attempt")}  # beyond 2^53 a string of digits
    cohort = tuple((name, key) for name, key in found["cohort"])
    fields: dict[str, Any] = {**found, **numbers, "cohort": cohort, "window_s": float(found["window_s"])}
    again = Context(**fields)
    assert again == context
    assert canonical(parsed(text)) == text


@pytest.mark.parametrize("number", [2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2], ids=lambda n: f"2^53{n - 2**53:+d}")
def test_large_rounds_are_told_apart_where_a_float_could_not(number: int) -> None:
    assert context_of(3, round=number).digest != context_of(3, round=number + 1).digest


@pytest.mark.parametrize(
    ("one", "other"),
    [(600.0, math.nextafter(600.0, 601)), (0.1, 0.1 + 2**-56), (1e21, 1e21 + 2**18), (1e-6, 1e-7), (5e-324, 1e-323)],
)
def test_floats_that_differ_at_all_are_told_apart(one: float, other: float) -> None:
    assert one != other
    assert context_of(3, window_s=one).digest != context_of(3, window_s=other).digest


@pytest.mark.parametrize(("one", "other"), [(600, 600.0), (1e3, 1000.0), (6e2, 600)])
def test_equal_numbers_have_one_spelling(one: float, other: float) -> None:
    assert context_of(3, window_s=one).digest == context_of(3, window_s=other).digest


@pytest.mark.parametrize("window_s", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_a_window_is_a_positive_number(window_s: float) -> None:
    with pytest.raises(ValueError, match="window_s"):
        context_of(3, window_s=window_s)


NAMES = {
    "composed": "caf\u00e9",
    "decomposed": "cafe\u0301",
    "full width": "\uff41bc",
    "cyrillic a": "\u0430bc",
    "zero width": "a\u200bbc",
    "right to left": "\u202eabc",
    "capital": "Abc",
    "line break": "abc\n",
    "null": "abc\0",
    "half a pair": "\ud800",
    "quote": 'a"b',
    "dot": "a.b",
    "empty": "",
    "long": "a" * 64,
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_that_could_be_taken_for_another_is_none(name: str) -> None:
    """Names are sorted, compared and read by people: what looks alike in two spellings would be two members."""
    cohort = tuple(sorted([*context_of(3).cohort, (ClientId(name), KEYS[0])]))
    with pytest.raises(ValueError, match="name"):
        context_of(3, cohort=cohort)
    with pytest.raises(ValueError, match="run"):
        context_of(3, run=RunId(name))


@pytest.mark.parametrize(
    "changed",
    [
        {"model_sha256": "AB" * 32},
        {"model_sha256": "ab" * 31},
        {"layout_digest": ""},
        {"config_sha256": "xy" * 32},
        {"members_sha256": "0"},
        {"opening_commitment": "ab" * 32 + "\n"},
        {"attempt_id": "0F" * 16},
        {"attempt_id": "0f" * 15},
        {"attempt_id": "\uff10f" + "0f" * 15},
    ],
    ids=lambda changed: "=".join(f"{name}={value[:4]!a}" for name, value in changed.items()),
)
def test_digests_and_ids_have_one_spelling(changed: dict[str, str]) -> None:
    [name] = changed
    with pytest.raises(ValueError, match=name):
        context_of(3, **changed)


def test_a_cohort_has_one_order_and_no_name_twice() -> None:
    first, second, third = context_of(3).cohort
    with pytest.raises(ValueError, match="list each client once, sorted by name"):
        context_of(3, cohort=(second, first, third))
    with pytest.raises(ValueError, match="list each client once, sorted by name"):
        context_of(3, cohort=(first, (first[0], KEYS[0]), second))


def test_a_key_that_is_said_twice_is_no_json_of_ours() -> None:
    text = canonical(context_of(3))
    with pytest.raises(ValueError, match="twice"):
        parsed(text[:-1] + ',"round":2}')
