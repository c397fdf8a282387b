"""What the coordinator itself sees of a canary's updates, and what of the verdicts is told in the record."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from umbel.aggregation.canary import Sent, Terms, Verdict, judge
from umbel.aggregation.layout import Layout
from umbel.aggregation.records import ClientRecord, Fate, RoundRecord
from umbel.aggregation.round import Closing
from umbel.aggregation.types import ClientId, WorkDone, ranks_of
from umbel.aggregation.update_codec import codec_for
from umbel.server.services import Services
from umbel.server.stored import LiveRun, StoredRun
from umbel.server.updates import peak


@dataclass(frozen=True, slots=True)
class Trial:
    """What the clients of a canary that were accepted have sent."""

    sent: Mapping[ClientId, Sent]


async def look_at(services: Services, live: LiveRun, layout: Layout) -> Trial:
    """Read the accepted updates of a canary that has closed: the same at every replica.

    Raises `OSError` or an `UpdateRefused` for one that was lost or damaged in store.
    """
    assert isinstance(live.state, Closing)
    chunks = await services.uploads.chunks([live.assignment_id(client) for client in live.state.accepted])
    loop, sent = asyncio.get_running_loop(), dict[ClientId, Sent]()
    codec, ranks = codec_for(live.plan.codec, live.plan.grid, layout), ranks_of(live.state.cohort)
    for client, accepted in live.state.accepted.items():
        assert isinstance(accepted.work, WorkDone), "a canary's clients train"
        mine = chunks[live.assignment_id(client)]
        largest = await loop.run_in_executor(services.worker, peak, services.blobs, mine, codec, ranks[client])
        sent[client] = Sent(accepted.work, sum(chunk.length for chunk in mine), largest)
    return Trial(sent)


def verdicts_on(run: StoredRun, closing: Closing, trial: Trial) -> tuple[Verdict, ...]:
    """Whether each client of the canary is fit for the first round, as the run file asks for that."""
    terms = Terms(run.file.rounds_of(1).window_s, closing.plan.max_abs, run.model.size_bytes)
    return judge(terms, trial.sent, closing.missing)


def with_verdicts(record: RoundRecord, verdicts: Sequence[Verdict], passes: bool) -> RoundRecord:
    """The record with each verdict in its client's words."""
    by_client = {verdict.client: verdict for verdict in verdicts}
    clients = tuple(_told(client, by_client[ClientId(client.client)]) for client in record.clients)
    return replace(record, committed=passes, clients=clients)


def _told(client: ClientRecord, verdict: Verdict) -> ClientRecord:
    if client.fate not in (Fate.ACCEPTED, Fate.PARTIAL):
        return client
    return replace(client, fate=client.fate if verdict.passes else Fate.UNFIT, reason=verdict.reason)
