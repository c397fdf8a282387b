"""The client that `--app` names, for one of several clients of a job."""

import inspect

import torch
from torch.distributed.device_mesh import DeviceMesh

from umbel.aggregation.phrases import counted
from umbel.aggregation.seeds import derive_seed
from umbel.client.app import Client
from umbel.client.datacenter.ranks.group import GroupError
from umbel.client.errors import AppError
from umbel.client.user_code import OptionWords, checked_client, find_named, make_named, where_raised

_APP = OptionWords("--app", "my_hospital:make_client", "a Client, or a function make_client(number, of)")


def client_of(app: str, number: int, of: int, seed: int, mesh: DeviceMesh | None = None) -> Client:
    """The client that `app` names: a Client, a function of nothing, or `make_client(number, of)`, which gets the
    client's number and how many there are. torch's generator is seeded before.

    `mesh`: the client's ranks, if it has several; `make_client(number, of, mesh)` gets them. Raises `AppError`.
    """
    torch.manual_seed(seed if number == 0 else derive_seed(seed, f"client {number}"))
    given = (number, of) if mesh is None else (number, of, mesh)
    wanted = ("number", "of", "mesh")[: len(given)]
    found = find_named(app, _APP)
    arguments = dict(zip(_numbered(found, app, wanted), given, strict=False))
    try:
        made = make_named(app, Client, _APP, arguments)
    except AppError:
        raise
    except Exception as error:
        raise GroupError(f"{app} could not make client {number} of {of}: {where_raised(error)}") from error
    return checked_client(made, app)


def _numbered(found: object, app: str, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the parameters that take what `wanted` names; empty for a Client, and for a function without
    parameters. Raises `AppError` for anything else, and for code that does not take the ranks of its client.
    """
    parameters = {} if isinstance(found, Client) or not callable(found) else inspect.signature(found).parameters
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one.name for one in parameters.values() if one.default is inspect.Parameter.empty and one.kind in kinds]
    if "mesh" in needed and "mesh" not in wanted:
        raise AppError(
            f"{app} takes the mesh of its client's ranks, so say how many ranks a client has: --ranks-per-client"
        )
    if parameters.keys() >= {*wanted}:
        return wanted
    if len(needed) == len(wanted) or not (needed or "mesh" in wanted):
        return tuple(needed)
    how = "which gets the client's number and how many there are"
    if "mesh" in wanted:
        how += ", and the mesh of the client's ranks, over which it divides its model (--ranks-per-client)"
    else:
        how += ", or without parameters"
    raise AppError(
        f"{app} needs {counted(len(needed), 'argument')}: write it as make_client({', '.join(wanted)}), {how}"
    )
