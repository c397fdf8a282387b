"""Find the user's code: `--app module:attribute` names a `Client`, or a function or class that makes one.

Where only the first weights are wanted, it may name an `nn.Module` instead: who starts a run need not hold data.
"""

import importlib
import os
import sys

import torch
from torch import nn

from umbel.client.app import Client
from umbel.client.errors import AppError


def load_app(spec: str) -> Client:
    """The client that `spec` names. Raises `AppError` with a sentence that says what to do.

    The current directory is importable, as with `python -m`. A library that is missing is named; other errors
    inside the user's own code pass through.
    """
    return _checked(_make(spec, Client), spec)


def load_initial_model(spec: str, seed: int) -> nn.Module:
    """The model that `spec` names, itself or as a client's, made with torch's generator at `seed`.

    Raises `AppError` with a sentence that says what to do.
    """
    torch.manual_seed(seed)
    made = _make(spec, (Client, nn.Module))
    return made if isinstance(made, nn.Module) else _checked(made, spec).model


def _make(spec: str, kinds: type | tuple[type, ...]) -> object:
    """What `spec` names, if it is one of these kinds, else what calling it gives."""
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise AppError(f"--app must look like module:attribute, such as my_hospital:client, not {spec!r}")
    try:
        found = _attribute(module_name, attribute)
        return found if isinstance(found, kinds) else _call(found, spec)
    except ModuleNotFoundError as error:
        raise AppError(
            f"{module_name} imports {error.name!r}, which is not installed; install it here and try again"
        ) from error


def _attribute(module_name: str, attribute: str) -> object:
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
        raise AppError(f"module {module_name!r} has no {attribute!r}; name a Client or a function that returns one")
    return getattr(module, attribute)


def _call(found: object, spec: str) -> object:
    if not callable(found):
        raise AppError(f"{spec} is a {type(found).__name__}; name a Client or a function that returns one")
    try:
        return found()
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # raised inside the user's function
        raise AppError(f"{spec} cannot be called without arguments: {error}") from error


def _checked(made: object, spec: str) -> Client:
    if not isinstance(made, Client):
        raise AppError(f"{spec} gave a {type(made).__name__}; it must give an umbel.client.Client")
    if not isinstance(getattr(made, "model", None), nn.Module):
        raise AppError(f"the client of {spec} has no `model`; set it to the torch.nn.Module it trains")
    sample_count = getattr(made, "sample_count", None)
    if not isinstance(sample_count, int) or sample_count < 1:
        raise AppError(f"the client of {spec} has sample_count {sample_count!r}; set it to how many samples it holds")
    return made
