"""Fetch the model of an assignment: whole, or as the changes since a version that is on disk.

A client applies the changes to a copy, which counts only if it has the model's SHA-256. If anything fails, it downloads
the whole model.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import ModelChange, ModelRef
from umbel.client.errors import CoordinatorMisbehaved, CoordinatorRefused
from umbel.client.files import file_sha256
from umbel.client.state.model_files import apply_changes, load_model
from umbel.client.state.store import Store
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.download import Downloaded, Links, WantedFile, download
from umbel.client.wire.timing import Bandwidth
from umbel.client.wire.transport import Patience

log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class ModelFetcher:
    """Fetches models of this layout to one client's disk."""

    coordinator: CoordinatorClient
    store: Store
    layout: Layout
    links: Links

    def fetch(
        self, model: ModelRef, changes: Sequence[ModelChange], bandwidth: Bandwidth, patience: Patience
    ) -> tuple[Path, Bandwidth]:
        """The model's path on disk, and the measured bandwidth. Every other model is removed.

        `changes` lead to the model; see `Assignment`. Raises `CoordinatorMisbehaved` for bytes that do not hash to
        `model.sha256`, or that are too many.
        """
        path = self.store.model_path(model.sha256)
        if _is_here(path, model.sha256):
            self.store.keep_only(model.sha256)
            return path, bandwidth
        needed = self._needed(changes)
        self.store.keep_only(model.sha256, *(name for one in needed for name in (one.from_sha256, one.sha256)))
        if not (needed and self._is_made(model, needed, patience)):
            self.store.keep_only(model.sha256)  # first, because the disk may have no room for both
            came = self._download(model, path, patience)
            bandwidth = bandwidth.after_download(came.n_bytes, came.seconds)
        self.store.keep_only(model.sha256)
        return path, bandwidth

    def _needed(self, changes: Sequence[ModelChange]) -> Sequence[ModelChange]:
        """The fewest changes that lead from a model on disk to the wanted one; none if no such model is on disk."""
        for i in reversed(range(len(changes))):
            if _is_here(self.store.model_path(changes[i].from_sha256), changes[i].from_sha256):
                return changes[i:]
        return ()

    def _is_made(self, model: ModelRef, needed: Sequence[ModelChange], patience: Patience) -> bool:
        """Download the changes and apply them; False if that fails."""
        store = self.store
        base, made = store.model_path(needed[0].from_sha256), store.model_path(model.sha256)
        making = made.with_suffix(".making")
        try:
            for change in needed:
                if not (path := store.change_path(change.sha256)).exists():
                    self._download(change, path, patience)
            load_model(base, self.layout)  # checks it, because a client that was killed before training has not
            apply_changes(self.layout, base, [store.change_path(change.sha256) for change in needed], making)
            if file_sha256(making) != model.sha256:
                raise CoordinatorMisbehaved("the changes do not give a model with the announced SHA-256")
        except (CoordinatorRefused, CoordinatorMisbehaved, UpdateRefused, OSError) as error:
            making.unlink(missing_ok=True)
            log.warning("cannot use the changes since the last model, so the whole model is downloaded: %s", error)
            return False
        making.replace(made)
        return True

    def _download(self, wanted: WantedFile, path: Path, patience: Patience) -> Downloaded:
        part = path.with_suffix(".part")
        came = download(self.coordinator, wanted, part, patience, self.links)
        part.replace(path)
        return came


def _is_here(path: Path, sha256: str) -> bool:
    return path.exists() and file_sha256(path) == sha256
