"""The frozen vectors of secure aggregation's primitives: three clients' keys, shares and signatures, byte for byte."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.crypto.derive import (
    ShareKind,
    Vector,
    channel_key,
    pair_mask_key,
    require_self_mask,
    require_share,
    self_mask_commitment,
    self_mask_key,
    session_digest,
    set_digest,
    share_commitment,
    u32,
)
from umbel.aggregation.secagg.crypto.sealed import open_sealed, seal
from umbel.aggregation.secagg.crypto.shamir import Interpolation, split
from umbel.aggregation.secagg.crypto.signing import Label, sign, verify

pytestmark = pytest.mark.bits

FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "secagg_primitives.json").read_text())
CLIENTS: list[dict[str, Any]] = FROZEN["clients"]
CONTEXT, SESSION = bytes.fromhex(FROZEN["context"]), bytes.fromhex(FROZEN["session"])


def of(client: dict[str, Any], name: str) -> bytes:
    return bytes.fromhex(client[name])


def shared(one: dict[str, Any], other: dict[str, Any], pair: str) -> bytes:
    """What two clients' keys share, the same from both ends. `pair`: "channel" or "mask"."""
    there = KeyPair(of(one, f"{pair}_seed")).shared(of(other, f"{pair}_public"))
    assert there == KeyPair(of(other, f"{pair}_seed")).shared(of(one, f"{pair}_public"))
    return there


def test_advertised_keys_and_the_session_that_they_make() -> None:
    for client in CLIENTS:
        identity = Ed25519PrivateKey.from_private_bytes(of(client, "identity_private"))
        assert identity.public_key().public_bytes_raw() == of(client, "identity_public")
        assert KeyPair(of(client, "channel_seed")).public == of(client, "channel_public")
        assert KeyPair(of(client, "mask_seed")).public == of(client, "mask_public")
        payload = u32(client["index"]) + of(client, "channel_public") + of(client, "mask_public")
        assert sign(identity, Label.ADVERTISE_KEYS, CONTEXT, payload) == of(client, "advertise_keys_signature")
    roster = [
        (one["index"], of(one, "channel_public"), of(one, "mask_public"), of(one, "advertise_keys_signature"))
        for one in CLIENTS
    ]
    assert session_digest(CONTEXT, roster, FROZEN["degree"], FROZEN["threshold"]) == SESSION


def test_signatures_over_the_session() -> None:
    for one in FROZEN["signatures"]:
        client, label, payload = CLIENTS[one["client"]], Label(one["label"]), bytes.fromhex(one["payload"])
        identity = Ed25519PrivateKey.from_private_bytes(of(client, "identity_private"))
        assert sign(identity, label, SESSION, payload).hex() == one["signature"]
        verify(of(client, "identity_public"), label, SESSION, payload, bytes.fromhex(one["signature"]))


def test_digests_of_sets() -> None:
    for one in FROZEN["sets"]:
        assert set_digest(SESSION, one["indices"]).hex() == one["digest"]


def test_secrets_are_shared_and_put_together() -> None:
    points = tuple(client["index"] + 1 for client in CLIENTS)
    for client in CLIENTS:
        for name in ("self_mask", "mask_seed"):
            random, rest = of(client, f"{name}_random"), 0

            def drawn(n_bytes: int, random: bytes = random) -> bytes:
                nonlocal rest
                rest += n_bytes
                return random[rest - n_bytes : rest]

            shares = split(of(client, name), FROZEN["threshold"], points, drawn)
            assert [share.hex() for share in shares] == client[f"{name}_shares"]
            assert rest == len(random)
            assert Interpolation(points[1:], FROZEN["threshold"]).secret(shares[1:]) == of(client, name)


def test_shares_are_committed_to_and_sealed() -> None:
    for one in FROZEN["channels"]:
        dealer, holder = CLIENTS[one["dealer"]], CLIENTS[one["holder"]]
        between = dealer["index"], holder["index"]
        secret = shared(dealer, holder, "channel")
        assert channel_key(secret, SESSION, *between).hex() == one["key"]
        shares = tuple(bytes.fromhex(dealer[f"{name}_shares"][one["holder"]]) for name in ("self_mask", "mask_seed"))
        assert seal(secret, SESSION, *between, (shares[0], shares[1])).hex() == one["sealed"]
        assert open_sealed(secret, SESSION, *between, bytes.fromhex(one["sealed"])) == shares
        for kind, share in zip(ShareKind, shares, strict=True):
            assert share_commitment(SESSION, kind, *between, share).hex() == one["commitments"][kind]
            require_share(bytes.fromhex(one["commitments"][kind]), SESSION, kind, *between, share)


def test_keys_of_masks() -> None:
    for client in CLIENTS:
        index, secret = client["index"], of(client, "self_mask")
        assert self_mask_commitment(SESSION, index, secret).hex() == client["self_mask_commitment"]
        require_self_mask(of(client, "self_mask_commitment"), SESSION, index, secret)
        for vector in Vector:
            assert self_mask_key(secret, SESSION, vector, index).hex() == client["self_mask_keys"][vector]
    for one in FROZEN["pairs"]:
        first, second = (CLIENTS[at] for at in one["clients"])
        secret = shared(first, second, "mask")
        for vector in Vector:
            key = pair_mask_key(secret, SESSION, vector, first["index"], second["index"])
            assert key.hex() == one["keys"][vector]
