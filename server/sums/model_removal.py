"""The shelf of model files: kept while somebody refers to them or is about to, and taken off once nobody does."""

import asyncio
import logging
from collections.abc import Collection

from umbel.server.blobs.blobs import model_key
from umbel.server.services import Services
from umbel.server.store.versions import BeingRemoved

_log = logging.getLogger(__name__)
_JOB = "sweep.models"
KEPT_S = 3600.0  # after its deletion: whoever is downloading a version can finish


async def hold(services: Services, owner: str, sha256s: Collection[str]) -> None:
    """See to it that files that were just stored stay until `owner` refers to them in the database.

    Raises `BeingRemoved` if one of them is being, or was just, removed, because a deleted version had the same content:
    then store them again.
    """
    await services.versions.claim(owner, sha256s)
    for sha256 in sha256s:
        if await asyncio.to_thread(services.blobs.size, model_key(sha256)) is None:
            raise BeingRemoved(f"the model file {sha256[:12]}… was removed at this moment")


async def sweep_models(services: Services, kept_s: float = KEPT_S) -> None:
    """Remove the files of versions that were deleted `kept_s` ago. One replica at a time does it."""
    if not await services.replicas.take(_JOB):
        return
    now = services.clock.now()
    if gone := await services.versions.begin_removal(now - kept_s):
        await asyncio.to_thread(services.blobs.delete, [model_key(sha256) for sha256 in gone])
        await services.versions.end_removal(gone, now)
        _log.info("removed %d model files of deleted versions", len(gone))
