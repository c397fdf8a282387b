"""The parts of a coordinator, made once by `create_app` and passed down. There are no globals."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from umbel.server.blobs.blobs import BlobStore
from umbel.server.clock import Clock
from umbel.server.devices.clients import Registry
from umbel.server.devices.turned_away import TurnedAwayStore
from umbel.server.devices.waiting import Heard
from umbel.server.settings import Settings
from umbel.server.store.audit_rows import AuditStore
from umbel.server.store.keys import AuditKey
from umbel.server.store.replicas import RelayStore, Replicas, Uptime
from umbel.server.store.rounds import MemberListStore, RoundStore
from umbel.server.store.uploads import UploadStore
from umbel.server.store.versions import ModelStore, VersionStore
from umbel.server.store.waiters import WaiterStore

Given = ParamSpec("Given")
Found = TypeVar("Found")


class DecisionThread:
    """One thread for pure work inside a transaction.

    The caller holds a lock of the database, so the work must not queue behind work on files.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "umbel-decider")

    async def run(self, work: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def close(self) -> None:
        self._thread.shutdown()


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
    agents: Heard  # the sites that have an agent: when it last asked for the open runs
    worker: Executor
    checker: Executor
    decider: DecisionThread
