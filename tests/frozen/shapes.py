"""What the fields of a type are, written without a name that code may change: of classes, modules, functions."""

import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_PLAIN: Mapping[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "yes or no",
    bytes: "bytes",
    NoneType: "null",
    object: "anything",
    Any: "anything",
    Path: "path",
    SecretStr: "secret text",
}


def shape(kind: Any) -> Any:
    """A type in plain JSON."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, NewType):
        return shape(kind.__supertype__)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"one of": list(inner)}
    if origin in (Union, UnionType):
        return {"either": [shape(one) for one in inner]}
    if origin is typing.Annotated:
        return shape(inner[0])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"object of": shape(inner[1])}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if len(inner) == 1 or inner[1] is Ellipsis:
            return {"list of": shape(inner[0])}
        return {"list": [shape(one) for one in inner]}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"one of": [one.value for one in kind]}
    if isinstance(kind, type) and is_dataclass(kind):
        return _of_dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: _setting(one) for name, one in kind.model_fields.items()}
    raise TypeError(f"no shape is known for {kind!r}")


def _of_dataclass(kind: type[Any]) -> dict[str, Any]:
    hints, found = get_type_hints(kind), dict[str, Any]()
    for one in fields(kind):
        found[one.name] = {"type": shape(hints[one.name])}
        if one.default is not MISSING:
            found[one.name]["default"] = plain(one.default)
        elif one.default_factory is not MISSING:
            found[one.name]["default"] = plain(one.default_factory())
    is_closed = getattr(kind, "__pydantic_config__", {}).get("extra") == "forbid"
    return {"fields": found, "other fields": "refused" if is_closed else "ignored"}


def _setting(field: FieldInfo) -> dict[str, Any]:
    found: dict[str, Any] = {"type": shape(field.annotation)}
    if field.default is not PydanticUndefined:
        found["default"] = plain(field.default)
    if field.metadata:
        found["bounds"] = sorted(map(repr, field.metadata))
    return found


def plain(value: Any) -> Any:
    """A default value in plain JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return value
