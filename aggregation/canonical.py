"""JSON in one spelling, so that equal values have equal bytes and a hash of them means something: RFC 8785 (JCS).

Keys sorted by their UTF-16 code units, no white space, strings escaped no further than JSON needs, UTF-8; a number as
JavaScript prints it: the shortest digits that read back as the same float64. Integers beyond 2^53, which a float64 does
not hold exactly, are written as strings of their decimal digits (RFC 8785, appendix D). Any JCS library in any language
gives the same bytes for what it reads.

A format that gains a field takes it with `later(default)`. Such a field is left out while it has its default, so that
what was written before the field existed keeps its bytes and its hash.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache, lru_cache
from json.encoder import encode_basestring
from typing import Any, Generic, TypeAlias, TypeVar

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

Emit: TypeAlias = Callable[[str], None]

EXACT_MAX = (1 << 53) - 1
_LATER = "umbel.later"
Item = TypeVar("Item")


class CanonicalText(tuple[Item, ...], Generic[Item]):
    """A tuple that keeps its canonical text, so that a large part of a document is written only once."""

    text: str

    def __new__(cls, items: Iterable[Item]) -> "CanonicalText[Item]":
        written = super().__new__(cls, items)
        written.text = canonical(tuple(written))
        return written


def later(default: Any = MISSING, *, factory: Callable[[], Any] | Any = MISSING) -> Any:
    """A dataclass field that its format has gained: canonical JSON leaves it out while it has its default.

    `default`, or `factory`, which makes the default: as of `dataclasses.field`.
    """
    if factory is not MISSING:
        return field(default_factory=factory, metadata={_LATER: factory})
    return field(default=default, metadata={_LATER: lambda: default})


def canonical(value: object) -> str:
    """`value` as canonical JSON: JSON's own types, dataclasses (as objects), enums of strings, tuples (as arrays).

    Raises `ValueError` for a NaN, an infinity, half a surrogate pair, or a type that JSON does not have.
    """
    parts: list[str] = []
    _write(value, parts.append)
    text = "".join(parts)
    text.encode()  # a lone surrogate has no UTF-8: UnicodeEncodeError is a ValueError
    return text


def parsed(text: str) -> Json:
    """JSON that `canonical` can write again.

    Raises `ValueError` for text that is no JSON, a repeated key, a number beyond float64, or a lone surrogate.
    """
    try:
        found: Json = json.loads(
            text,
            parse_int=_number,
            parse_float=_float,
            parse_constant=_refused_constant,
            object_pairs_hook=_object_of_once,
        )
        if "\\u" in text:  # only an escape can write a lone surrogate
            _require_encodable(found)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return found


def _require_encodable(found: Json) -> None:
    try:
        canonical(found)
    except UnicodeEncodeError as error:
        raise ValueError(
            r"a text has an escape from \ud800 to \udfff without the other half of its pair, so it is no character; "
            "write both halves, or remove it"
        ) from error


def _write(value: object, emit: Emit) -> None:
    writer = _WRITERS.get(type(value))
    if writer is not None:
        emit(writer(value))
    elif isinstance(value, str):  # an enum
        emit(encode_basestring(str(value)))
    elif isinstance(value, int):  # likewise
        emit(_integer(int(value)))
    elif isinstance(value, list | tuple):
        _write_array(value, emit)  # pyright: ignore[reportUnknownArgumentType]  # of anything
    else:
        _write_object(value, emit)


def _write_array(items: Sequence[object], emit: Emit) -> None:
    before = "["
    for item in items:
        emit(before)
        _write(item, emit)
        before = ","
    emit("]" if items else "[]")


def _write_object(value: Any, emit: Emit) -> None:
    kind = type(value)
    if kind is dict or isinstance(value, Mapping):
        entries = [(quoted, value[key]) for key, quoted in _in_order(tuple(value))]
    elif is_dataclass(kind):
        left_out = {key for key, default in later_fields(kind) if getattr(value, key) == default}
        entries = [(quoted, getattr(value, key)) for key, quoted in _keys_of(kind) if key not in left_out]
    else:
        raise ValueError(f"JSON has nothing for a {kind.__name__}")
    before = "{"
    for quoted, item in entries:
        emit(before + quoted)
        _write(item, emit)
        before = ","
    emit("}" if entries else "{}")


@cache
def _keys_of(kind: type) -> tuple[tuple[str, str], ...]:
    """The fields of a dataclass in canonical order, each with its text up to the value."""
    return _in_order(tuple(field.name for field in fields(kind)))


@cache
def later_fields(kind: type) -> tuple[tuple[str, object], ...]:
    """The fields that a dataclass has gained (`later`), with their defaults."""
    return tuple((one.name, one.metadata[_LATER]()) for one in fields(kind) if _LATER in one.metadata)


def without_unused(value: object, written: Any) -> Any:
    """`written`, the JSON of `value`, without the fields that its format has gained (`later`) and that are unused.

    An earlier release reads it too, if that release refuses unknown fields.
    """
    if is_dataclass(value) and not isinstance(value, type):
        for name, default in later_fields(type(value)):
            if getattr(value, name) == default:
                written.pop(name, None)
        for name in written:
            without_unused(getattr(value, name), written[name])
    return written


def _integer(value: int) -> str:
    return str(value) if -EXACT_MAX <= value <= EXACT_MAX else f'"{value}"'


@lru_cache(maxsize=1024)
def _in_order(keys: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((key, encode_basestring(key) + ":") for key in sorted(keys, key=_utf16))


def _utf16(key: str) -> bytes:
    return key.encode("utf-16-be", "surrogatepass")


def number_text(value: float) -> str:
    """A float64 as ECMAScript's `Number.prototype.toString` prints it. Raises `ValueError` for what is not finite."""
    if not math.isfinite(value):
        raise ValueError(f"JSON has no number for {value}")
    if value == 0:
        return "0"  # also for minus zero
    mantissa, _, exponent_text = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = len(whole) + int(exponent_text or 0) - (len(whole + fraction) - len(digits))  # digits before the point
    return ("-" if value < 0 else "") + _placed(digits.rstrip("0"), point)


def _placed(digits: str, point: int) -> str:
    """Digits with the decimal point after the first `point` of them: ECMA-262, 6.1.6.1.20, steps 6 to 10."""
    n_digits = len(digits)
    if n_digits <= point <= 21:
        return digits + "0" * (point - n_digits)
    if 0 < point <= 21:
        return f"{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"0.{'0' * -point}{digits}"
    exponent = f"e{point - 1:+d}"
    return digits + exponent if n_digits == 1 else f"{digits[0]}.{digits[1:]}{exponent}"


_WRITERS: Mapping[type, Callable[[Any], str]] = {
    str: encode_basestring,
    bool: lambda value: "true" if value else "false",
    type(None): lambda _: "null",
    int: _integer,
    float: number_text,
    CanonicalText: lambda value: value.text,
}


def _number(text: str) -> int | float:
    """Digits without point or exponent: beyond 2^53 they are a float that JavaScript prints so."""
    value = int(text) if len(text) <= 17 else 1 << 60
    return value if abs(value) <= EXACT_MAX else _float(text)


def _float(text: str) -> float:
    """Raises `ValueError` for a number that no float64 is as large as."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"JSON has no number for {value}")
    return value


def _refused_constant(name: str) -> Json:
    raise ValueError(f"JSON has no {name}")


def _object_of_once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object says a key twice")
    return found
