"""The first model of a run as the coordinator takes it: with the kinds of [tensors], without what stays at sites, and
with SCAFFOLD's control variates if the run has them.
"""

import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.artifact import LAYOUT_KEY, layout_of
from umbel.aggregation.model.base import base_sha256
from umbel.aggregation.model.kinds import require_fitting, require_steppable
from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.model.state import State, with_first_control
from umbel.aggregation.model.statistics import careful_of_statistics
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.tensors import KINDS_KEPT, TensorKind, TensorRules
from umbel.aggregation.run.file import RunFile
from umbel.client.state.model_files import layout_in, read_tensors, write_model


@dataclass(frozen=True, slots=True)
class FirstModel:
    """A model file to upload."""

    path: Path
    remarks: tuple[str, ...]  # for the operator: what was left out, and what may do harm


@contextmanager
def fitted_model(path: Path, file: RunFile) -> Generator[FirstModel]:
    """The model file as the run of this file takes it: `path` itself, or a temporary file.

    Raises `LayoutError` if the run cannot have this model, and `OSError`.
    """
    found, rules = layout_in(path), file.tensor_rules
    layout = found.model
    kinds: Mapping[str, TensorKind] = {spec.name: _kind_of(spec, rules) for spec in layout.tensors}
    has_control = found.has_control or file.training.has_control
    if all(spec.kind == kinds[spec.name] for spec in layout.tensors) and not has_control:
        yield _checked(path, layout, file, ())
        return
    state = layout.full_state(read_tensors(path)[1])
    _require_base({name: state[name] for name, kind in kinds.items() if kind == "base"}, rules)
    left_out = tuple(_left_out(kind, [name for name in kinds if kinds[name] == kind]) for kind in sorted(KINDS_KEPT))
    fitting = layout.with_kinds(kinds.__getitem__)
    if file.training.has_control:
        fitting = fitting.with_control
        state = with_first_control(state, fitting)
    with tempfile.TemporaryDirectory(prefix="umbel-model-") as folder:
        write_model(out := Path(folder) / "model.safetensors", state, fitting)
        yield _checked(out, fitting, file, tuple(filter(None, (*left_out, _careful_of_patterns(kinds, rules)))))


def leave_out_control(path: Path) -> bool:
    """Write a model file again without the control variates of SCAFFOLD; returns whether it had any. A master copy that
    holds more than a model stays as it is.
    """
    metadata, owned = read_tensors(path)
    if LAYOUT_KEY not in metadata:
        return False
    layout = layout_of(metadata, owned)
    if not layout.has_control:
        return False
    aside = path.with_name(path.name + ".part")
    write_model(aside, layout.full_state(owned), layout.model)
    aside.replace(path)
    return True


def _checked(path: Path, layout: Layout, file: RunFile, remarks: tuple[str, ...]) -> FirstModel:
    require_fitting(file.tensor_rules, layout, file.coarsest_step)
    require_steppable(file.aggregation, file.training, layout)
    careful = careful_of_statistics(layout, file.tensor_rules)
    return FirstModel(path, remarks + ((f"careful: {careful}",) if careful else ()))


def _kind_of(spec: TensorSpec, rules: TensorRules | None) -> TensorKind:
    """The kind of a tensor in the run: as the rules list it, else as the file states it."""
    try:
        listed = None if rules is None else rules.kind_of(spec.name)
    except ValueError as error:
        raise LayoutError(str(error)) from error
    if listed is not None and spec.kind not in ("mean", listed):
        raise LayoutError(
            f"tensor {spec.name!r} has the kind {spec.kind} in the model file, but the kind {listed} in [tensors]: "
            "change the run file, or make the model file again with `umbel model init --run-file`"
        )
    return spec.kind if listed is None else listed


def _careful_of_patterns(kinds: Mapping[str, TensorKind], rules: TensorRules | None) -> str:
    """A warning of a pattern that leaves nothing out, though others do; else empty."""
    kept = [kind for kind in KINDS_KEPT if kind in kinds.values()]
    pattern = "" if rules is None or not kept else rules.unmatched(kinds, "private", "base")
    if not pattern:
        return ""
    return (
        f"careful: the pattern {pattern!r} in [tensors] matches no tensor of the model file. A client whose model has "
        "none either refuses the run. If the pattern is misspelt, correct it"
    )


def _left_out(kind: TensorKind, names: list[str]) -> str:
    if not names:
        return ""
    some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"left out of the upload: {counted(len(names), f'{kind} tensor')} ({some})"


def _require_base(base: State, rules: TensorRules | None) -> None:
    """Raise `LayoutError` if the file's base tensors are not those of the run file."""
    if not base or rules is None or (found := base_sha256(base)) == rules.base_sha256:
        return
    said = f"has base_sha256 = {rules.base_sha256[:12]}…" if rules.base_sha256 else "has no base_sha256"
    raise LayoutError(
        f"the run file {said}, but the base tensors of the model file hash to {found[:12]}…: for this base, write the "
        f'line base_sha256 = "{found}" at the top of the run file'
    )
