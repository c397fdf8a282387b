"""Reads and checks an operator's new run: a run file, and its member list if there is one."""

import json
import tomllib
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.phrases import counted
from umbel.aggregation.run.file import RunFile, require_named
from umbel.aggregation.run.of_experiment import run_part
from umbel.aggregation.trust.members import MembersRefused, SignedMembers, read_members
from umbel.server.http.deps import parse_json
from umbel.server.http.limits import RUN_FILE_BYTES_MAX
from umbel.server.problems import Refused, first_error

_RUN_FILE = TypeAdapter(RunFile)
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class RunOrder:
    """PUT /v1/admin/runs/{name}, as JSON. `run_file`: TOML; `members`: the text of the member list's file, or null if
    the run is open to all clients.
    """

    run_file: str
    members: str | None = None
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a list under a misspelt key would let everybody in


RUN_ORDER = TypeAdapter(RunOrder)


@dataclass(frozen=True, slots=True)
class NewRun:
    """`members`: the list that the file names. Sites check its officers' signatures."""

    file: RunFile
    members: SignedMembers | None = None


def read_new_run(body: bytes, content_type: str) -> NewRun:
    """A run file's TOML, or JSON that holds it. Raises `Refused`. Run it in a thread: it can take a second."""
    if content_type.partition(";")[0].strip().lower() != _JSON:
        return NewRun(read_run_file(body))
    order = parse_json(body, RUN_ORDER)
    file = read_run_file(order.run_file.encode())
    return NewRun(file, None if order.members is None else _members_of(file, order.members))


def read_run_file(body: bytes) -> RunFile:
    """Parse a run file's TOML by way of JSON, which pydantic reads strictly (`true` is not a number). What only the
    simulator reads is left out. Raises `Refused`.

    Run it in a thread: it can take a second.
    """
    if len(body) > RUN_FILE_BYTES_MAX:
        raise Refused("body-too-large", f"the run file has {len(body)} bytes; at most {RUN_FILE_BYTES_MAX} are allowed")
    try:
        table, _ = run_part(tomllib.loads(body.decode()))
        return _RUN_FILE.validate_json(json.dumps(table), strict=True)
    except ValidationError as error:
        raise Refused("malformed-request", f"run file, {first_error(error)}") from error
    except (ValueError, TypeError, RecursionError) as error:  # invalid TOML, numbers with thousands of digits, dates
        raise Refused("malformed-request", f"the run file does not parse: {error}") from error


def _members_of(file: RunFile, text: str) -> SignedMembers:
    try:
        signed = read_members(text.encode())
        require_named(file, signed.list)
    except MembersRefused as error:
        raise Refused("malformed-request", f"members: {error}") from error
    if (n_members := len(signed.list.members)) < file.rounds.minimum:
        raise Refused(
            "malformed-request",
            f"the member list has {counted(n_members, 'member')}, and rounds.minimum asks for {file.rounds.minimum}: "
            "name a list with more members, or lower the minimum",
        )
    return signed
