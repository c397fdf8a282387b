"""The member list of a consortium: the keys that its sites trust. Officers sign it; the coordinator takes no part.

If the coordinator could choose the clients' keys, it could read every update in spite of secure aggregation. So the
sites have a list of names and keys (Ed25519) that officers of the consortium sign offline:

```json
{"list": {"name": ..., "epoch": 1, "members": {client: key}, "officers": {officer: key}, "quorum": 2,
          "previous": "", "format": 1},
 "signatures": {key of an officer: signature}}
```

Keys and signatures are base64. A list's hash is the SHA-256 of its canonical JSON (`canonical.py`); an officer signs

    umbel member list 1\\n<the hash, 64 hex digits>

A change is a new list, one epoch later, with the hash of the list before. It adds clients, replaces keys, or removes
clients; revocation is a removal. A site accepts the new list if a quorum of the old list's officers has signed it, and
a quorum of the new list's officers too. So nobody can lock out the consortium with officers that do not exist, and a
site that joins later can check a list alone. (The Update Framework, specification 1.0, 5.3.4, does the same for its
roots.) Signatures are stored by key, not by name: an officer who changes keys signs with both.
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
from umbel.aggregation.trust.public_keys import public_key_bytes, public_key_text, short_groups
from umbel.aggregation.types import require_sha256, require_slug

FORMAT = 1
OFFICERS_MAX = 100  # each costs every reader a signature to check
SIGNATURES_MAX = 2 * OFFICERS_MAX  # officers of the list before, and its own
COHORT_MIN = 3
FILE_BYTES_MAX = 1_000_000  # some 9000 members
_LIST_KEYS = ("name", "epoch", "members", "officers", "quorum", "previous", "format")
_PURPOSE = b"umbel member list 1\n"
_SIGNATURE = re.compile(r"[A-Za-z0-9+/]{86}==")


class MembersRefused(ValueError):
    """A member list that is refused; `str(error)` is one sentence."""


class MalformedMembers(MembersRefused):
    """Bytes that are not a member list."""


class BadOfficerSignature(MembersRefused):
    """An officer's signature that does not fit the list: the list was changed after signing, or damaged."""


class TooFewSignatures(MembersRefused):
    """Fewer officers have signed than the quorum requires."""


class NotTheSuccessor(MembersRefused):
    """A list that does not follow the known one: an older one, another of the same epoch, or a later one."""


class NotAMember(MembersRefused):
    """A key that belongs to no officer of the list."""


@dataclass(frozen=True, slots=True)
class MemberList:
    """The members and officers of a consortium. No key appears twice.

    Raises `ValueError` for what no list may hold. A list that is still being written may have fewer officers than its
    quorum; then nobody can sign it validly.
    """

    name: str
    epoch: int  # 1 at first, one more with each change
    members: Mapping[str, str]  # names to public keys, base64
    officers: Mapping[str, str]  # likewise
    quorum: int  # the number of officers who must sign
    previous: str = ""  # the SHA-256 of the epoch before; empty in the first
    format: int = FORMAT

    def __post_init__(self) -> None:
        require_slug(self.name, "the list's name")
        _require_whole(self.epoch, "epoch", EXACT_MAX)
        _require_whole(self.quorum, "quorum", OFFICERS_MAX)
        if len(self.officers) > OFFICERS_MAX:
            raise ValueError(f"a member list has at most {OFFICERS_MAX} officers, not {len(self.officers)}")
        if self.epoch > 1:
            require_sha256(self.previous, "`previous`, the SHA-256 of the epoch before,")
        elif self.previous:
            raise ValueError("epoch 1 has no epoch before it, so `previous` must be empty")
        _require_distinct((*self.members.items(), *self.officers.items()))

    @property
    def sha256(self) -> str:
        """The SHA-256 of the canonical JSON, hex. Officers sign it, sites pin it, and every round is bound to it."""
        return hashlib.sha256(canonical(self).encode()).hexdigest()

    @property
    def words(self) -> str:
        """The list's name, epoch and short hash, for sentences."""
        return f"{self.name!r}, epoch {self.epoch} ({short_groups(self.sha256)})"

    def concerns(self) -> tuple[str, ...]:
        """Warnings for a careful officer, in sentences. The list is valid nevertheless."""
        found = list[str]()
        if self.quorum < 2:
            found.append("one officer alone can change the list: set a quorum of 2 or more")
        if self.quorum > len(self.officers):
            found.append(
                f"a quorum of {self.quorum} cannot be reached with {len(self.officers)} officers: add some, or lower it"
            )
        elif 2 * self.quorum <= len(self.officers):
            found.append("two halves of the officers could sign two different lists: set a quorum above half of them")
        if len(self.members) < COHORT_MIN:
            found.append(
                f"secure aggregation needs at least {COHORT_MIN} members to hide their updates, not {len(self.members)}"
            )
        return tuple(found)


@dataclass(frozen=True, slots=True)
class SignedMembers:
    """A list and its signatures, perhaps fewer than the quorum."""

    list: MemberList
    signatures: Mapping[str, str]  # public keys to signatures, both base64

    def __post_init__(self) -> None:
        if len(self.signatures) > SIGNATURES_MAX:
            raise ValueError(f"a member list has at most {SIGNATURES_MAX} signatures, not {len(self.signatures)}")
        for key, signature in self.signatures.items():
            _require_key(key, "a signer's key in `signatures`")
            if not _SIGNATURE.fullmatch(signature):
                raise ValueError("a signature must be the base64 of 64 bytes")

    def signed_with(self, key: Ed25519PrivateKey) -> "SignedMembers":
        """A copy with this key's signature. The key need not be a current officer's: it may be of the list before."""
        text = public_key_text(key.public_key().public_bytes_raw())
        signature = base64.b64encode(key.sign(_signed(self.list))).decode()
        return replace(self, signatures={**self.signatures, text: signature})

    def signers_among(self, officers: Mapping[str, str]) -> tuple[str, ...]:
        """The names of the officers who have signed, in order. Ignores strangers. Raises `BadOfficerSignature`."""
        names, signed = list[str](), _signed(self.list)
        for name, key in sorted(officers.items()):
            if (signature := self.signatures.get(key)) is not None:
                try:
                    Ed25519PublicKey.from_public_bytes(public_key_bytes(key)).verify(
                        base64.b64decode(signature), signed
                    )
                except InvalidSignature as error:
                    raise BadOfficerSignature(
                        f"the signature of officer {name!r} does not match epoch {self.list.epoch} of "
                        f"{self.list.name!r}: the list was changed after signing, or the file is damaged; ask the "
                        "officers for the file again"
                    ) from error
                names.append(name)
        return tuple(names)


def check_first(signed: SignedMembers) -> tuple[str, ...]:
    """Raise `MembersRefused` unless a quorum of the list's own officers has signed it; return the signers.

    This shows that the list is complete, not that it is the right one, because anyone can make officers. Compare its
    hash.
    """
    return _require_quorum(signed, signed.list, "its own")


def check_successor(old: MemberList, new: SignedMembers) -> tuple[str, ...]:
    """Raise `MembersRefused` unless `new` is the epoch after `old`, signed by quorums of both lists' officers.

    Returns the signers among the officers of `old`.
    """
    require_follows(old, new.list)
    signers = _require_quorum(new, old, f"epoch {old.epoch}'s")
    check_first(new)
    return signers


def require_follows(old: MemberList, new: MemberList) -> None:
    """Raise `NotTheSuccessor` unless `new` claims to be the epoch after `old`. Does not check signatures."""
    if new.name != old.name:
        raise NotTheSuccessor(
            f"this list is named {new.name!r}, but the known list is named {old.name!r}; all epochs of a list must "
            "have the same name"
        )
    if new.epoch != old.epoch + 1:
        raise NotTheSuccessor(
            f"the known list is epoch {old.epoch} of {old.name!r}, so the next must be epoch {old.epoch + 1}, not "
            f"{new.epoch}"
        )
    if new.previous != old.sha256:
        raise NotTheSuccessor(
            f"the `previous` of epoch {new.epoch} of {old.name!r} is not the hash of the known epoch {old.epoch}, so "
            f"it follows another list; ask the officers which epoch {old.epoch} is right"
        )


def _require_quorum(signed: SignedMembers, asked: MemberList, whose: str) -> tuple[str, ...]:
    signers = signed.signers_among(asked.officers)
    if len(signers) < asked.quorum:
        found = f"{len(signers)} of {whose} officers" + (f" ({', '.join(signers)})" if signers else "")
        raise TooFewSignatures(
            f"epoch {signed.list.epoch} of {signed.list.name!r} is signed by {found}, but {asked.quorum} must "
            "sign it: ask more of them to sign"
        )
    return signers


def _require_distinct(entries: Iterable[tuple[str, str]]) -> None:
    """Refuse a key under two names: one private key could act as two sites, or as a site and an officer."""
    owner = dict[bytes, str]()
    for name, key in entries:
        require_slug(name, "a name in a member list")
        raw = _require_key(key, f"the key of {name!r}")
        if raw in owner:
            raise ValueError(f"{owner[raw]!r} and {name!r} have the same key; each must make its own")
        owner[raw] = name


def _require_key(text: str, what: str) -> bytes:
    raw = public_key_bytes(text, what)
    if public_key_text(raw) != text:  # base64 of 32 bytes has two spare bits, so one key would have four spellings
        raise ValueError(f"{what} is not in canonical base64: encode its {len(raw)} bytes again")
    return raw


def _require_whole(value: int, what: str, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{what} must be a whole number from 1 to {most}, not {value!r:.40}")


def _signed(members: MemberList) -> bytes:
    return _PURPOSE + members.sha256.encode()


def read_members(data: bytes) -> SignedMembers:
    """Read a member list's file. Checks no signature.

    Raises `MalformedMembers` for more than `FILE_BYTES_MAX` bytes, for repeated, unknown or missing JSON keys, and for
    malformed names and public keys.
    """
    if len(data) > FILE_BYTES_MAX:
        raise MalformedMembers(f"this is not a member list: it has more than {FILE_BYTES_MAX} bytes")
    try:
        whole = _object(parsed(data.decode()), "the file", ("list", "signatures"))
        return SignedMembers(_list(whole["list"]), _texts(whole["signatures"], "`signatures`"))
    except ValueError as error:
        raise MalformedMembers(f"this is not a member list: {error}") from error


def members_bytes(signed: SignedMembers) -> bytes:
    """The bytes of a member list's file, indented for people. Raises `ValueError` for more than `FILE_BYTES_MAX`."""
    data = (json.dumps({"list": asdict(signed.list), "signatures": {**signed.signatures}}, indent=2) + "\n").encode()
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"this member list would have {len(data)} bytes, and at most {FILE_BYTES_MAX} are allowed")
    return data


def _list(value: Json) -> MemberList:
    found = _object(value, "`list`", _LIST_KEYS)
    name, epoch, quorum, previous = (found[key] for key in ("name", "epoch", "quorum", "previous"))
    if type(found["format"]) is not int or found["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT}; install the version of umbel that made it")
    if not (isinstance(name, str) and isinstance(previous, str)):
        raise ValueError("`name` and `previous` must be strings")
    if not (isinstance(epoch, int) and isinstance(quorum, int)):
        raise ValueError("`epoch` and `quorum` must be whole numbers")
    members, officers = _texts(found["members"], "`members`"), _texts(found["officers"], "`officers`")
    return MemberList(name, epoch, members, officers, quorum, previous)


def _object(value: Json, what: str, keys: tuple[str, ...]) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object")
    if stray := sorted(value.keys() - set(keys)):
        raise ValueError(f"{what} has an unknown key {stray[0][:63]!r}")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"{what} has no key {missing[0]!r}")
    return value


def _texts(value: Json, what: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object")
    texts = {key: text for key, text in value.items() if isinstance(text, str)}
    if len(texts) < len(value):
        raise ValueError(f"every entry of {what} must be a string")
    return texts
