"""What is made of a canary's updates: a verdict on each client, and how the record tells it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from umbel.aggregation.round.states import Closing
from umbel.aggregation.run.canary import CanaryUpdate, CanaryVerdict, Terms, judge
from umbel.aggregation.run.records import ClientRecord, Fate, RoundRecord
from umbel.aggregation.run.run_end import Run
from umbel.aggregation.types import ClientId


@dataclass(frozen=True, slots=True)
class CanaryClosed:
    """What the clients of a canary that were accepted have sent."""

    sent: Mapping[ClientId, CanaryUpdate]


def verdicts_on(run: Run, closing: Closing, trial: CanaryClosed) -> tuple[CanaryVerdict, ...]:
    """Whether each client of the canary is fit for the first round, as the run file asks for that."""
    terms = Terms(run.file.rounds_of(1).window_s, closing.plan.max_abs, run.model.size_bytes)
    return judge(terms, trial.sent, closing.missing)


def with_verdicts(record: RoundRecord, verdicts: Sequence[CanaryVerdict], passes: bool) -> RoundRecord:
    """The record with each verdict in its client's words."""
    by_client = {verdict.client: verdict for verdict in verdicts}
    clients = tuple(_told(client, by_client[ClientId(client.client)]) for client in record.clients)
    return replace(record, committed=passes, clients=clients)


def _told(client: ClientRecord, verdict: CanaryVerdict) -> ClientRecord:
    if client.fate not in (Fate.ACCEPTED, Fate.PARTIAL):
        return client
    return replace(client, fate=client.fate if verdict.passes else Fate.UNFIT, reason=verdict.reason)
