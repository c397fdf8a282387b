"""What every part of a coordinator works with, made once by `create_app` and handed down. No globals."""

from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from umbel.aggregation.types import AssignmentId
from umbel.server.blobs import BlobStore
from umbel.server.clock import Clock
from umbel.server.registry import Registry
from umbel.server.settings import Settings
from umbel.server.store import Store
from umbel.server.waiting import Heard


@dataclass(frozen=True, slots=True)
class Services:
    """`worker`: the one thread that reads, checks and folds tensors, so that they take memory one at a time."""

    settings: Settings
    clock: Clock
    registry: Registry
    store: Store
    blobs: BlobStore
    heard: Heard
    worker: Executor

    @property
    def uploads(self) -> Path:
        return self.settings.data / "uploads"

    def upload_path(self, assignment: AssignmentId) -> Path:
        """Where an assignment's update is stored. An assignment's id can stand in a file name."""
        return self.uploads / assignment
