"""The member list of a consortium: whose keys a site believes. Officers sign it; the coordinator has no say in it.

With secure aggregation a coordinator that could choose the clients' keys would read every update. So the sites have a
list of names and keys (Ed25519) that is made without it, and signed offline by officers of the consortium:

```json
{"list": {"name": ..., "epoch": 1, "members": {client: key}, "officers": {officer: key}, "quorum": 2,
          "previous": "", "format": 1},
 "signatures": {key of an officer: signature}}
```

Keys and signatures are base64. A list's hash is the SHA-256 of its canonical JSON (`canonical.py`); an officer signs

    umbel member list 1\\n<the hash, 64 hex digits>

A change is a new list, one epoch later, with the hash of the one before: to add, to give a client another key, or to
remove, which is all that revocation is. A site takes it if a quorum of the officers that it knows has signed it, and a
quorum of its own officers too: so that nobody can lock the consortium out with officers who are not there, and who
comes later can check a list by itself. (The Update Framework, specification 1.0, 5.3.4, does the same for its roots.)
Signatures stand by key, not by name: an officer who changes keys signs with both.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from umbel.aggregation.canonical import EXACT_MAX, Json, canonical, parsed
from umbel.aggregation.trust.fingerprint import short_groups
from umbel.aggregation.trust.public_keys import public_key_bytes, public_key_text
from umbel.aggregation.types import require_sha256, require_slug

FORMAT = 1
OFFICERS_MAX = 100  # each costs whoever reads a list a signature to check
SIGNATURES_MAX = 2 * OFFICERS_MAX  # of the list before, and of its own
COHORT_MIN = 3
FILE_BYTES_MAX = 1_000_000  # some 9000 members
_LIST_KEYS = ("name", "epoch", "members", "officers", "quorum", "previous", "format")
_PURPOSE = b"umbel member list 1\n"
_SIGNATURE = re.compile(r"[A-Za-z0-9+/]{86}==")


class MembersRefused(ValueError):
    """A member list that is not believed; `str(error)` is one sentence."""


class MalformedMembers(MembersRefused):
    """Bytes that are no member list."""


class BadOfficerSignature(MembersRefused):
    """A signature of an officer's key that does not fit the list: it was changed after it was signed, or damaged."""


class TooFewSignatures(MembersRefused):
    """Fewer officers have signed than the quorum asks."""


class NotTheSuccessor(MembersRefused):
    """A list that does not follow the one that is known: an older one, another of the same epoch, or a later one."""


class NotAMember(MembersRefused):
    """A client that is not in the list, or has another key there."""


@dataclass(frozen=True, slots=True)
class MemberList:
    """Who belongs to a consortium. `members`, `officers`: names to public keys, base64; no key stands there twice.

    `epoch`: from 1, one more with each change. `quorum`: how many officers must sign. `previous`: the SHA-256 of the
    epoch before, empty in the first. Raises `ValueError` for what no list may hold. One that is being written may have
    fewer officers than its quorum: then nobody can sign it validly.
    """

    name: str
    epoch: int
    members: Mapping[str, str]
    officers: Mapping[str, str]
    quorum: int
    previous: str = ""
    format: int = FORMAT

    def __post_init__(self) -> None:
        require_slug(self.name, "the list's name")
        _require_whole(self.epoch, "epoch", EXACT_MAX)
        _require_whole(self.quorum, "quorum", OFFICERS_MAX)
        if len(self.officers) > OFFICERS_MAX:
            raise ValueError(f"at most {OFFICERS_MAX} officers, not {len(self.officers)}")
        if self.epoch > 1:
            require_sha256(self.previous, "previous, the SHA-256 of the epoch before,")
        elif self.previous:
            raise ValueError("the first epoch follows no other: previous must be empty")
        _require_distinct((*self.members.items(), *self.officers.items()))

    @property
    def sha256(self) -> str:
        """Of the canonical JSON, hex: what officers sign, sites pin and every round is bound to."""
        return hashlib.sha256(canonical(self).encode()).hexdigest()

    @property
    def words(self) -> str:
        """The list as sentences name it: which one, which epoch, and enough of its hash to tell it from another."""
        return f"{self.name!r}, epoch {self.epoch} ({short_groups(self.sha256)})"

    def keys_of(self, clients: Iterable[str]) -> dict[str, bytes]:
        """The public keys (32 raw bytes) of these clients. Raises `NotAMember` for one that is not in the list."""
        keys = dict[str, bytes]()
        for client in clients:
            if (key := self.members.get(client)) is None:
                raise NotAMember(f"{client[:63]!r} is not in epoch {self.epoch} of the member list {self.name!r}")
            keys[client] = public_key_bytes(key)
        return keys

    def require_member(self, client: str, key: bytes) -> None:
        """Raise `NotAMember` unless this client is in the list with this key (32 raw bytes)."""
        if self.keys_of([client])[client] != key:
            raise NotAMember(
                f"epoch {self.epoch} of the member list {self.name!r} has another key for {client!r}; "
                "compare fingerprints with an officer of the list"
            )

    def concerns(self) -> tuple[str, ...]:
        """What a careful officer would not leave so, in sentences. None of it makes the list invalid."""
        found = list[str]()
        if self.quorum < 2:
            found.append("one officer alone can change who is believed: set a quorum of 2 or more")
        if self.quorum > len(self.officers):
            found.append(f"a quorum of {self.quorum} cannot be reached with {len(self.officers)} officers")
        elif 2 * self.quorum <= len(self.officers):
            found.append("two halves of the officers could sign two different lists: set a quorum above half of them")
        if len(self.members) < COHORT_MIN:
            found.append(f"secure aggregation hides nothing among fewer than {COHORT_MIN} members")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class SignedMembers:
    """A list and what officers have put under it: public keys to signatures, base64. They may still be too few."""

    list: MemberList
    signatures: Mapping[str, str]

    def __post_init__(self) -> None:
        if len(self.signatures) > SIGNATURES_MAX:
            raise ValueError(f"at most {SIGNATURES_MAX} signatures, not {len(self.signatures)}")
        for key, signature in self.signatures.items():
            _require_key(key, "a key under signatures")
            if not _SIGNATURE.fullmatch(signature):
                raise ValueError("a signature must be the base64 of 64 bytes")

    def signed_with(self, key: Ed25519PrivateKey) -> "SignedMembers":
        """The same with this key's signature. Whether it is an officer's is not asked: it may be of the list before."""
        text = public_key_text(key.public_key().public_bytes_raw())
        signature = base64.b64encode(key.sign(_signed(self.list))).decode()
        return replace(self, signatures={**self.signatures, text: signature})

    def signers_among(self, officers: Mapping[str, str]) -> tuple[str, ...]:
        """The names of those officers who have signed, in order. Raises `BadOfficerSignature`; strangers' are passed
        over.
        """
        names, signed = list[str](), _signed(self.list)
        for name, key in sorted(officers.items()):
            if (signature := self.signatures.get(key)) is not None:
                try:
                    Ed25519PublicKey.from_public_bytes(public_key_bytes(key)).verify(
                        base64.b64decode(signature), signed
                    )
                except InvalidSignature as error:
                    raise BadOfficerSignature(
                        f"the signature of officer {name!r} does not fit epoch {self.list.epoch} of "
                        f"{self.list.name!r}: it was changed after it was signed, or the file is damaged"
                    ) from error
                names.append(name)
        return tuple(names)


def check_first(signed: SignedMembers) -> tuple[str, ...]:
    """Raise `MembersRefused` unless a quorum of the list's own officers has signed it; who has.

    It says that the list is whole, not that it is the right one: anyone can make officers. Compare its hash.
    """
    return _require_quorum(signed, signed.list, "its own")


def check_successor(old: MemberList, new: SignedMembers) -> tuple[str, ...]:
    """Raise `MembersRefused` unless `new` is the epoch after `old`, signed by a quorum of its officers; who of those.

    A quorum of the new list's own officers must have signed, too.
    """
    require_follows(old, new.list)
    signers = _require_quorum(new, old, f"epoch {old.epoch}'s")
    check_first(new)
    return signers


def require_follows(old: MemberList, new: MemberList) -> None:
    """Raise `NotTheSuccessor` unless `new` says that it is the epoch after `old`; signatures are another matter."""
    if new.name != old.name:
        raise NotTheSuccessor(f"the list that is known is {old.name!r}, this one is {new.name!r}")
    if new.epoch != old.epoch + 1:
        raise NotTheSuccessor(f"after epoch {old.epoch} of {old.name!r} comes {old.epoch + 1}, not {new.epoch}")
    if new.previous != old.sha256:
        raise NotTheSuccessor(
            f"epoch {new.epoch} of {old.name!r} follows another epoch {old.epoch} than the one that is known; "
            "ask the officers which was signed twice"
        )


def _require_quorum(signed: SignedMembers, asked: MemberList, whose: str) -> tuple[str, ...]:
    signers = signed.signers_among(asked.officers)
    if len(signers) < asked.quorum:
        found = f"{len(signers)} of {whose} officers" + (f" ({', '.join(signers)})" if signers else "")
        raise TooFewSignatures(
            f"epoch {signed.list.epoch} of {signed.list.name!r} is signed by {found}, and {asked.quorum} must: "
            "have more of them sign it"
        )
    return signers


def _require_distinct(entries: Iterable[tuple[str, str]]) -> None:
    """No key under two names: one private key would count as two sites, or the key of a machine as an officer's."""
    owner = dict[bytes, str]()
    for name, key in entries:
        require_slug(name, "a name in a member list")
        raw = _require_key(key, f"the key of {name!r}")
        if raw in owner:
            raise ValueError(f"{owner[raw]!r} and {name!r} have the same key; each must make its own")
        owner[raw] = name


def _require_key(text: str, what: str) -> bytes:
    raw = public_key_bytes(text, what)
    if public_key_text(raw) != text:  # base64 of 32 bytes leaves two bits over: four spellings would be one key
        raise ValueError(f"{what} is not the base64 that its bytes have")
    return raw


def _require_whole(value: int, what: str, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{what} must be a whole number from 1 to {most}")


def _signed(members: MemberList) -> bytes:
    return _PURPOSE + members.sha256.encode()


def read_members(data: bytes) -> SignedMembers:
    """A member list of a file's bytes. Raises `MalformedMembers` for all that is not exactly one; checks no signature.

    Refused are more bytes than `FILE_BYTES_MAX`, keys said twice, unknown or missing, and names and keys that are none.
    """
    if len(data) > FILE_BYTES_MAX:
        raise MalformedMembers(f"this is no member list: it has more than {FILE_BYTES_MAX} bytes")
    try:
        whole = _object(parsed(data.decode()), "the file", ("list", "signatures"))
        return SignedMembers(_list(whole["list"]), _texts(whole["signatures"], "signatures"))
    except ValueError as error:
        raise MalformedMembers(f"this is no member list: {error}") from error


def members_bytes(signed: SignedMembers) -> bytes:
    """As a file holds it, spread over lines for people. Raises `ValueError` if it is longer than any is read."""
    data = (json.dumps({"list": asdict(signed.list), "signatures": {**signed.signatures}}, indent=2) + "\n").encode()
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"a member list has at most {FILE_BYTES_MAX} bytes, this one {len(data)}")
    return data


def _list(value: Json) -> MemberList:
    found = _object(value, "list", _LIST_KEYS)
    name, epoch, quorum, previous = (found[key] for key in ("name", "epoch", "quorum", "previous"))
    if type(found["format"]) is not int or found["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT}; install the umbel that it was made with")
    if not (isinstance(name, str) and isinstance(previous, str)):
        raise ValueError("name and previous must be texts")
    if not (isinstance(epoch, int) and isinstance(quorum, int)):
        raise ValueError("epoch and quorum must be whole numbers")
    members, officers = _texts(found["members"], "members"), _texts(found["officers"], "officers")
    return MemberList(name, epoch, members, officers, quorum, previous)


def _object(value: Json, what: str, keys: tuple[str, ...]) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object")
    if stray := sorted(value.keys() - set(keys)):
        raise ValueError(f"{what} has an unknown key {stray[0][:63]!r}")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"{what} has no {missing[0]!r}")
    return value


def _texts(value: Json, what: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object")
    texts = {key: text for key, text in value.items() if isinstance(text, str)}
    if len(texts) < len(value):
        raise ValueError(f"every entry of {what} must be a text")
    return texts
