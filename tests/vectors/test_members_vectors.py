"""The frozen vector of a member list: its canonical text and hash, signatures, the next epoch, fingerprints."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.aggregation.canonical import canonical
from umbel.aggregation.trust.members import SignedMembers, check_first, check_successor, members_bytes, read_members
from umbel.aggregation.trust.public_keys import fingerprint, grouped

FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "members.json").read_text())
EPOCHS = FROZEN["epochs"]


def whole(number: int) -> SignedMembers:
    return read_members(json.dumps(EPOCHS[number]["file"]).encode())


@pytest.mark.parametrize("number", [0, 1])
def test_the_canonical_text_and_the_hash_of_a_list(number: int) -> None:
    members, epoch = whole(number).list, EPOCHS[number]
    assert canonical(members) == epoch["canonical"]
    assert members.sha256 == epoch["sha256"]
    assert grouped(members.sha256) == epoch["fingerprint"]
    assert read_members(members_bytes(whole(number))) == whole(number)


@pytest.mark.parametrize("number", [0, 1])
def test_an_officer_signs_so(number: int) -> None:
    """Ed25519 has no randomness: the same key and list make the same signature."""
    again = SignedMembers(whole(number).list, {})
    for officer in EPOCHS[number]["signed_by"]:
        again = again.signed_with(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(FROZEN["officer_seeds"][officer])))
    assert again == whole(number)


def test_the_second_epoch_follows_the_first() -> None:
    assert check_first(whole(0)) == ("anna", "bert")
    assert check_successor(whole(0).list, whole(1)) == ("anna", "cleo")


def test_the_fingerprint_of_a_key() -> None:
    for key, said in FROZEN["key_fingerprints"].items():
        assert fingerprint(base64.b64decode(key)) == said
