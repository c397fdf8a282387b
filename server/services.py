"""What every part of a coordinator works with, made once by `create_app` and handed down. No globals."""

from concurrent.futures import Executor
from dataclasses import dataclass

from umbel.server.audit_key import AuditKey
from umbel.server.audit_store import AuditStore
from umbel.server.blobs import BlobStore
from umbel.server.clock import Clock
from umbel.server.member_lists import MemberListStore
from umbel.server.model_store import ModelStore
from umbel.server.registry import Registry
from umbel.server.relay_store import RelayStore
from umbel.server.replicas import Replicas
from umbel.server.round_store import RoundStore
from umbel.server.settings import Settings
from umbel.server.turned_away import TurnedAwayStore
from umbel.server.upload_store import UploadStore
from umbel.server.uptime import Uptime
from umbel.server.version_store import VersionStore
from umbel.server.waiter_store import WaiterStore
from umbel.server.waiting import Heard


@dataclass(frozen=True, slots=True)
class Services:
    """`worker`: the one thread that folds updates and makes models, so that they take memory one at a time.

    `checker`: the one that checks updates, so that none waits until another run's model is made.
    """

    settings: Settings
    clock: Clock
    replicas: Replicas
    uptime: Uptime
    registry: Registry
    models: ModelStore
    rounds: RoundStore
    member_lists: MemberListStore
    relay: RelayStore
    audit_key: AuditKey
    audits: AuditStore
    versions: VersionStore
    uploads: UploadStore
    waiters: WaiterStore
    turned_away: TurnedAwayStore
    blobs: BlobStore
    heard: Heard
    worker: Executor
    checker: Executor
