"""A coordinator in memory whose rounds are secure: it plays the other clients of the cohort too, all in good faith.

Each attempt is made anew when its assignment is first asked for. What a test wants to go wrong it changes in `told`, or
by wrapping `SecureDouble.handle`.
"""

import base64
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from tests.aggregation.secagg.federation import OPENING, identity, seeded
from tests.client.doubles.double import Double, Incoming, Refused, answer, stream
from tests.federations.own_dithers import secret_of
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import Assignment, SecureOffer, assignment_id
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.round import Task
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import context_of
from umbel.aggregation.secagg.coordinator import SecureCoordinator
from umbel.aggregation.secagg.masked_input import MaskedReader, masked_input, unmasked
from umbel.aggregation.secagg.numbers.composition import composition_of
from umbel.aggregation.secagg.numbers.contribution import LocalWork, contribution
from umbel.aggregation.secagg.numbers.plan import first_plans
from umbel.aggregation.secagg.numbers.totals import Totals, totals
from umbel.aggregation.trust.members import MemberList
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import ClientId, RunId

WARD = ClientId("ward-7")
PEERS = ("peer-1", "peer-2", "peer-3", "peer-4")
SAMPLE_COUNT_MAX = 1000
_ASSIGNMENT = TypeAdapter(Assignment)
_PATH = re.compile(r"/v1/assignments/([^/]+)/secure/([a-z-]+)")


def peer_key(name: str) -> str:
    return public_key_text(identity(name).public_key().public_bytes_raw())


def plans(clients: int, **changes: Any) -> tuple[CodecPlan, SecurePlan]:
    """The numbers of a first round of so many clients."""
    codec = CodecPlan(Codec.INTEGER, 4.0, key=5)
    made, secure = first_plans(
        codec, weight_unit=256, clients_max=clients, minimum=3, metrics=("loss",), evaluation=("accuracy",)
    )
    return made, replace(secure, **changes)


class Attempt:
    """One attempt at a round: the cohort's other clients, and what the coordinator knows."""

    def __init__(self, assignment: Assignment, peers: tuple[str, ...], layout: Layout) -> None:
        self.context = context_of(assignment)
        self.composition = composition_of(assignment, layout)
        self.ward = self.context.index_of(WARD)
        indices = {name: index for index, name in enumerate(self.context.names) if name in peers}
        self.peers = {
            index: SecureClient(self.context, index, identity(name), seeded(f"{assignment.id}{name}"))
            for name, index in indices.items()
        }
        self.party = SecureCoordinator(self.context, OPENING)
        self.adverts = {index: self.party.check_keys(index, peer.advertise()) for index, peer in self.peers.items()}
        self.agreements = b""
        self.totals: Totals | None = None

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(sorted((*self.peers, self.ward)))

    def advertise(self, message: bytes) -> None:
        self.adverts[self.ward] = self.party.check_keys(self.ward, message)
        self.party.close_roster(self.adverts.values())

    def share(self, message: bytes) -> None:
        roster, party = self.party.roster(), self.party
        dealt = {index: party.check_shares(index, peer.share(roster)) for index, peer in self.peers.items()}
        dealt[self.ward] = party.check_shares(self.ward, message)
        party.close_shares(dealt)
        party.load_shares(dealt)

    def take_input(self, update: bytes, signature: bytes) -> None:
        """The ward's update is in, and so are those of its peers, who have changed every weight by a quarter."""
        self.party.check_input(self.ward, hashlib.sha256(update).digest(), signature)
        self.party.close_inputs(self.inputs)
        updates = [update]
        for index, peer in self.peers.items():
            peer.hear(self.party.inbox(index))
            work = LocalWork(10, 4, 4, {"loss": 0.5}, {"accuracy": 0.25}, 4)
            made = contribution(self.composition, self._quarter, work, secret_of(index))
            updates.append(b"".join(map(bytes, masked_input(made, peer))))
            peer.sign_input(hashlib.sha256(updates[-1]).digest())
        reader = MaskedReader(self.composition)
        self.sum = reader.new_sum()
        for one in updates:
            reader.fold(self.sum, one)

    def _quarter(self) -> Iterator[Tensor]:
        yield torch.full((self.composition.layout.n_values,), 0.25)

    def agree(self, signature: bytes) -> None:
        agreed = {index: peer.agree(self.party.inputs()) for index, peer in self.peers.items()}
        self.agreements = self.party.agreements({**agreed, self.ward: signature})

    def reveal(self, message: bytes) -> None:
        self.party.take_shares(self.ward, message)
        for index, peer in self.peers.items():
            self.party.take_shares(index, peer.reveal(self.agreements))
        levels, words = unmasked(self.sum, self.composition, self.party.open())
        self.totals = totals(self.composition, levels, words, self.inputs)


class SecureDouble(Double):
    """`peers`: who is in the cohort beside the ward. `told`: changes what the ward is told, by phase; None: not yet.
    `said`: all that it has said, by assignment and phase, repeats too. `over_in`: in this phase the round goes on
    without it. `keeps_model`: each round is of the same model. `fails_after_sum`: so many sums are of no use, it says.
    `max_abs`, `sample_count_max`: the bounds that it chooses. `measures`: its rounds are evaluations.
    """

    def __init__(self, model: nn.Module, rounds: int = 1, window_s: float = 60.0, peers: tuple[str, ...] = PEERS):
        super().__init__(model, rounds, window_s)
        self.peers = peers
        self.members: MemberList | None = None
        self.codec, self.plan = plans(len(peers) + 1)
        self.attempts: dict[str, Attempt] = {}
        self.told: dict[str, Callable[[bytes], bytes | None]] = {}
        self.said: dict[tuple[str, str], list[bytes]] = defaultdict(list)
        self.outcome = "accepted"
        self.over_in = ""
        self.counts: list[int] = []
        self.needs_count = False
        self.change_offer: Callable[[SecureOffer], SecureOffer] = lambda offer: offer
        self.open_again = 0
        self.keeps_model = False
        self.fails_after_sum = 0
        self.measures = False
        self.max_abs = 8.0
        self.sample_count_max = SAMPLE_COUNT_MAX

    def repeat_attempt(self) -> None:
        """The round is tried again."""
        self.round, self.attempt = self.round - 1, self.attempt + 1

    def offered(self) -> Assignment:
        """What the ward is asked now."""
        return _ASSIGNMENT.validate_json(json.dumps(self._assignment(WARD)))

    @property
    def totals(self) -> list[Totals]:
        return [one.totals for one in self.attempts.values() if one.totals is not None]

    def _check_in(self, client: str, message: dict[str, Any]) -> httpx.Response:
        self.counts.append(message["sample_count"])
        if self.needs_count and not message["sample_count"]:
            raise Refused(409, "sample-count-needed")
        return super()._check_in(client, message)

    def _route(self, request: httpx.Request, body: bytes) -> httpx.Response:
        match = _PATH.fullmatch(request.url.path)
        if match is None:
            return super()._route(request, body)
        assert match[1].endswith(f".{WARD}")
        self.log[-1] = f"{request.method} {match[2]}"
        attempt = self.attempts[match[1]]
        if self.over_in == match[2] or match[1] in self.closed or match[1] in self.declined:
            raise Refused(409, "assignment-closed")
        if request.method == "PUT":
            return self._said(match[1], match[2], body, attempt)
        said = self._tell(match[2], attempt)
        told = self.told[match[2]](said) if match[2] in self.told else said
        return stream(204, b"") if told is None else stream(200, told)

    def _said(self, assignment: str, phase: str, body: bytes, attempt: Attempt) -> httpx.Response:
        said = self.said[assignment, phase]
        said.append(body)
        if said[0] != body:
            raise Refused(409, "changed-message")
        if phase == "unmasking" and self.open_again:
            self.open_again -= 1
            return stream(202, b"")
        if len(said) == 1 or phase == "unmasking":
            match phase:
                case "advertise-keys":
                    attempt.advertise(body)
                case "share-keys":
                    attempt.share(body)
                case "consistency-check":
                    attempt.agree(body)
                case _:
                    if attempt.totals is None:
                        attempt.reveal(body)
                        self._go_on()
        return stream(204, b"")

    def _go_on(self) -> None:
        """A sum is there: what became of it, as the ward is told."""
        if self.fails_after_sum:
            self.fails_after_sum -= 1
            self.attempt += 1
            return
        self.round, self.attempt = self.round + 1, 1
        if not self.keeps_model:
            self.change_model()

    def change_model(self) -> None:
        """The next rounds are of another model."""
        _, state = decode_model(self.model_bytes)
        self.model_bytes = encode_model({name: values + 1 for name, values in state.items()})

    def _tell(self, phase: str, attempt: Attempt) -> bytes:
        match phase:
            case "share-keys":
                return attempt.party.roster()
            case "masked-input":
                return attempt.party.inbox(attempt.ward)
            case "consistency-check":
                return attempt.party.inputs()
            case _:
                return attempt.agreements

    def _report(self, assignment: str, work: dict[str, Any]) -> httpx.Response:
        assert work.keys() == {"update_sha256", "signature"}, "nothing else is told"
        if assignment not in self.reports:
            upload = self.uploads[assignment]
            assert hashlib.sha256(upload.data).hexdigest() == work["update_sha256"]
            self.reports[assignment] = work
            if self.outcome == "accepted":
                self.attempts[assignment].take_input(bytes(upload.data), base64.b64decode(work["signature"]))
            else:
                self.round += 1
        return answer({"outcome": self.outcome, "reason": "as it is"})

    def _append(self, upload: Incoming, request: httpx.Request, body: bytes) -> None:
        upload.data += body
        if len(upload.data) == upload.total:
            assert hashlib.sha256(upload.data).digest() == upload.sha256

    def _assignment_id(self, client: str) -> str:
        if not self.measures:
            return super()._assignment_id(client)
        return assignment_id(RunId(self.run_file.name), self.round, self.attempt, ClientId(client), Task.EVALUATION)

    def _assignment(self, client: str) -> dict[str, Any]:
        plain = super()._assignment(client)
        if self.measures:
            plain["task"] = Task.EVALUATION.value
        keys = {name: peer_key(name) for name in self.peers} | {
            name: public_key_text(key) for name, key in self.keys.items()
        }
        grid = Grid.finest(max_abs=self.max_abs, total_weight_max=(len(keys) + 1) * SAMPLE_COUNT_MAX)
        offer = SecureOffer(
            attempt_id=hashlib.sha256(plain["id"].encode()).hexdigest()[:32],
            opening_commitment=hashlib.sha256(OPENING).hexdigest(),
            cohort=tuple(sorted(keys.items())),
            members_sha256=self.members.sha256 if self.members else "",
            window_s=plain["window_s"],
            plan=self.plan,
        )
        whole = plain | {
            "grid": {"step": grid.step, "max_abs": grid.max_abs, "total_weight_max": grid.total_weight_max},
            "sample_count_max": self.sample_count_max,
            "secure": TypeAdapter(SecureOffer).dump_python(offer, mode="json"),
        }
        assignment = _ASSIGNMENT.validate_json(json.dumps(whole))
        if assignment.id not in self.attempts:
            self.attempts[assignment.id] = Attempt(assignment, self.peers, self.layout)
        changed = self.change_offer(offer)
        return whole | {"secure": TypeAdapter(SecureOffer).dump_python(changed, mode="json")}
