"""The user's own code: find it by its name (`module:attribute`, such as `--app my_hospital:client`), and say where it
failed.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from umbel.client.errors import AppError

if TYPE_CHECKING:  # these two import torch, and a name of code can be checked without it
    from _typeshed.importlib import MetaPathFinderProtocol
    from torch import nn

    from umbel.client.app import Client


@dataclass(frozen=True, slots=True)
class OptionWords:
    """Words for error messages about a name."""

    option: str  # the flag or key that holds the name
    example: str
    wanted: str  # what it should name, as in "a Client"


_LIBRARIES = {"umbel", "contextlib"}
_MESSAGE_CHARS_MAX = 300
_FROZEN_STATE = "cannot assign to field 'state'"  # what a frozen dataclass says of `plan.state = ...`
_APP = OptionWords("--app", "my_hospital:client", "a Client")


def load_app(spec: str) -> "Client":
    """Make the client that `spec` names. Raises `AppError` as `make_named` does."""
    from umbel.client.app import Client

    return checked_client(make_named(spec, Client, _APP), spec)


def load_initial_model(spec: str, seed: int) -> "nn.Module | Client":
    """Make the model that `spec` names, or the client that has it, with torch's generator at `seed`.

    An operator who starts a run holds no data, so `spec` may name an `nn.Module`. Raises `AppError`.
    """
    import torch
    from torch import nn

    from umbel.client.app import Client

    torch.manual_seed(seed)
    made = make_named(spec, (Client, nn.Module), _APP)
    if isinstance(made, nn.Module):
        return made
    return checked_client(made, spec, "an umbel.client.Client or a torch.nn.Module")


def make_named(
    spec: str, kinds: type | tuple[type, ...], place: OptionWords, arguments: Mapping[str, object] | None = None
) -> object:
    """Return what `spec` names if it is of one of these kinds, else call it with `arguments` and return the result.

    The current directory is importable, as with `python -m`. Raises `AppError` with a sentence that says what to do;
    errors inside the user's own code pass through, except that a missing library is named.
    """
    with _missing_libraries_named(spec):
        found = _found(spec, place)
        if not isinstance(found, kinds):
            return _call(found, spec, place, arguments or {})
    if arguments:
        raise AppError(
            f"{spec} is {place.wanted}, which takes no arguments; name a function, or leave the arguments out"
        )
    return found


def find_named(spec: str, place: OptionWords) -> object:
    """Return what `spec` names, without a call. Raises `AppError` as `make_named` does."""
    with _missing_libraries_named(spec):
        return _found(spec, place)


def require_app_module(spec: str) -> None:
    """Raise `AppError` as `load_app` does if there is no module of the name in `spec`.

    Runs nothing of the user's code, also not that of the packages which hold the module. So it cannot see a module that
    a package only finds because it changes its own `__path__`.
    """
    module_name, attribute = _parts(spec, _APP)
    if not _exists(module_name):
        raise _not_found(module_name, attribute, _APP)


def _exists(module_name: str) -> bool:
    """As an import would search, with the current directory first; that does not become importable here."""
    path, name = [os.getcwd(), *sys.path], ""
    for part in module_name.split("."):
        name = f"{name}.{part}" if name else part
        if name in sys.modules:
            path = [*getattr(sys.modules[name], "__path__", ())]
            continue
        found = (_spec_by(finder, name, path) for finder in sys.meta_path)
        spec = next((one for one in found if one is not None), None)
        if spec is None:
            return False
        path = [*(spec.submodule_search_locations or ())]
    return True


def _spec_by(finder: "MetaPathFinderProtocol", name: str, path: list[str]) -> ModuleSpec | None:
    try:
        return finder.find_spec(name, path)
    except KeyError:  # of a folder without __init__.py Python wants the parent, which is not imported here
        return PathFinder.find_spec(name.rpartition(".")[2], path)


@contextmanager
def _missing_libraries_named(spec: str) -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise AppError(
            f"{spec.partition(':')[0]} imports {error.name!r}, which is not installed; install it here and try again"
        ) from error


def _parts(spec: str, place: OptionWords) -> tuple[str, str]:
    """The module and the attribute that `spec` names."""
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise AppError(f"{place.option} must look like module:attribute, such as {place.example}, not {spec!r}")
    if module_name.startswith(".") or "/" in module_name:
        raise _is_a_file(module_name, attribute, place)
    return module_name, attribute


def _found(spec: str, place: OptionWords) -> object:
    module_name, attribute = _parts(spec, place)
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports something that does not
        raise _not_found(module_name, attribute, place) from error
    if not hasattr(module, attribute):
        raise AppError(
            f"module {module_name!r} has no {attribute!r}; name {place.wanted} or a function that returns one"
        )
    return getattr(module, attribute)


def _not_found(module_name: str, attribute: str, place: OptionWords) -> AppError:
    if module_name.endswith(".py"):
        return _is_a_file(module_name, attribute, place)
    file = f"{module_name.replace('.', '/')}.py"
    return AppError(f"no module {module_name!r} here; run this in the folder that holds {file}")


def _is_a_file(name: str, attribute: str, place: OptionWords) -> AppError:
    module = name.rpartition("/")[2].removesuffix(".py").strip(".") or "my_hospital"
    return AppError(
        f"{place.option} names a module, not a file such as {name!r}: go to the folder that holds {module}.py, and "
        f"write {module}:{attribute}"
    )


def _call(found: object, spec: str, place: OptionWords, arguments: Mapping[str, object]) -> object:
    if not callable(found):
        raise AppError(f"{spec} is a {type(found).__name__}; name {place.wanted} or a function that returns one")
    try:
        return found(**arguments)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # raised inside the user's function
        how = f"with the arguments {', '.join(arguments)}" if arguments else "without arguments"
        raise AppError(f"{spec} cannot be called {how}: {error}") from error


def checked_client(made: object, spec: str, wanted: str = "an umbel.client.Client") -> "Client":
    """Return `made`, the result of `spec`, if it is a usable client. Raises `AppError`."""
    from torch import nn

    from umbel.client.app import Client

    if not isinstance(made, Client):
        raise AppError(f"{spec} returned a {type(made).__name__}; it must return {wanted}")
    if not isinstance(getattr(made, "model", None), nn.Module):
        raise AppError(
            f"the client of {spec} has no `model`; set it to the torch.nn.Module that it trains, or, in an "
            "ArrayClient, call super().__init__(arrays, sample_count)"
        )
    if isinstance(getattr(type(made), "sample_count", None), property):
        return made  # it is computed when a run needs it
    sample_count = getattr(made, "sample_count", None)
    if not isinstance(sample_count, int) or sample_count < 1:
        raise AppError(
            f"the client of {spec} has sample_count {sample_count!r}; set it to the number of samples that it holds"
        )
    return made


def where_raised(error: BaseException) -> str:
    """The error's type, its message in one line, and the last line of the client's own code that it passed.

    If it passed none, as in a ready trainer that cannot read the site's batches, the last line of a library.
    """
    frames = [*traceback.walk_tb(error.__traceback__)]
    place = next(reversed([one for one in frames if not _is_library(one[0])] or frames), None)
    where = "" if place is None else f" ({Path(place[0].f_code.co_filename).name}, line {place[1]})"
    message = " ".join(str(error).split())[:_MESSAGE_CHARS_MAX]
    if isinstance(error, FrozenInstanceError) and message == _FROZEN_STATE:
        message += '; change plan.state in place, such as plan.state["round"] = 3 or plan.state.update(...)'
    return f"{type(error).__name__}{message and f': {message}'}{where}"


def _is_library(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    return "site-packages" in frame.f_code.co_filename or module in _LIBRARIES
