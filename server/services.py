"""What every part of a coordinator works with, made once by `create_app` and handed down. No globals."""

from concurrent.futures import Executor
from dataclasses import dataclass

from umbel.server.blobs.blobs import BlobStore
from umbel.server.clock import Clock
from umbel.server.devices.clients import Registry
from umbel.server.devices.turned_away import TurnedAwayStore
from umbel.server.devices.waiting import Heard
from umbel.server.keys import AuditKey
from umbel.server.scribe import Scribe
from umbel.server.settings import Settings
from umbel.server.store.audit_rows import AuditStore
from umbel.server.store.clocks import Uptime
from umbel.server.store.replicas import RelayStore, Replicas
from umbel.server.store.rounds import MemberListStore, RoundStore
from umbel.server.store.uploads import UploadStore
from umbel.server.store.versions import ModelStore, VersionStore
from umbel.server.store.waiters import WaiterStore


@dataclass(frozen=True, slots=True)
class Services:
    """`worker`: the one thread that folds updates and makes models, so that they take memory one at a time.

    `checker`: the one that checks updates, so that none waits until another run's model is made.
    `decider`: the one that works while a transaction is open, for which others wait.
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
    decider: Scribe
