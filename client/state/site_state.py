"""What a client keeps from one round of a run to the next, on disk: its `plan.state`, the private tensors, and what the
run's algorithm has it keep.

One safetensors file for each of the two newest model versions that this client has trained from, with the state after
that training. It is written beside the update, and kept if the report of that update was accepted. A round begins with
the newest state of an older version. So an attempt that is repeated begins as the abandoned one did.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from umbel.aggregation.types import RunId
from umbel.client.files import make_private, sync
from umbel.client.state.model_files import read_tensors, write_tensors
from umbel.client.state.packing import Packing, unpack

STATE_BYTES_MAX = 1 << 30
_JSON_BYTES_MAX = 1 << 24
_KEPT = "pulls"  # its name in the file, from when only FedDyn kept something
_KEY, RUN_KEY, _VERSION = "umbel.state", "umbel.run", "umbel.version"
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

    def before(self, run: RunId, version: int) -> SiteState:
        """The state with which a training from this model version begins: the newest of an older version. A damaged
        file is set aside, and an older one is taken.

        A coordinator that was restored from a backup asks for versions before all that are here. Then it is the newest
        of a later version: a site's own layers that know later models are better than none.
        """
        versions = self._versions(run)
        later = [one for one in versions if one > version]
        of_age = [*later, *(one for one in versions if one < version)]
        found = newest_state(self._path(run, one) for one in of_age)
        return SiteState() if found is None else found[1]

    def wait(self, run: RunId, version: int, left: SiteState) -> None:
        """Write the state after training from this version. Raises `StateTooLarge` or `TypeError` for what cannot be
        kept.
        """
        if not left and not self._versions(run):
            return
        make_private(self._folder / run)
        write_state(self.waiting, left, run, version)

    def keep(self) -> None:
        """Keep the waiting state, because its update was accepted, and the one with which its training began. Others of
        its run are removed.
        """
        if not self.waiting.exists():
            return
        try:
            metadata, _ = read_tensors(self.waiting)
            run, version = RunId(metadata[RUN_KEY]), int(metadata[_VERSION])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            _set_aside(self.waiting, error)
            return
        self.waiting.replace(self._path(run, version))
        versions = self._versions(run)
        later, until_now = [one for one in versions if one > version], [one for one in versions if one <= version]
        for gone in set(versions) - set([*later[-1:], *until_now][-2:]):
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


def write_state(path: Path, left: SiteState, run: RunId, version: int, *, is_durable: bool = True) -> None:
    """Write the state after training from this version. Raises `StateTooLarge`, or `TypeError` for other objects."""
    packed, tensors = pack_state(left)
    write_tensors(path, tensors, {RUN_KEY: run, _VERSION: str(version), _KEY: packed}, is_durable=is_durable)


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


def newest_state(paths: Iterable[Path]) -> tuple[Path, SiteState] | None:
    """The last of these files that is not damaged, and the state in it; None if no file is left."""
    for path in reversed(list(paths)):
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
