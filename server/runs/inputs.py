"""The inputs of a run: messages from clients, orders of an operator, and events that no request causes."""

from dataclasses import dataclass
from typing import TypeAlias

from umbel.aggregation.audit.bundle import SignedReport
from umbel.aggregation.round.states import Applied, Declined, Gathered, Outage, Reported, Spoiled, Spoke, Tick
from umbel.aggregation.run.endings import Upshot
from umbel.aggregation.types import AssignmentId
from umbel.server.runs.bundle_facts import AttemptClients
from umbel.server.runs.orders import Order


class PastAttempt(Exception):
    """The assignment belongs to an attempt that has ended. The answer to it is stored."""


@dataclass(frozen=True, slots=True)
class ReportInput:
    """A client's report, as an event and as the client signed it."""

    event: Reported
    assignment: AssignmentId
    signed: SignedReport


@dataclass(frozen=True, slots=True)
class DeclineInput:
    """A client will not report, or will not sign the participant list."""

    event: Declined
    assignment: AssignmentId


@dataclass(frozen=True, slots=True)
class MessageInput:
    """A client's message in a secure round, as an event and as it was sent."""

    event: Spoke
    assignment: AssignmentId
    body: bytes


@dataclass(frozen=True, slots=True)
class Happening:
    """An event that no request causes."""

    event: Tick | Gathered | Outage | Spoiled | None = None  # None: only count an outage, if there was one
    round_id: int | None = None  # the attempt that it is about; None: the newest


@dataclass(frozen=True, slots=True)
class Made:
    """The result of a closed round, and the description of its clients."""

    event: Applied
    upshot: Upshot
    clients: AttemptClients
    round_id: int


RunInput: TypeAlias = ReportInput | DeclineInput | MessageInput | Happening | Made | Order
