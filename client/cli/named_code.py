"""What a user's own code offers under a name, `module:attribute`: the thing itself, or what calling it gives."""

import importlib
import os
import sys
from dataclasses import dataclass

from umbel.client.errors import AppError


@dataclass(frozen=True, slots=True)
class OptionWords:
    """Where a user writes such a name. `option`: what they write it behind; `example`: of a good one; `wanted`: what
    it should name, as in "a Client".
    """

    option: str
    example: str
    wanted: str


def make_named(spec: str, kinds: type | tuple[type, ...], place: OptionWords) -> object:
    """What `spec` names, if it is one of these kinds, else what calling it gives.

    The current directory is importable, as with `python -m`. Raises `AppError` with a sentence that says what to do.
    A library that is missing is named; other errors inside the user's own code pass through.
    """
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise AppError(f"{place.option} must look like module:attribute, such as {place.example}, not {spec!r}")
    try:
        found = _attribute(module_name, attribute, place)
        return found if isinstance(found, kinds) else _call(found, spec, place)
    except ModuleNotFoundError as error:
        raise AppError(
            f"{module_name} imports {error.name!r}, which is not installed; install it here and try again"
        ) from error


def _attribute(module_name: str, attribute: str, place: OptionWords) -> object:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # it is there, but imports something that is not
        file = f"{module_name.replace('.', '/')}.py"
        raise AppError(f"no module {module_name!r} here; run this in the folder that holds {file}") from error
    if not hasattr(module, attribute):
        raise AppError(
            f"module {module_name!r} has no {attribute!r}; name {place.wanted} or a function that returns one"
        )
    return getattr(module, attribute)


def _call(found: object, spec: str, place: OptionWords) -> object:
    if not callable(found):
        raise AppError(f"{spec} is a {type(found).__name__}; name {place.wanted} or a function that returns one")
    try:
        return found()
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # raised inside the user's function
        raise AppError(f"{spec} cannot be called without arguments: {error}") from error
