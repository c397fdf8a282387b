"""The formats that others rely on, as the code has them now: of files, of messages, of the database.

What each is called here is a word of this folder, so that a class or a module may be renamed.
"""

import re
import sqlite3
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from tests.frozen.kept import FOLDER
from tests.frozen.shapes import plain, shape
from tests.servers.migrated import copy_sqlite
from umbel.aggregation.audit.bundle import Bundle, PublicAuditKey, RoundEnded, RunCreated, Sealed, SignedReport
from umbel.aggregation.messages import (
    AssignmentCounts,
    AssignmentStatus,
    CheckedIn,
    CheckIn,
    Decline,
    Enrolled,
    Enrolment,
    NotComing,
    OpenRuns,
    Problem,
    ReportAnswer,
)
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.reports import EvaluationDone, MaskedInput, WorkDone
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import LiveRound, RoundRecord, RunProgress, RunView, VersionRecord
from umbel.aggregation.run.trace import Trace
from umbel.aggregation.trust.members import MemberList
from umbel.client.policy.policy import SitePolicy
from umbel.client.state.secure_store import Begun, RememberedSum
from umbel.client.state.state_dir import EnrolledAs
from umbel.client.state.store import PendingReport
from umbel.server.http.routes_admin import TokenOrder, Tokens
from umbel.server.http.routes_lifecycle import PauseOrder, RollbackOrder, StopOrder
from umbel.server.serve.app import create_app
from umbel.server.settings import Settings
from umbel.server.store.round_rows import (
    StoredAbandoned,
    StoredClosing,
    StoredCommitted,
    StoredRecruiting,
    StoredTraining,
)
from umbel.server.store.tables import Base
from umbel.sim.experiment.file import TrialSpec, experiment_of
from umbel.sim.federation.rows import Row

Json = dict[str, Any]
_MESSAGES: Mapping[str, type[Any]] = {
    "enrolment": Enrolment,
    "answer to an enrolment": Enrolled,
    "check-in": CheckIn,
    "answer to a check-in": CheckedIn,
    "assignment": Assignment,
    "open runs": OpenRuns,
    "state of an assignment": AssignmentStatus,
    "whether an assignment counts": AssignmentCounts,
    "report": WorkDone,
    "report of an evaluation": EvaluationDone,
    "report of a masked update": MaskedInput,
    "answer to a report": ReportAnswer,
    "decline": Decline,
    "not coming": NotComing,
    "problem": Problem,
    "order of tokens": TokenOrder,
    "tokens": Tokens,
    "order to pause": PauseOrder,
    "order to stop": StopOrder,
    "order to roll back": RollbackOrder,
    "run at a glance": RunView,
    "progress of a run": RunProgress,
    "round under way": LiveRound,
    "version": VersionRecord,
    "public audit key": PublicAuditKey,
}
_AUDIT: Mapping[str, type[Any]] = {
    "bundle": Bundle,
    "facts of a run's creation": RunCreated,
    "facts of an attempt's end": RoundEnded,
    "sealed bundle": Sealed,
    "signed report": SignedReport,
}
_STORED: Mapping[str, type[Any]] = {
    "plan of a round": RoundPlan,
    "plan of a codec": CodecPlan,
    "state: recruiting": StoredRecruiting,
    "state: training": StoredTraining,
    "state: closing": StoredClosing,
    "state: committed": StoredCommitted,
    "state: abandoned": StoredAbandoned,
    "a client's enrolment": EnrolledAs,
    "a client's pending report": PendingReport,
    "a client's secure attempt": Begun,
    "a client's remembered sum": RememberedSum,
}
_WORLD = ("data", "model", "partition", "fleet", "engine", "measure", "sites")
_NAMED_AFTER_CODE = ("title", "summary", "description", "operationId", "tags")


def run_file() -> Json:
    return dict(shape(RunFile))


def experiment_file() -> Json:
    """The sections beside the run file's; and one file with keys of every section, as it is read."""
    sections = dict(shape(TrialSpec))["fields"]
    whole = tomllib.loads((FOLDER / "experiment.toml").read_text())
    trials = [plain(asdict(one)) for one in experiment_of(whole).trials]
    return {"sections": {name: sections[name]["type"] for name in _WORLD}, "read": trials}


def policy_file() -> Json:
    return dict(shape(SitePolicy))


def settings() -> Json:
    return {"prefix of variables": Settings.model_config.get("env_prefix"), "fields": shape(Settings)}


def messages() -> Json:
    return {name: shape(kind) for name, kind in _MESSAGES.items()}


def audit() -> Json:
    return {name: shape(kind) for name, kind in _AUDIT.items()}


def records() -> Json:
    """A round's record, a line of rounds.jsonl, a trace, a member list."""
    kinds = {"record of a round": RoundRecord, "line of rounds.jsonl": Row, "trace": Trace, "member list": MemberList}
    return {name: shape(kind) for name, kind in kinds.items()}


def stored() -> Json:
    return {name: shape(kind) for name, kind in _STORED.items()}


# --- the database -----------------------------------------------------------------------------------------------------


def sqlite_schema() -> str:
    """Every CREATE statement after all migrations, in order of the names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "umbel.db")
        copy_sqlite(path)
        connection = sqlite3.connect(path)
        found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type DESC, name")
        statements = [str(sql) for (sql,) in found.fetchall()]
        connection.close()
    return _script(statements)


def postgresql_schema() -> str:
    """The same tables in PostgreSQL's words, as the code declares them."""
    dialect, statements = postgresql.dialect(), list[str]()  # type: ignore[no-untyped-call]
    for table in sorted(Base.metadata.tables.values(), key=lambda one: one.name):
        statements.append(str(CreateTable(table).compile(dialect=dialect)))
        indices = sorted(table.indexes, key=lambda one: str(one.name))
        statements.extend(str(CreateIndex(index).compile(dialect=dialect)) for index in indices)
    return _script(statements)


def _script(statements: Iterable[str]) -> str:
    """One statement after another: white space of one kind, and a column or constraint a line, in their order."""
    texts = [re.sub(r"\s+", " ", one).strip() for one in statements]
    return "".join(re.sub(r", (?=\"?[a-z_A-Z0-9]+\"? )", ",\n    ", one) + ";\n" for one in texts)


# --- the document of the API ------------------------------------------------------------------------------------------


def openapi() -> Json:
    """/v1/openapi.json by path and method, without words, and without the names of functions and classes."""
    with tempfile.TemporaryDirectory() as folder:
        document = create_app(Settings(data=Path(folder))).openapi()
    schemas = document["components"]["schemas"]
    problem = _expanded(document["paths"]["/v1/check-ins"]["post"]["responses"]["401"]["content"], schemas, ())
    expanded = _said_once(_expanded(document["paths"], schemas, ()), problem, "the problem document")
    security = document["components"].get("securitySchemes", {})
    return {
        "problem": problem,
        "paths": cast(Json, expanded),
        "security": _expanded(security, {}, ()),
        "version": document["info"]["version"],
        "server": document.get("servers", []),
    }


def _expanded(node: Any, schemas: Json, within: tuple[str, ...], *, are_names: bool = False) -> Any:
    """`node` with each reference replaced by what it refers to. `are_names`: whether its keys name properties."""
    if isinstance(node, list):
        return [_expanded(one, schemas, within) for one in node]
    if not isinstance(node, dict):
        return node
    if "$defs" in node:
        schemas, node = {**schemas, **node["$defs"]}, {key: one for key, one in node.items() if key != "$defs"}
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name in within:
            return {"again": len(within) - within.index(name)}
        return _expanded(schemas[name], schemas, (*within, name))
    return {
        key: _expanded(value, schemas, within, are_names=key == "properties" and not are_names)
        for key, value in node.items()
        if are_names or not (key in _NAMED_AFTER_CODE and isinstance(value, str | list))
    }


def _said_once(node: Any, what: Json, word: str) -> Any:
    """`node` with a word wherever it says this."""
    if node == what:
        return word
    if isinstance(node, list):
        return [_said_once(one, what, word) for one in node]
    return {key: _said_once(one, what, word) for key, one in node.items()} if isinstance(node, dict) else node


TEXTS: Mapping[str, Callable[[], str]] = {"schema.sql": sqlite_schema, "schema.postgresql.sql": postgresql_schema}
OBJECTS: Mapping[str, Callable[[], Json]] = {
    "run_file.json": run_file,
    "experiment_file.json": experiment_file,
    "policy_file.json": policy_file,
    "settings.json": settings,
    "openapi.json": openapi,
    "messages.json": messages,
    "audit.json": audit,
    "records.json": records,
    "stored.json": stored,
}
