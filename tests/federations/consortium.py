"""A consortium for tests: keys that a name makes, so that every run has the same, and lists that its officers sign."""

from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.aggregation.trust.members import MemberList, SignedMembers
from umbel.aggregation.trust.public_keys import public_key_text

SITES = ("north", "south", "west")
OFFICERS = ("anna", "bert", "cleo")


def private_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(sha256(name.encode()).digest())


def public_key(name: str) -> str:
    return public_key_text(private_key(name).public_key().public_bytes_raw())


def first_list(sites: Iterable[str] = SITES, officers: Iterable[str] = OFFICERS, quorum: int = 2) -> MemberList:
    return MemberList("pilot", 1, {s: public_key(s) for s in sites}, {o: public_key(o) for o in officers}, quorum)


def signed(members: MemberList, *names: str) -> SignedMembers:
    """The list with the signatures of these names' keys, officers or not."""
    whole = SignedMembers(members, {})
    for name in names:
        whole = whole.signed_with(private_key(name))
    return whole


def after(old: MemberList, **changes: object) -> MemberList:
    """The next epoch, with these changes."""
    facts: dict[str, object] = {"epoch": old.epoch + 1, "previous": old.sha256, **changes}
    return replace(old, **facts)  # type: ignore[arg-type]  # what replace takes is known to the tests alone


def without(old: MemberList, site: str) -> MemberList:
    """The next epoch, without one of the members."""
    return after(old, members={name: key for name, key in old.members.items() if name != site})
