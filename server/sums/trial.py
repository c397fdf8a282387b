"""What the coordinator itself sees of a canary's updates; `aggregation/run/canary.py` judges them."""

import asyncio

from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import ranks_of
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.states import Closing
from umbel.aggregation.run.canary import CanaryClosed, CanaryUpdate
from umbel.aggregation.types import ClientId
from umbel.server.services import Services
from umbel.server.store.stored import LiveRun
from umbel.server.sums.updates import largest_change


async def look_at(services: Services, live: LiveRun, layout: Layout) -> CanaryClosed:
    """Read the accepted updates of a canary that has closed: the same at every replica.

    Raises `OSError` or an `UpdateRefused` for one that was lost or damaged in store.
    """
    assert isinstance(live.state, Closing)
    chunks = await services.uploads.chunks([live.assignment_id(client) for client in live.state.accepted])
    loop, sent = asyncio.get_running_loop(), dict[ClientId, CanaryUpdate]()
    codec, ranks = codec_for(live.plan.codec, live.plan.grid, layout), ranks_of(live.state.cohort)
    for client, accepted in live.state.accepted.items():
        assert isinstance(accepted.work, WorkDone), "a canary's clients train"
        mine = chunks[live.assignment_id(client)]
        largest = await loop.run_in_executor(
            services.worker, largest_change, services.blobs, mine, codec, ranks[client]
        )
        sent[client] = CanaryUpdate(accepted.work, sum(chunk.length for chunk in mine), largest)
    return CanaryClosed(sent)
