"""Keep model files that a run is about to refer to, and remove those that no run refers to. It imports no torch."""

import asyncio
import logging
from collections.abc import Collection

from umbel.server.blobs.blobs import model_key
from umbel.server.services import Services
from umbel.server.store.versions import BeingRemoved

_log = logging.getLogger(__name__)
_SWEEP_JOB = "sweep.models"
KEPT_S = 3600.0  # after a version's deletion, so that downloads of it can finish


async def hold(services: Services, owner: str, sha256s: Collection[str]) -> None:
    """Keep files that were just stored until `owner` refers to them in the database.

    Raises `BeingRemoved` if one of them was just removed, or is being removed, because a deleted version had the same
    content. The caller must then store them again.
    """
    await services.versions.claim(owner, sha256s)
    for sha256 in sha256s:
        if await asyncio.to_thread(services.blobs.size, model_key(sha256)) is None:
            raise BeingRemoved(f"the model file {sha256[:12]}… was removed at this moment")


async def sweep_models(services: Services, kept_s: float = KEPT_S) -> None:
    """Remove the files of versions that were deleted `kept_s` ago. One replica at a time does it."""
    if not await services.replicas.take(_SWEEP_JOB):
        return
    now = services.clock.now()
    if removed := await services.versions.begin_removal(now - kept_s):
        await asyncio.to_thread(services.blobs.delete, [model_key(sha256) for sha256 in removed])
        await services.versions.end_removal(removed, now)
        _log.info("removed %d model files of deleted versions", len(removed))
