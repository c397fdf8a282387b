"""The bytes of a member list's file, read strictly and written for people; `members.py` says what they mean."""

import json
from dataclasses import asdict

from umbel.aggregation.canonical import Json, parsed
from umbel.aggregation.trust.members import FORMAT, MalformedMembers, MemberList, SignedMembers

FILE_BYTES_MAX = 1_000_000  # some 9000 members
_LIST_KEYS = ("name", "epoch", "members", "officers", "quorum", "previous", "format")


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
