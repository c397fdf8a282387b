"""Periodic cleaning: removes expired rows, and blobs that a crash left behind. Every replica does all of it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from umbel.server.services import Services
from umbel.server.store.outage import DatabaseAway
from umbel.server.sums.model_removal import sweep_models

_log = logging.getLogger(__name__)
_NONCES_S = 60.0
_REST_S = 3600.0


async def keep_house(services: Services) -> None:
    """Clean for ever, from the start on: a crash may have kept the updates of an ended round."""
    await asyncio.gather(
        _repeat("expired nonces", _NONCES_S, lambda: services.registry.forget_nonces(services.clock.now())),
        _repeat("blobs of ended rounds", _REST_S, lambda: sweep_blobs(services)),
        _repeat("models that no run refers to", _REST_S, lambda: sweep_models(services)),
        _repeat("clients that are long gone", _REST_S, lambda: services.waiters.sweep(services.clock.now())),
        _repeat("refusals of long ago", _REST_S, lambda: services.turned_away.sweep(services.clock.now())),
        _repeat("tokens of long ago", _REST_S, lambda: services.registry.enrolments.sweep(services.clock.now())),
    )


async def sweep_blobs(services: Services) -> None:
    """Remove updates and partial sums of rounds that are over.

    The keys are listed before the open rounds, so that blobs of a round that opens in between are not among them.
    """
    updates = await asyncio.to_thread(lambda: list(services.blobs.keys("updates")))
    partials = await asyncio.to_thread(lambda: list(services.blobs.keys("partials")))
    assignments, rounds = await services.rounds.open_names()
    left = [key for key in updates if key.split("/")[1] not in assignments]
    left += [key for key in partials if key.split("/")[1] not in rounds]
    if left:
        await asyncio.to_thread(services.blobs.delete, left)
        _log.info("removed %d blobs of rounds that are over", len(left))


async def _repeat(what: str, pause_s: float, sweep: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await sweep()
        except DatabaseAway:
            pass  # logged once, by the database
        except Exception:
            _log.exception("%s could not be swept; trying again in %.0f s", what, pause_s)
        await asyncio.sleep(pause_s)
