"""Read a TOML file strictly: each error names the file and the key, and says what was probably meant."""

import json
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
Hint = Callable[[str, str], str]  # (section, unknown key) -> what to do about it, or nothing
_UNKNOWN = "unexpected_keyword_argument"
_ALL = "literal['all']"  # pydantic's name of one of the types of a key that may also be "all"
_BESIDE_ALL = {"tuple[str, ...]": "a list of names", "int": "a whole number"}  # the other type
_OF_OPTION = {"bool", "int", "float", "str"}  # the faults of these types are "bool_type", "string_type" and so on


def read_toml(
    path: Path,
    adapter: TypeAdapter[T],
    bytes_max: int,
    kind: str,
    hint: Hint,
    part: Callable[[dict[str, Any]], dict[str, Any]] = lambda table: table,
) -> tuple[str, T]:
    """The file's text, and what it says. `kind`: the kind of file, such as "run file". `part`: what of the file's
    table the adapter reads; it may raise `ValueError`.

    It is parsed by way of JSON, as strictly as by the coordinator: `true` is no count. Raises `OSError`, or
    `ValueError` with a sentence that names the file.
    """
    with path.open("rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise ValueError(f"{path} is no {kind}: it has more than {bytes_max} bytes")
    try:
        text = data.decode()
        table = tomllib.loads(text)
        json.dumps(table, default=_refuse)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:  # not UTF-8, numbers of thousands of digits, dates
        raise ValueError(f"{path} does not parse: {error}") from error
    try:
        return text, adapter.validate_json(json.dumps(part(table)), strict=True)
    except ValidationError as error:
        raise ValueError(f"{path}: {findings(error, hint)}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def findings(error: ValidationError, hint: Hint) -> str:
    """All findings in one sentence. Unknown keys come first, because they explain missing ones."""
    found: list[Mapping[str, Any]] = [*error.errors(include_url=False, include_input=False)]
    may_be_all = {one["loc"][:-1] for one in found if one["loc"][-1:] == (_ALL,)}
    words = [
        _of_all(one["loc"], may_be_all) or _finding(one, hint)
        for one in sorted(found, key=lambda one: one["type"] != _UNKNOWN)
        if one["loc"][-1:] != (_ALL,)
    ]
    return "; ".join(dict.fromkeys(words))


def _of_all(place: tuple[int | str, ...], may_be_all: set[tuple[int | str, ...]]) -> str:
    """The sentence for a key that takes another type or "all", if this finding is below one; else nothing."""
    for n_parts in range(1, len(place)):
        key, other = place[:n_parts], str(place[n_parts])
        if key in may_be_all and other in _BESIDE_ALL:
            return f'{".".join(map(str, key))} must be {_BESIDE_ALL[other]} or "all"'
    return ""


def _refuse(value: object) -> object:
    """What a run file cannot hold: dates and times."""
    raise TypeError(f"{value} is a {type(value).__name__}, which no key takes; write it as a text, in quotes")


def close_to(key: str, known: list[str]) -> str:
    """The known key that was probably meant, as a hint; empty if none is close."""
    close = get_close_matches(key, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _finding(found: Mapping[str, Any], hint: Hint) -> str:
    *outer, key = [str(part) for part in found["loc"]] or [""]
    section = ".".join(outer)
    place = f"[{section}] " if section else ""
    match found["type"]:
        case kind if key in _OF_OPTION and kind.startswith(
            key
        ):  # pydantic finds a fault for each type that an option may have
            return f"{section} must be a text, a number, true or false"
        case "unexpected_keyword_argument":
            return f"{place}unknown key {key!r}{hint(section, key)}"
        case "missing":
            return f"{place}{key!r} is missing"
        case _:
            what = str(found["msg"]).removeprefix("Value error, ")
            where = ".".join([*outer, key])
            return f"{where}: {what}" if where else what
