"""A whole round of four clients as `tests/vectors/secagg_transcript.json` has it, made by the product from fixed bytes.

Client 3 drops out after ShareKeys, the others' vectors are summed. `python -m tests.aggregation.secagg.transcript`
writes the file anew; that is a new version of the protocol, or its draft.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from tests.repository import VECTORS
from umbel.aggregation.canonical import canonical
from umbel.aggregation.codec.modular import lift
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.crypto.derive import Vector, channel_key, pair_mask_key, self_mask_key
from umbel.aggregation.secagg.crypto.masks import Masks
from umbel.aggregation.secagg.crypto.shamir import PRIME, SHARE_BYTES
from umbel.aggregation.secagg.masked_input import MaskedReader, masked_input, unmasked
from umbel.aggregation.secagg.messages import (
    AdvertiseKeys,
    Inbox,
    Roster,
    ShareKeys,
    Unmasking,
    encode_agreements,
    encode_indices,
)
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import Contribution
from umbel.aggregation.secagg.session import Session
from umbel.aggregation.secagg.unmasking import Unmasker
from umbel.aggregation.types import ClientId, RunId
from umbel.aggregation.update.wire import HEADER_BYTES, header_for

FILE = VECTORS / "secagg_transcript.json"
N, GONE, BITS = 4, 3, 11
PREFIX = 64
LAYOUT = Layout.of_state({"weight": torch.zeros(24)})
COMPOSITION = Composition(
    CodecPlan(Codec.INTEGER, 4.0, 7),
    SecurePlan(BITS, 1, N, metrics=("loss",)),
    Grid.finest(max_abs=8.0, total_weight_max=1000),
    100,
    LAYOUT,
)
Json = dict[str, Any]


def drawn(what: str, n_bytes: int = 32) -> bytes:
    return hashlib.shake_256(f"umbel-secagg/1 transcript: {what}".encode()).digest(n_bytes)


def given() -> Json:
    """All that is not derived: the plan, and what each client draws and wants to add up."""
    clients = [_given_client(index) for index in range(N)]
    cohort = [[one["name"], _identity(one).public_key().public_bytes_raw()] for one in clients]
    context = {
        "run": "ward",
        "round": 3,
        "attempt": 1,
        "attempt_id": drawn("attempt", 16).hex(),
        "model_sha256": drawn("model").hex(),
        "layout_digest": LAYOUT.digest,
        "config_sha256": drawn("config").hex(),
        "members_sha256": drawn("members").hex(),
        "cohort": [[name, _base64(key)] for name, key in cohort],
        "minimum": 3,
        "opening_commitment": hashlib.sha256(drawn("opening")).hexdigest(),
        "window_s": 600.5,
        "protocol": "umbel-secagg/1",
    }
    n_bytes = MaskedReader(COMPOSITION).update_bytes.start - HEADER_BYTES
    return {
        "context": context,
        "opening": drawn("opening").hex(),
        "bits": BITS,
        "update_header": header_for(LAYOUT, Codec.MASKED, n_bytes).encode().hex(),
        "clients": clients,
    }


def _given_client(index: int) -> Json:
    name = ("anna", "bert", "cora", "dora")[index]
    # Of three such vectors the sum still fits 11 bits: levels from -256 to 255.
    levels = [one % 512 - 256 for one in _numbers(f"{name}'s levels", COMPOSITION.n_levels, 2)]
    words = [one - (1 << 47) for one in _numbers(f"{name}'s words", COMPOSITION.n_words, 6)]
    return {
        "name": name,
        "identity_seed": drawn(f"{name}'s identity").hex(),
        "channel_seed": drawn(f"{name}'s channel key").hex(),
        "mask_seed": drawn(f"{name}'s mask key").hex(),
        "self_mask": drawn(f"{name}'s self mask").hex(),
        "self_mask_polynomial": [_coefficient(f"{name}'s b, {power}").hex() for power in (2, 1)],
        "mask_seed_polynomial": [_coefficient(f"{name}'s s, {power}").hex() for power in (2, 1)],
        "levels": levels,
        "words": words,
    }


def _numbers(what: str, n: int, width: int) -> list[int]:
    data = drawn(what, n * width)
    return [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)]


def _coefficient(what: str) -> bytes:
    return (int.from_bytes(drawn(what, 40), "little") % PRIME).to_bytes(SHARE_BYTES, "little")


def _identity(client: Json) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(client["identity_seed"]))


def _base64(key: bytes) -> str:
    return base64.b64encode(key).decode()


@dataclass(frozen=True)
class Given(Contribution):
    """What a client masks, whatever its training came to."""

    given: Tensor = field(kw_only=True)

    def levels(self) -> Iterator[Tensor]:
        yield self.given.clone()


def played(start: Json) -> Json:
    """Everything that follows from `given()`, by the product's own client and coordinator."""
    return Play(start).transcript()


class Play:
    """The round, one phase after the other."""

    def __init__(self, start: Json) -> None:
        self.start = start
        told: Json = start["context"]
        cohort = tuple((ClientId(name), key) for name, key in told["cohort"])
        told = {**told, "run": RunId(told["run"]), "cohort": cohort}
        self.context = Context(**told)
        self.clients = [
            SecureClient(self.context, index, _identity(one), _replayed(one))
            for index, one in enumerate(start["clients"])
        ]
        self.adverts = [AdvertiseKeys.decode(client.advertise()) for client in self.clients]
        opening = bytes.fromhex(start["opening"])
        self.roster = Roster(opening, tuple(self.adverts)).encode()
        self.session = Session(self.context, opening, {one.index: one for one in self.adverts})
        self.shared, self.inputs = tuple(range(N)), tuple(index for index in range(N) if index != GONE)

    def transcript(self) -> Json:
        dealt = {i: ShareKeys.decode(self.clients[i].share(self.roster), i, self._others(i)) for i in self.shared}
        inboxes = {i: Inbox(self.shared, {j: dealt[j].dealt[i] for j in self._others(i)}).encode() for i in self.inputs}
        for index, inbox in inboxes.items():
            self.clients[index].hear(inbox)
        masks = {str(index): self._masks(index) for index in self.inputs}
        updates = {index: self._update(index) for index in self.inputs}
        signatures = {i: self.clients[i].sign_input(hashlib.sha256(updates[i]).digest()) for i in self.inputs}
        agreed = {index: self.clients[index].agree(encode_indices(self.inputs)) for index in self.inputs}
        answers = {index: self.clients[index].reveal(encode_agreements(agreed)) for index in self.inputs}
        return {
            "context_json": canonical(self.context),
            "context_digest": self.context.digest.hex(),
            "advertise_keys": [one.encode().hex() for one in self.adverts],
            "roster": self.roster.hex(),
            "degree": self.session.parameters.k,
            "threshold": self.session.threshold,
            "session_digest": self.session.digest.hex(),
            "channel_keys": self._channel_keys(),
            "share_keys": _hex(message.encode() for message in dealt.values()),
            "inboxes": _hex(inboxes.values()),
            "shared_digest": self.session.set_digest(self.shared).hex(),
            "masks": masks,
            "updates": _hex(updates.values()),
            "input_signatures": _hex(signatures.values()),
            "inputs": encode_indices(self.inputs).hex(),
            "inputs_digest": self.session.set_digest(self.inputs).hex(),
            "consistency": _hex(agreed.values()),
            "agreements": encode_agreements(agreed).hex(),
            "unmasking": _hex(answers.values()),
            **self._sums(dealt, updates, answers),
        }

    def _others(self, index: int) -> tuple[int, ...]:
        return self.session.neighbours(index)

    def _update(self, index: int) -> bytes:
        one = self.start["clients"][index]
        words, levels = (torch.tensor(one[what], dtype=dtype) for what, dtype in _VECTORS.items())
        sent = Given(COMPOSITION, words, torch.zeros(0), bytes(32), given=levels)
        return b"".join(bytes(piece) for piece in masked_input(sent, self.clients[index]))

    def _pair(self, index: int, which: str) -> KeyPair:
        return KeyPair(bytes.fromhex(self.start["clients"][index][which]))

    def _channel_keys(self) -> Json:
        """By dealer and holder."""
        return {
            f"{dealer} to {holder}": channel_key(
                self._pair(dealer, "channel_seed").shared(self.adverts[holder].channel_key),
                self.session.digest,
                dealer,
                holder,
            ).hex()
            for dealer in self.shared
            for holder in self._others(dealer)
        }

    def _masks(self, index: int) -> Json:
        """The key, and how its keystream begins, of each mask that a client takes part in."""
        own, digest = bytes.fromhex(self.start["clients"][index]["self_mask"]), self.session.digest
        found: Json = {}
        for vector in Vector:
            keys = {"self": self_mask_key(own, digest, vector, index)}
            for other in self._others(index):
                shared = self._pair(index, "mask_seed").shared(self.adverts[other].mask_key)
                keys[str(other)] = pair_mask_key(shared, digest, vector, index, other)
            found[vector.value] = {of: {"key": key.hex(), "keystream": _keystream(key)} for of, key in keys.items()}
        return found

    def _sums(self, dealt: Mapping[int, ShareKeys], updates: Mapping[int, bytes], answers: Mapping[int, bytes]) -> Json:
        unmasker = Unmasker(self.session, self.shared, self.inputs, dealt)
        for index, answer in answers.items():
            unmasker.take(Unmasking.decode(answer, index, N))
        reader = MaskedReader(COMPOSITION)
        total = reader.new_sum()
        for index, update in updates.items():
            total.add(reader.integers(update[:HEADER_BYTES], [update[HEADER_BYTES:]], index), 1)
        levels, words = unmasked(total, COMPOSITION, unmasker.open())
        return {"sum_of_levels": lift(levels, BITS).tolist(), "sum_of_words": words.tolist()}


_VECTORS = {"words": torch.int64, "levels": torch.int32}


def _replayed(client: Json) -> Callable[[int], bytes]:
    """The client's draws, in the order in which it makes them."""
    names = ("channel_seed", "mask_seed", "self_mask")
    draws = [bytes.fromhex(client[name]) for name in names]
    draws += [bytes.fromhex("".join(client[name])) for name in ("self_mask_polynomial", "mask_seed_polynomial")]
    waiting = iter(draws)

    def random(n_bytes: int) -> bytes:
        draw = next(waiting)
        assert len(draw) == n_bytes
        return draw

    return random


def _keystream(key: bytes) -> str:
    lanes = torch.zeros(PREFIX, dtype=torch.int8)
    Masks([key], [1]).apply(lanes)
    return lanes.numpy().tobytes().hex()


def _hex(messages: Iterable[bytes]) -> list[str]:
    return [message.hex() for message in messages]


if __name__ == "__main__":
    about = (
        "One round of four clients, t = 3, of which dora shares her keys and then drops out. `given` is what was drawn "
        "and planned; `derived` follows from it, byte for byte. Bytes are in hex. Polynomials: the coefficients of x^2 "
        "and x, 33 bytes each, little-endian. Lists of messages are in the order of the clients that send them."
    )
    start = given()
    FILE.write_text(json.dumps({"about": about, "given": start, "derived": played(start)}, indent=1) + "\n")
