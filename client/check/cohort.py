"""A secure round of one real client: the coordinator's side, and the other clients, which send zeros."""

import base64
import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter

from umbel.aggregation.messages import Outcome, ReportAnswer
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import Assignment, SecureOffer
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.reports import MaskedInput
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import context_of
from umbel.aggregation.secagg.coordinator import SecureCoordinator
from umbel.aggregation.secagg.masked_input import MaskedReader, masked_input, unmasked
from umbel.aggregation.secagg.numbers.composition import composition_of
from umbel.aggregation.secagg.numbers.contribution import CONTRIBUTION_SECRET_BYTES, LocalWork, contribution, nothing
from umbel.aggregation.secagg.numbers.totals import Totals, totals
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import ClientId
from umbel.client.check.coordinator import AnswerRefused, CheckCoordinator, stream

PEERS = ("other-1", "other-2")  # with the real client they are the smallest cohort
_PEER_WORK = LocalWork(1, 1, 1)


class SecureAttempt:
    """One attempt: the coordinator's party, and those of the other clients."""

    def __init__(
        self,
        assignment: Assignment,
        layout: Layout,
        keys: Mapping[str, Ed25519PrivateKey],
        opening: bytes,
        me: ClientId,
    ) -> None:
        self.context, self.composition = context_of(assignment), composition_of(assignment, layout)
        self.party = SecureCoordinator(self.context, opening)
        self._me = self.context.index_of(me)
        named = {self.context.index_of(ClientId(name)): key for name, key in keys.items()}
        self._peers = {i: SecureClient(self.context, i, key, os.urandom) for i, key in named.items()}
        self._agreements = b""
        self.totals: Totals | None = None

    def take(self, phase: Phase, message: bytes) -> None:
        """Take the real client's message for a phase, beside those of the others. A repeated one changes nothing."""
        match phase:
            case Phase.ADVERTISE_KEYS if not self.party.has_roster:
                self._advertise(message)
            case Phase.SHARE_KEYS if not self.party.has_shares:
                self._share(message)
            case Phase.CONSISTENCY_CHECK if not self._agreements:
                agreed = {i: peer.agree(self.party.inputs()) for i, peer in self._peers.items()}
                self._agreements = self.party.agreements({**agreed, self._me: message})
            case Phase.UNMASKING if self.totals is None:
                self._unmask(message)
            case _:
                pass

    def tell(self, phase: Phase) -> bytes | None:
        """What the real client needs for a phase; None if it must wait."""
        match phase:
            case Phase.SHARE_KEYS:
                return self.party.roster()
            case Phase.MASKED_INPUT:
                return self.party.inbox(self._me)
            case Phase.CONSISTENCY_CHECK:
                return self.party.inputs()
            case _:
                return self._agreements or None

    def take_input(self, update: bytearray, signature: bytes) -> None:
        """Take the real client's masked update, and add those of the others."""
        party, reader = self.party, MaskedReader(self.composition)
        party.check_input(self._me, hashlib.sha256(update).digest(), signature)
        party.close_inputs(tuple(sorted((*self._peers, self._me))))
        self._sum = reader.new_sum()
        reader.fold(self._sum, memoryview(update))
        for i, peer in self._peers.items():
            peer.hear(party.inbox(i))
            secret = os.urandom(CONTRIBUTION_SECRET_BYTES)
            made = contribution(self.composition, nothing(self.composition), _PEER_WORK, secret)
            masked = b"".join(map(bytes, masked_input(made, peer)))
            peer.sign_input(hashlib.sha256(masked).digest())
            reader.fold(self._sum, masked)

    def _advertise(self, message: bytes) -> None:
        adverts = [self.party.check_keys(i, peer.advertise()) for i, peer in self._peers.items()]
        self.party.close_roster([*adverts, self.party.check_keys(self._me, message)])

    def _share(self, message: bytes) -> None:
        party, roster = self.party, self.party.roster()
        dealt = {i: party.check_shares(i, peer.share(roster)) for i, peer in self._peers.items()}
        dealt[self._me] = party.check_shares(self._me, message)
        party.close_shares(dealt)
        party.load_shares(dealt)

    def _unmask(self, message: bytes) -> None:
        self.party.take_shares(self._me, message)
        for i, peer in self._peers.items():
            self.party.take_shares(i, peer.reveal(self._agreements))
        levels, words = unmasked(self._sum, self.composition, self.party.open())
        self.totals = totals(self.composition, levels, words, tuple(sorted((*self._peers, self._me))))


class SecureCheckCoordinator(CheckCoordinator):
    """A run with one secure round. `file` must plan one."""

    def __init__(self, file: RunFile, layout: Layout, model: bytes, seed: int) -> None:
        plan = file.first_plan(layout.update.n_values)
        super().__init__(file, layout, model, plan.codec, seed)
        assert plan.secure is not None, "a run file without secure rounds"
        self._secure: SecurePlan = plan.secure
        self._peer_keys = {name: Ed25519PrivateKey.generate() for name in PEERS}
        self._attempt: SecureAttempt | None = None
        self._offered: Assignment | None = None

    @property
    def totals(self) -> Totals | None:
        """What the sum has shown; None before it is unmasked."""
        return None if self._attempt is None else self._attempt.totals

    def _assignment(self) -> Assignment:
        if self._offered is None:
            plain, opening = super()._assignment(), os.urandom(32)
            keys = {name: public_key_text(key.public_key().public_bytes_raw()) for name, key in self._peer_keys.items()}
            offer = SecureOffer(
                attempt_id=secrets.token_hex(16),
                opening_commitment=hashlib.sha256(opening).hexdigest(),
                cohort=tuple(sorted({**keys, **self._keys}.items())),
                members_sha256="",
                window_s=plain.window_s,
                plan=self._secure,
            )
            self._offered = replace(plain, secure=offer)
            self._attempt = SecureAttempt(self._offered, self.layout, self._peer_keys, opening, self.client)
        return self._offered

    def _answer_of_assignment(self, name: str, what: str, request: httpx.Request, body: bytes) -> httpx.Response:
        if not what.startswith("secure/"):
            return super()._answer_of_assignment(name, what, request, body)
        phase, attempt = Phase(what.removeprefix("secure/")), self._present
        if request.method == "PUT":
            attempt.take(phase, body)
            if attempt.totals is not None:
                self.round = 2
            return stream(204, b"")
        told = attempt.tell(phase)
        return stream(204, b"") if told is None else stream(200, told)

    def _report(self, name: str, body: bytes) -> ReportAnswer:
        said = TypeAdapter(MaskedInput).validate_json(body)
        self._present.take_input(self._take_update(name, said.update_sha256), base64.b64decode(said.signature))
        return ReportAnswer(Outcome.ACCEPTED, "counted")

    @property
    def _present(self) -> SecureAttempt:
        if self._attempt is None:
            raise AnswerRefused(404, "unknown-assignment", "no assignment was given yet")
        return self._attempt
