"""A run file, read and checked where its author sits: every finding names the file, the section and the key."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.run.file import RunFile

_RUN_FILE = TypeAdapter(RunFile)
_SECTIONS = {  # [privacy] may be left out, so its type is PrivacySection | None
    name: kind
    for name, hint in get_type_hints(RunFile).items()
    for kind in (hint, *get_args(hint))
    if is_dataclass(kind) and name != "override"
}
_KEYS = {section: [field.name for field in fields(kind)] for section, kind in {"": RunFile, **_SECTIONS}.items()}
BYTES_MAX = 1 << 20
_STRAY = "unexpected_keyword_argument"


def read_run_file(path: Path) -> tuple[str, RunFile]:
    """The file's text and what it says. Raises `OSError`, or `ValueError` with a sentence that names the file.

    As strict as the coordinator, by the same way through JSON: no `true` for a count.
    """
    with path.open("rb") as file:
        data = file.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise ValueError(f"{path} is no run file: it has more than {BYTES_MAX} bytes")
    try:
        text = data.decode()
        return text, _RUN_FILE.validate_json(json.dumps(tomllib.loads(text)), strict=True)
    except ValidationError as error:
        raise ValueError(f"{path}: {findings(error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:  # not UTF-8, numbers of thousands of digits, dates
        raise ValueError(f"{path} does not parse: {error}") from error


def findings(error: ValidationError) -> str:
    """Every finding once, stray keys first: they are what explains a missing one."""
    found: list[Mapping[str, Any]] = [*error.errors(include_url=False, include_input=False)]
    return "; ".join(_finding(one) for one in sorted(found, key=lambda one: one["type"] != _STRAY))


def _finding(found: Mapping[str, Any]) -> str:
    *outer, key = [str(part) for part in found["loc"]] or [""]
    section = ".".join(outer)
    place = f"[{section}] " if section else ""
    match found["type"]:
        case "unexpected_keyword_argument":
            return f"{place}unknown key {key!r}{_hint(section, key)}"
        case "missing":
            return f"{place}{key!r} is missing"
        case _:
            what = str(found["msg"]).removeprefix("Value error, ")
            where = ".".join([*outer, key])
            return f"{where}: {what}" if where else what


def _hint(section: str, key: str) -> str:
    """Where a stray key belongs, or what it was meant to be, if that can be told."""
    homes = [home for home, keys in _KEYS.items() if key in keys and home != section]
    if homes:
        return f" (it belongs {f'in [{homes[0]}]' if homes[0] else 'at the top, before the first section'})"
    close = get_close_matches(key, _KEYS.get(section, []), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
