"""The arguments with which an experiment calls one's own function: `[model.arguments]` and `[data.arguments]`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

ARGUMENTS_MAX, BYTES_MAX, DEPTH_MAX = 64, 1 << 16, 8


def require_arguments(arguments: Mapping[str, Any], name: str, *, is_own: bool) -> None:
    """Raise `ValueError` for arguments that a function cannot take, too many of them, or for no function of one's own.

    `name`: of the function, or of a known model or data set; `is_own`: whether it names a function.
    """
    if not arguments:
        return
    if not is_own:
        raise ValueError(
            f'arguments are for your own function, name = "module:function", not for {name}; leave them out'
        )
    if len(arguments) > ARGUMENTS_MAX:
        raise ValueError(f"arguments must be at most {ARGUMENTS_MAX}, not {len(arguments)}")
    for key in arguments:
        if not key.isidentifier():
            raise ValueError(f"the argument {key[:80]!r} must be a Python name, such as width")
    _require_shallow(arguments, DEPTH_MAX)
    if (n_bytes := len(json.dumps(arguments).encode())) > BYTES_MAX:
        raise ValueError(f"arguments must have at most {BYTES_MAX:,} bytes as JSON, not {n_bytes:,}")


def _require_shallow(value: object, depth: int) -> None:
    """Raise `ValueError` for lists and tables within each other deeper than this."""
    if not isinstance(value, dict | list | tuple):
        return
    if not depth:
        raise ValueError(f"arguments must have at most {DEPTH_MAX} tables and lists within each other")
    inner = cast(
        Sequence[object], list(cast(Mapping[str, object], value).values()) if isinstance(value, dict) else value
    )
    for one in inner:
        _require_shallow(one, depth - 1)
