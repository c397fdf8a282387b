"""Canonical JSON: RFC 8785's own examples, and what goes in comes out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.canonical import CanonicalText, canonical, later, number_text, parsed, without_unused

NUMBERS = {  # RFC 8785, appendix B
    "0": 0.0,
    "5e-324": 5e-324,
    "-5e-324": -5e-324,
    "1.7976931348623157e+308": 1.7976931348623157e308,
    "9007199254740992": 9007199254740992.0,
    "295147905179352830000": 295147905179352830000.0,
    "9.999999999999997e+22": 9.999999999999997e22,
    "1e+23": 1e23,
    "0.000001": 1e-6,
    "9.999999999999997e-7": 9.999999999999997e-7,
    "333333333.3333333": 333333333.33333329,
    "-0.0000033333333333333333": -0.0000033333333333333333,
}


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers_are_those_of_the_rfc(text: str, value: float) -> None:
    assert number_text(value) == text


def test_keys_are_sorted_by_utf_16_and_strings_escaped_no_further_than_needed() -> None:
    """RFC 8785, 3.2.3: the sorting example."""
    keys = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    ordered = ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
    assert list(json.loads(canonical(dict.fromkeys(keys, 0)))) == ordered
    assert canonical('\u20ac$\u000f\nA\'B"\\"/') == '"\u20ac$\\u000f\\nA\'B\\"\\\\\\"/"'


def test_an_integer_that_a_float_cannot_hold_is_a_string() -> None:
    assert (
        canonical([1 << 53, -(1 << 63), (1 << 53) - 1])
        == '["9007199254740992","-9223372036854775808",9007199254740991]'
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.integers(-99, 99),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_what_is_read_is_written_as_it_was(value: object) -> None:
    try:
        text = canonical(value)
    except UnicodeEncodeError:
        return  # half a surrogate pair
    assert parsed(text) == value
    assert canonical(parsed(text)) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {"a": {1, 2}}])
def test_what_json_does_not_have_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="JSON has n"):
        canonical(value)


@pytest.mark.parametrize(
    "text", ['{"a":1,"a":1}', "NaN", "[" * 100_000, "", "1e999", "[-1e999]", "9" * 400, '"\\ud800"', '{"\\uDFFF":1}']
)
def test_what_has_no_one_meaning_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        parsed(text)


def test_a_tuple_that_was_written_before_is_written_the_same() -> None:
    items = ({"b": 1.5, "a": "ü"}, {"b": 2, "a": None})
    assert canonical({"x": 1, "items": CanonicalText(items)}) == canonical({"x": 1, "items": items})
    assert CanonicalText(items) == items


@dataclass(frozen=True)
class _Grown:
    kept: int
    gained: str = later("")
    listed: Mapping[str, int] = later(factory=dict)


def test_a_field_that_a_format_has_gained_is_left_out_while_it_has_its_default() -> None:
    assert canonical(_Grown(1)) == '{"kept":1}'
    assert without_unused(_Grown(1), {"kept": 1, "gained": "", "listed": {}}) == {"kept": 1}
    assert canonical([_Grown(1, "x", {"a": 2})]) == '[{"gained":"x","kept":1,"listed":{"a":2}}]'
