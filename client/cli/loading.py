"""Find the user's code: `--app module:attribute` names a `Client`, or a function or class that makes one.

Where only the first weights are wanted, it may name an `nn.Module` instead: who starts a run need not hold data.
"""

import torch
from torch import nn

from umbel.client.app import Client
from umbel.client.cli.named_code import OptionWords, make_named
from umbel.client.errors import AppError

_APP = OptionWords("--app", "my_hospital:client", "a Client")


def load_app(spec: str) -> Client:
    """The client that `spec` names. Raises `AppError` with a sentence that says what to do.

    The current directory is importable, as with `python -m`. A library that is missing is named; other errors
    inside the user's own code pass through.
    """
    return _checked(make_named(spec, Client, _APP), spec)


def load_initial_model(spec: str, seed: int) -> nn.Module:
    """The model that `spec` names, itself or as a client's, made with torch's generator at `seed`.

    Raises `AppError` with a sentence that says what to do.
    """
    torch.manual_seed(seed)
    made = make_named(spec, (Client, nn.Module), _APP)
    return made if isinstance(made, nn.Module) else _checked(made, spec).model


def _checked(made: object, spec: str) -> Client:
    if not isinstance(made, Client):
        raise AppError(f"{spec} gave a {type(made).__name__}; it must give an umbel.client.Client")
    if not isinstance(getattr(made, "model", None), nn.Module):
        raise AppError(f"the client of {spec} has no `model`; set it to the torch.nn.Module it trains")
    sample_count = getattr(made, "sample_count", None)
    if not isinstance(sample_count, int) or sample_count < 1:
        raise AppError(f"the client of {spec} has sample_count {sample_count!r}; set it to how many samples it holds")
    return made
