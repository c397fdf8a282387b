"""A site's policy, read and checked where it lies: every finding names the file and the key."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from umbel.client.policy.policy import SitePolicy

FILE_BYTES_MAX = 1 << 16
_POLICY = TypeAdapter(SitePolicy)
_KEYS = [field.name for field in fields(SitePolicy)]


def read_policy(path: Path) -> SitePolicy:
    """A policy file; the member list's path counts from its folder. Raises `OSError`, or `ValueError` with a sentence
    that names the file.
    """
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"{path} is no policy: it has more than {FILE_BYTES_MAX} bytes")
    try:
        policy = _POLICY.validate_json(json.dumps(tomllib.loads(data.decode())), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise ValueError(f"{path}: {'; '.join(map(_finding, found))}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:  # not UTF-8, numbers of thousands of digits, dates
        raise ValueError(f"{path} does not parse: {error}") from error
    return policy if policy.members is None else replace(policy, members=path.parent / policy.members.expanduser())


def _finding(found: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in found["loc"])
    if found["type"] == "unexpected_keyword_argument":
        close = get_close_matches(key, _KEYS, n=1)
        return f"unknown key {key!r}" + (
            f" (did you mean {close[0]!r}?)" if close else f"; known are {', '.join(_KEYS)}"
        )
    what = str(found["msg"]).removeprefix("Value error, ")
    return f"{key}: {what}" if key else what
