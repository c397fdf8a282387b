"""Model files on the command line: `umbel model init`, `umbel run versions` and `umbel run export`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

import umbel
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.tensors import TensorKind
from umbel.aggregation.run.records import VersionRecord
from umbel.client.cli.flower import EitherApp, FlowerApp, NamedApp, RunConfig
from umbel.client.cli.options import VERSION_METAVAR, AllColumns, AsJson, RunName, version_or_best
from umbel.client.cli.output import (
    Column,
    moment,
    one_sentence_errors,
    print_columns,
    print_json,
    print_result,
)
from umbel.client.cli.view_rounds import measured
from umbel.client.errors import printable
from umbel.client.operator.operator import Operator
from umbel.client.operator.run_files import read_run_file

if TYPE_CHECKING:  # it imports torch
    from umbel.client.training.shared_state import SharedState

model_app = typer.Typer(no_args_is_help=True)
model_app.callback()(lambda: None)  # without a callback Typer drops the verb's name from a group of one verb


@dataclass(frozen=True, slots=True)
class InitialModel:
    file: str
    size_bytes: int
    n_values: int
    layout_digest: str
    tensors: Mapping[TensorKind, int]  # how many of each kind the app's model has
    base_sha256: str  # of the base tensors; empty without any


@dataclass(frozen=True, slots=True)
class ExportedModel:
    file: str
    run: str
    version: int
    round: int | None  # the round that made it; None for version 0 and rollbacks
    sha256: str
    size_bytes: int
    umbel: str


@model_app.command("init")
def init_verb(
    out: Annotated[Path, typer.Option("--out", help="Where to write the model, in safetensors.")],
    app: EitherApp = None,
    flower_app: FlowerApp = None,
    run_config: RunConfig = None,
    run_file: Annotated[
        Path | None,
        typer.Option("--run-file", help="The run file, if its section tensors says what of the model travels."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of torch's generator. The same seed gives the same weights.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write the first model of a run: the model of an app (or a torch.nn.Module) as its code initialises it. Tensors
    that stay at the sites (private and base) are left out."""
    from umbel.client.training.shared_state import SharedState

    with one_sentence_errors():
        rules = None if run_file is None else read_run_file(run_file)[1].tensor_rules
        first, hint = NamedApp(app, flower_app, run_config).first_model(seed)
        facts = _written(out, SharedState(first, rules))
    kinds = ", ".join(counted(n, f"{kind} tensor") for kind, n in facts.tensors.items() if n and kind != "mean")
    text = f"{out}: {facts.n_values} values, {facts.size_bytes} bytes" + (kinds and f" ({kinds})")
    if facts.base_sha256:
        text += f'\nfor the top of the run file: base_sha256 = "{facts.base_sha256}"'
    print_result(facts, text + (hint and f"\n{hint}"), as_json)


def _written(out: Path, shared: "SharedState") -> InitialModel:
    """Write the tensors that the coordinator has. Raises `ClientError` for a base that is not the run file's."""
    from umbel.aggregation.model.base import base_sha256
    from umbel.client.state.model_files import write_model

    if shared.rules is not None and shared.rules.base_sha256:
        shared.require_base()
    layout = write_model(out, shared.shared(), shared.layout)
    tensors = {kind: len(shared.names_of(kind)) for kind in get_args(TensorKind)}
    base = base_sha256(shared.base()) if tensors["base"] else ""
    return InitialModel(str(out), out.stat().st_size, layout.n_values, layout.digest, tensors, base)


def list_versions(operator: Operator, run: RunName, shows_all: AllColumns = False, as_json: AsJson = False) -> None:
    """List a run's model versions: what made each version, its metrics, and whether it was deleted."""
    versions = operator.versions(run)
    if as_json:
        print_json(versions)
        return
    columns = [
        Column("version", 100, [str(one.version) for one in versions]),
        Column("sha256", 60, [printable(one.sha256[:12]) for one in versions]),
        Column("MB", 30, [f"{one.size_bytes / 1e6:.2f}" for one in versions]),
        Column("from", 80, [_origin(one) for one in versions]),
        Column("samples", 40, [str(one.sample_count) for one in versions]),
        *measured("training", 50, [one.metrics for one in versions]),
        *measured("held-out", 70, [one.evaluation for one in versions]),
        Column("made", 20, [moment(one.created_at) for one in versions]),
        Column("state", 90, [_state(one) for one in versions]),
    ]
    print_columns(columns, shows_all)


def export_model(
    operator: Operator,
    run: RunName,
    out: Annotated[Path, typer.Option("--out", help="Where to write the model, in safetensors.")],
    version: Annotated[
        str | None,
        typer.Option("--version", metavar=VERSION_METAVAR, help="The version to write; by default the newest."),
    ] = None,
    full_precision: Annotated[
        bool,
        typer.Option(
            "--full-precision", help="Write the coordinator's full-precision copy, before it was rounded for clients."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a model version to a file, after checking its SHA-256. The file is written whole or not at all."""
    found = _wanted(operator, run, None if version is None else version_or_best("--version", version))
    sha256 = found.master_sha256 if full_precision else found.sha256
    if full_precision:
        operator.download_master(run, found, out)
    else:
        operator.download_model(sha256, out)
    from umbel.client.operator.first_model import leave_out_control  # it imports torch

    what = ", in full precision" if full_precision else ""
    if leave_out_control(out):
        what += ", without control variates (the hash is of the version with them)"
    n_bytes = out.stat().st_size
    facts = ExportedModel(str(out), run, found.version, found.round, sha256, n_bytes, umbel.__version__)
    text = f"{out}: version {found.version} ({_origin(found)}){what}, sha256 {printable(sha256)}"
    print_result(facts, text, as_json)


def _wanted(operator: Operator, run: str, version: int | Literal["best"] | None) -> VersionRecord:
    """The record of the version to export. None: the newest. Raises `ValueError` for a version that does not exist, or
    whose model was deleted.
    """
    if version == "best":
        return _best(operator, run)
    newest = operator.run(run).model.version
    found = operator.versions(run, first=newest if version is None else version, count=1)
    if not found or (version is not None and found[0].version != version):
        raise ValueError(f"run {run} has no version {version}, only 0 to {newest}")
    if found[0].deleted_at is not None:
        raise ValueError(f"version {version} was deleted; `umbel run versions {run}` lists those that are kept")
    return found[0]


def _best(operator: Operator, run: str) -> VersionRecord:
    """The best version by the metric of the run file's [stop], which is always kept."""
    best = next((one for one in operator.versions(run) if one.is_best), None)
    if best is None:
        raise ValueError(
            f"run {run} has no best version, because its run file has no [stop] that names a metric, or that metric "
            f"was not measured yet; give a number (umbel run versions {run} lists them)"
        )
    return best


def _origin(version: VersionRecord) -> str:
    if version.rolled_back_to is not None:
        return f"rollback to {version.rolled_back_to}"
    return "the start" if version.round is None else f"round {version.round}"


def _state(version: VersionRecord) -> str:
    best = ["best"] if version.is_best else []
    return ", ".join(best + ([] if version.deleted_at is None else [f"deleted {moment(version.deleted_at)}"]))
