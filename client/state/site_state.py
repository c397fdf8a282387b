"""What a client keeps from one round of a run to the next, on disk: its `plan.state`, the private tensors, and what the
run's algorithm has it keep.

A safetensors file has the state after one training, and is named by the model version from which that began. It is
written beside the update, and kept before the report is sent. So no kill loses the state of a report that was accepted.

The report may be refused then, and its round abandoned or rolled back. So a training begins with the newest state of an
older version that *counts*: the coordinator says that its model has that work in it. Thus what clients keep under
SCAFFOLD stays in step with the control variate of the model, an attempt that is repeated begins as the abandoned one
did, and a simulation keeps the same states. Older states stay for rollbacks: that with which the last training began,
and more while they are few and small.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from umbel.aggregation.types import AssignmentId, RunId
from umbel.client.files import make_private, sync
from umbel.client.state.model_files import read_metadata, read_tensors, write_tensors
from umbel.client.state.packing import Packing, unpack

STATE_BYTES_MAX = 1 << 30
_JSON_BYTES_MAX = 1 << 24
_KEPT = "pulls"  # its name in the file, from when only FedDyn kept something
_KEY, RUN_KEY, _VERSION = "umbel.state", "umbel.run", "umbel.version"
_ASSIGNMENT, _BEGAN = "umbel.assignment", "umbel.began"  # of the training; the version of the state that it began with
_STATES_MAX, _OLDER_BYTES_MAX = 16, 1 << 28  # of a run: all states; those but for the newest two
log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class SiteState:
    """`state`: of the site's own code. `private`: the private tensors by name, on the CPU; empty: as the client makes
    them. `kept`: what the run's algorithm has the client keep (`client/training/kept.py`).
    """

    state: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    private: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False)
    kept: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False)

    def __bool__(self) -> bool:
        return bool(self.state or self.private or self.kept)


class SiteStateStore:
    """The states of one client, a folder for each run. `waiting`: that of an update whose report was not answered."""

    def __init__(self, folder: Path, waiting: Path) -> None:
        self._folder, self.waiting = folder, waiting
        self._began: Path | None = None  # the state that `before` has found last

    def before(self, run: RunId, version: int, counts: Callable[[AssignmentId], bool]) -> SiteState:
        """The state with which a training from this model version begins: the newest of an older version that counts.
        A damaged file is set aside. `counts`: whether the run's newest model has the work of an assignment in it.

        If none of them counts: the oldest, if that training began with an older state, which is gone (a rollback went
        behind all that are here); else none. A coordinator that was restored from a backup asks for versions before all
        that are here. Then it is the newest of a later version: a site's own layers that know later models are better
        than none.
        """
        versions = self._versions(run)
        older = [self._path(run, one) for one in versions if one < version]
        if older:
            found = _newest_that_counts(older, counts) or _first_of_many(older)
        else:
            found = newest_state(self._path(run, one) for one in versions if one > version)
        self._began = None if found is None else found[0]
        return SiteState() if found is None else found[1]

    def as_it_began(self) -> SiteState:
        """The state that `before` has found last, without what a training has changed in it."""
        return SiteState() if self._began is None else read_state(self._began) or SiteState()

    def wait(
        self, run: RunId, version: int, assignment: AssignmentId, left: SiteState, *, if_empty: bool = False
    ) -> None:
        """Write the state after this assignment's training from this version, after `before`. `if_empty`: also that of
        a client that keeps nothing. Raises `StateTooLarge` or `TypeError` for what cannot be kept.
        """
        if not (left or if_empty or self._versions(run)):
            return
        about = {_ASSIGNMENT: assignment} | ({} if self._began is None else {_BEGAN: self._began.stem})
        make_private(self._folder / run)
        write_state(self.waiting, left, run, version, about)

    def keep(self) -> None:
        """Keep the waiting state, if there is one, because its update is about to be reported. Others stay that a
        rollback may need: the one with which its training began, and the newest while they are few and small.
        """
        if not self.waiting.exists():
            return
        try:
            metadata, _ = read_tensors(self.waiting)
            run, version, began = RunId(metadata[RUN_KEY]), int(metadata[_VERSION]), metadata.get(_BEGAN)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            _set_aside(self.waiting, error)
            return
        self.waiting.replace(self._path(run, version))
        stay, n_bytes = {version, *([] if began is None else [int(began)])}, 0
        for one in reversed(self._versions(run)):
            if one not in stay:
                n_bytes += self._path(run, one).stat().st_size
                if len(stay) == _STATES_MAX or n_bytes > _OLDER_BYTES_MAX:
                    break
                stay.add(one)
        for gone in set(self._versions(run)) - stay:
            self._path(run, gone).unlink()
        sync(self._folder / run)

    def _versions(self, run: RunId) -> list[int]:
        """The versions with a state, in ascending order."""
        stems = (path.stem for path in (self._folder / run).glob("*.safetensors"))
        return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit())

    def _path(self, run: RunId, version: int) -> Path:
        return self._folder / run / f"{version}.safetensors"


class StateTooLarge(ValueError):
    """The state is larger than what a client keeps."""


def write_state(
    path: Path,
    left: SiteState,
    run: RunId,
    version: int,
    about: Mapping[str, str] = MappingProxyType({}),
    *,
    is_durable: bool = True,
) -> None:
    """Write the state after training from this version. Raises `StateTooLarge`, or `TypeError` for other objects.

    `about`: what the file's metadata say besides.
    """
    packed, tensors = pack_state(left)
    metadata = {RUN_KEY: run, _VERSION: str(version), _KEY: packed, **about}
    write_tensors(path, tensors, metadata, is_durable=is_durable)


def pack_state(left: SiteState) -> tuple[str, dict[str, Tensor]]:
    """The JSON and the tensors of a state's file. Raises `StateTooLarge`, or `TypeError` for other objects."""
    packing = Packing()
    found = {"state": left.state, "private": dict(left.private)} | ({_KEPT: dict(left.kept)} if left.kept else {})
    packed = json.dumps(packing.pack(found), allow_nan=True)
    tensors = packing.separate()
    n_bytes = len(packed) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if n_bytes > STATE_BYTES_MAX or len(packed) > _JSON_BYTES_MAX:
        raise StateTooLarge(
            f"plan.state, the private tensors and what the algorithm keeps take {n_bytes:,} bytes, {len(packed):,} of "
            f"them as JSON; a client keeps at most {STATE_BYTES_MAX:,} bytes, {_JSON_BYTES_MAX:,} of them as JSON: "
            "keep less in plan.state"
        )
    return packed, tensors


def _first_of_many(paths: Sequence[Path]) -> tuple[Path, SiteState] | None:
    """The first of these files that is not damaged, and the state in it, if its training began with an older state."""
    for path in paths:
        if path.exists() and (metadata := _metadata(path)) and (state := read_state(path)) is not None:
            return (path, state) if _BEGAN in metadata else None
    return None


def read_state(path: Path) -> SiteState | None:
    """The state in a file. A damaged file is set aside, and the result is None."""
    try:
        metadata, tensors = read_tensors(path)
        # Copies: the values may be changed in place, and the file must stay as it is.
        found = unpack(json.loads(metadata[_KEY]), {name: tensor.clone() for name, tensor in tensors.items()})
        return SiteState(dict(found["state"]), dict(found["private"]), dict(found.get(_KEPT, {})))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        _set_aside(path, error)
        return None


def _metadata(path: Path) -> dict[str, str] | None:
    """What a file says of its state; None for a damaged file, which is set aside."""
    try:
        return read_metadata(path)
    except (SafetensorError, OSError) as error:
        _set_aside(path, error)
        return None


def newest_state(paths: Iterable[Path]) -> tuple[Path, SiteState] | None:
    """The last of these files that is not damaged, and the state in it; None if no file is left."""
    for path in reversed(list(paths)):
        if (state := read_state(path)) is not None:
            return path, state
    return None


def _newest_that_counts(paths: Sequence[Path], counts: Callable[[AssignmentId], bool]) -> tuple[Path, SiteState] | None:
    """The last of these files that is not damaged and whose training counts, and the state in it."""
    for path in reversed(paths):
        if (metadata := _metadata(path)) is None:
            continue
        assignment = metadata.get(_ASSIGNMENT)  # earlier releases did not write it
        if assignment is not None and not counts(AssignmentId(assignment)):
            continue
        if (state := read_state(path)) is not None:
            return path, state
    return None


def _set_aside(path: Path, error: Exception) -> None:
    aside = path.with_suffix(".damaged")
    path.replace(aside)
    log.warning(
        "what this client keeps across rounds is damaged (%s); the file is now %s, and an older state is used if there "
        "is one",
        error,
        aside,
    )
