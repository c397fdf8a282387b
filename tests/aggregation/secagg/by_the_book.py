"""The protocol written a second time, from its description alone, as somebody would in another language.

Nothing of umbel is imported: hashes and HMAC from the standard library, curves, AES and Ed25519 from `cryptography`. It
is slow and checks nothing; it only makes the bytes.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

P = 2**256 + 297
LABEL = b"umbel-secagg/1 "
VECTORS = ("levels", "words")
Json = dict[str, Any]


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def u32(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def hkdf(ikm: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 with SHA-256, for one block of 32 bytes."""
    extracted = hmac.digest(salt, ikm, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def keystream(key: bytes, n_bytes: int) -> bytes:
    return Cipher(AES256(key), CTR(bytes(16))).encryptor().update(bytes(n_bytes))


def public(seed: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def shared(seed: bytes, other: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(seed).exchange(X25519PublicKey.from_public_bytes(other))


def packed(levels: Iterable[int], bits: int) -> bytes:
    """docs/reference/codecs.md: groups of 512, 16 lanes of 32 values each, from the lowest bit of 32-bit words up."""
    values = [level % 2**bits for level in levels]
    values += [0] * (-len(values) % 512)
    out = b""
    for first in range(0, len(values), 512):
        lanes = [
            sum(values[first + 16 * row + lane] << bits * row for row in range(32)).to_bytes(4 * bits, "little")
            for lane in range(16)
        ]
        out += b"".join(lane[4 * word : 4 * word + 4] for word in range(bits) for lane in lanes)
    return out


class Book:
    """The round of `given`: four clients, all neighbours; the last one is gone after ShareKeys."""

    def __init__(self, given: Json) -> None:
        self.given = given
        self.all, self.inputs = range(4), range(3)
        self.t, self.k = 2 * 4 // 3 + 1, 3
        # Plain ASCII, and no number but integers and one that has a short decimal fraction: this is RFC 8785 here.
        self.context_json = json.dumps(given["context"], sort_keys=True, separators=(",", ":"))
        self.context = sha256(self.context_json.encode())
        self.adverts = [self.advertise_keys(index) for index in self.all]
        roster = b"".join(self.adverts)
        self.session = sha256(LABEL + b"session", self.context, u32(4), roster, u32(self.k, self.t))

    def secret(self, index: int, what: str) -> bytes:
        return bytes.fromhex(self.given["clients"][index][what])

    def sign(self, index: int, label: bytes, digest: bytes, payload: bytes) -> bytes:
        key = Ed25519PrivateKey.from_private_bytes(self.secret(index, "identity_seed"))
        return key.sign(LABEL + label + b"\x00" + digest + sha256(payload))

    def advertise_keys(self, index: int) -> bytes:
        payload = u32(index) + public(self.secret(index, "channel_seed")) + public(self.secret(index, "mask_seed"))
        return payload + self.sign(index, b"advertise keys", self.context, payload)

    def channel_of(self, index: int) -> bytes:
        return self.adverts[index][4:36]

    def mask_of(self, index: int) -> bytes:
        return self.adverts[index][36:68]

    # --- shares -------------------------------------------------------------------------------------------------------

    def share(self, dealer: int, holder: int, secret: str, polynomial: str) -> bytes:
        """The value at holder + 1 of a polynomial whose value at zero is the secret."""
        second, first = (
            int.from_bytes(bytes.fromhex(one), "little") for one in self.given["clients"][dealer][polynomial]
        )
        x = holder + 1
        value = (second * x * x + first * x + int.from_bytes(self.secret(dealer, secret), "little")) % P
        return value.to_bytes(33, "little")

    def shares(self, dealer: int, holder: int) -> tuple[bytes, bytes]:
        return (
            self.share(dealer, holder, "self_mask", "self_mask_polynomial"),
            self.share(dealer, holder, "mask_seed", "mask_seed_polynomial"),
        )

    def channel_key(self, sender: int, receiver: int) -> bytes:
        secret = shared(self.secret(sender, "channel_seed"), self.channel_of(receiver))
        return hkdf(secret, self.session, LABEL + b"channel" + u32(sender, receiver))

    def dealt(self, dealer: int, holder: int) -> bytes:
        """Two commitments and, for somebody else, what is sealed."""
        pair = self.shares(dealer, holder)
        commitments = b"".join(
            sha256(LABEL + b"share", self.session, bytes([kind]), u32(dealer, holder), one)[:16]
            for kind, one in enumerate(pair)
        )
        if holder == dealer:
            return commitments
        associated = self.session + u32(dealer, holder)
        return commitments + AESGCM(self.channel_key(dealer, holder)).encrypt(bytes(12), b"".join(pair), associated)

    def share_keys(self, dealer: int) -> bytes:
        commitment = sha256(LABEL + b"self mask", self.session, u32(dealer), self.secret(dealer, "self_mask"))
        payload = u32(dealer) + commitment + b"".join(self.dealt(dealer, holder) for holder in self.all)
        return payload + self.sign(dealer, b"share keys", self.session, payload)

    def inbox(self, index: int) -> bytes:
        return u32(4, *self.all) + b"".join(self.dealt(dealer, index) for dealer in self.all if dealer != index)

    # --- masks --------------------------------------------------------------------------------------------------------

    def mask_keys(self, index: int, vector: str) -> dict[str, bytes]:
        label = LABEL + b"self " + vector.encode() + u32(index)
        keys = {"self": hkdf(self.secret(index, "self_mask"), self.session, label)}
        for other in self.all:
            if other != index:
                secret = shared(self.secret(index, "mask_seed"), self.mask_of(other))
                label = LABEL + b"mask " + vector.encode() + u32(min(index, other), max(index, other))
                keys[str(other)] = hkdf(secret, self.session, label)
        return keys

    def masked(self, index: int, vector: str, width: int) -> list[int]:
        values = list(self.given["clients"][index][vector])
        for of, key in self.mask_keys(index, vector).items():
            sign = -1 if of != "self" and int(of) < index else 1
            stream = keystream(key, width * len(values))
            for at in range(len(values)):
                values[at] += sign * int.from_bytes(stream[width * at : width * at + width], "little")
        return [value % 2 ** (8 * width) for value in values]

    def update(self, index: int) -> bytes:
        """Lanes of 16 bits are the least that hold the 11 of a level."""
        levels = packed(self.masked(index, "levels", 2), self.given["bits"])
        words = b"".join(word.to_bytes(8, "little") for word in self.masked(index, "words", 8))
        return bytes.fromhex(self.given["update_header"]) + levels + words

    # --- agreements and shares ----------------------------------------------------------------------------------------

    def set_digest(self, members: Iterable[int]) -> bytes:
        listed = sorted(members)
        return sha256(LABEL + b"set", self.session, u32(len(listed), *listed))

    def input_signature(self, index: int) -> bytes:
        payload = self.set_digest(self.all) + sha256(self.update(index))
        return self.sign(index, b"masked input", self.session, payload)

    def consistency(self, index: int) -> bytes:
        payload = self.set_digest(self.all) + self.set_digest(self.inputs)
        return self.sign(index, b"consistency", self.session, payload)

    def unmasking(self, index: int) -> bytes:
        """Of those in the sum the share of b, of the one who is gone that of its mask key's seed."""
        parts = (u32(dealer) + self.shares(dealer, index)[dealer not in self.inputs] for dealer in self.all)
        return u32(index, 4) + b"".join(parts)

    def derived(self) -> Json:
        pairs = [(dealer, holder) for dealer in self.all for holder in self.all if dealer != holder]
        return {
            "context_json": self.context_json,
            "context_digest": self.context.hex(),
            "advertise_keys": _hex(self.adverts),
            "roster": (u32(4) + bytes.fromhex(self.given["opening"]) + b"".join(self.adverts)).hex(),
            "degree": self.k,
            "threshold": self.t,
            "session_digest": self.session.hex(),
            "channel_keys": {f"{one} to {other}": self.channel_key(one, other).hex() for one, other in pairs},
            "share_keys": _hex(self.share_keys(index) for index in self.all),
            "inboxes": _hex(self.inbox(index) for index in self.inputs),
            "shared_digest": self.set_digest(self.all).hex(),
            "masks": {
                str(index): {one: _shown(self.mask_keys(index, one)) for one in VECTORS} for index in self.inputs
            },
            "updates": _hex(self.update(index) for index in self.inputs),
            "input_signatures": _hex(self.input_signature(index) for index in self.inputs),
            "inputs": u32(3, *self.inputs).hex(),
            "inputs_digest": self.set_digest(self.inputs).hex(),
            "consistency": _hex(self.consistency(index) for index in self.inputs),
            "agreements": (u32(3) + b"".join(u32(index) + self.consistency(index) for index in self.inputs)).hex(),
            "unmasking": _hex(self.unmasking(index) for index in self.inputs),
            "sum_of_levels": self.sum_of("levels"),
            "sum_of_words": self.sum_of("words"),
        }

    def sum_of(self, vector: str) -> list[int]:
        """What the protocol is for; without it."""
        return [
            sum(column) for column in zip(*(self.given["clients"][index][vector] for index in self.inputs), strict=True)
        ]

    def identities(self) -> list[str]:
        """The cohort's keys as the context has them."""
        seeds = (self.secret(index, "identity_seed") for index in self.all)
        keys = (Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw() for seed in seeds)
        return [base64.b64encode(key).decode() for key in keys]


def _shown(keys: Mapping[str, bytes]) -> Json:
    return {of: {"key": key.hex(), "keystream": keystream(key, 64).hex()} for of, key in keys.items()}


def _hex(messages: Iterable[bytes]) -> list[str]:
    return [message.hex() for message in messages]
