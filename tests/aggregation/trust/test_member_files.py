"""The bytes of a member list: one list, or a refusal; never anything else."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.federations.consortium import OFFICERS, after, first_list, public_key, signed
from umbel.aggregation.canonical import canonical
from umbel.aggregation.trust.members import (
    FILE_BYTES_MAX,
    MalformedMembers,
    MemberList,
    SignedMembers,
    check_first,
    members_bytes,
    read_members,
)

WHOLE = signed(first_list(), *OFFICERS)
TEXT = members_bytes(WHOLE).decode()


@pytest.mark.parametrize("whole", [WHOLE, signed(after(WHOLE.list), "anna"), SignedMembers(WHOLE.list, {})])
def test_what_is_written_is_read(whole: SignedMembers) -> None:
    assert read_members(members_bytes(whole)) == whole


def test_another_spelling_of_the_same_list_is_the_same_list() -> None:
    spelled = canonical(json.loads(TEXT)).encode()
    assert spelled != TEXT.encode()
    assert check_first(read_members(spelled)) == OFFICERS


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file after `change` of what it says."""
    found = json.loads(TEXT)
    change(found)
    return json.dumps(found).encode()


MALFORMED = {
    "nothing": (b"", "Expecting value"),
    "no UTF-8": (b"\xff", "utf-8"),
    "a byte order mark": (b"\xef\xbb\xbf" + TEXT.encode(), "this is not a member list"),
    "two files": (TEXT.encode() * 2, "Extra data"),
    "an array": (b"[]", "the file must be a JSON object"),
    "nested deeply": (b"[" * 200_000, "nested too deeply"),
    "NaN": (TEXT.replace('"epoch": 1', '"epoch": NaN').encode(), "JSON has no NaN"),
    "a list said twice": (TEXT.replace('"signatures"', '"list"').encode(), "says a key twice"),
    "a member said twice": (TEXT.replace('"south"', '"north"').encode(), "says a key twice"),
    "an epoch said twice": (TEXT.replace('"epoch": 1', '"epoch": 1, "epoch": 2').encode(), "says a key twice"),
    "an escape that spells a key again": (
        TEXT.replace('"epoch": 1', '"epoch": 1, "\\u0065poch": 2').encode(),
        "says a key twice",
    ),
    "an unknown key": (changed(lambda found: found.update(more=1)), "unknown key 'more'"),
    "an unknown key of the list": (changed(lambda found: found["list"].update(expires=1)), "unknown key 'expires'"),
    "no signatures": (changed(lambda found: found.pop("signatures")), "has no key 'signatures'"),
    "no quorum": (changed(lambda found: found["list"].pop("quorum")), "has no key 'quorum'"),
    "another format": (changed(lambda found: found["list"].update(format=2)), "format is not 1"),
    "format true": (changed(lambda found: found["list"].update(format=True)), "format is not 1"),
    "format 1.0": (changed(lambda found: found["list"].update(format=1.0)), "format is not 1"),
    "an epoch of text": (changed(lambda found: found["list"].update(epoch="1")), "whole numbers"),
    "epoch 1.0": (changed(lambda found: found["list"].update(epoch=1.0)), "whole numbers"),
    "epoch true": (changed(lambda found: found["list"].update(epoch=True)), "whole number"),
    "an epoch beyond 2^53": (changed(lambda found: found["list"].update(epoch=1 << 53)), "whole number"),
    "quorum 0": (changed(lambda found: found["list"].update(quorum=0)), "whole number"),
    "a name that is none": (changed(lambda found: found["list"].update(name=None)), "must be strings"),
    "members in an array": (changed(lambda found: found["list"].update(members=[])), "`members` must be a JSON object"),
    "officers in an array": (
        changed(lambda found: found["list"].update(officers=[])),
        "`officers` must be a JSON object",
    ),
    "a key that is none": (changed(lambda found: found["list"]["members"].update(north=1)), "must be a string"),
    "half a surrogate pair": (
        changed(lambda found: found["list"]["members"].update({"\ud800": public_key("east")})),
        "without the other half of its pair",
    ),
    "a signature of another length": (
        changed(lambda found: found["signatures"].update({public_key("anna"): "AAAA"})),
        "64 bytes",
    ),
    "signatures by name": (
        changed(lambda found: found.update(signatures={"anna": "A" * 86 + "=="})),
        "a signer's key in `signatures`",
    ),
    "very many signatures": (
        changed(
            lambda found: found.update(signatures={public_key(f"stranger {i}"): "A" * 86 + "==" for i in range(201)})
        ),
        "at most 200 signatures",
    ),
}


@pytest.mark.parametrize(("data", "sentence"), MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_not_exactly_a_list_is_refused(data: bytes, sentence: str) -> None:
    with pytest.raises(MalformedMembers, match=sentence):
        read_members(data)


def test_a_huge_file_is_refused_before_it_is_read() -> None:
    blank = b" " * (FILE_BYTES_MAX - len(TEXT))
    assert read_members(TEXT.encode() + blank) == WHOLE
    with pytest.raises(MalformedMembers, match="more than 1000000 bytes"):
        read_members(TEXT.encode() + blank + b" ")


def test_a_list_that_no_site_would_read_is_not_written() -> None:
    sites = {f"site-{number:05}{'x' * 50}": public_key(str(number)) for number in range(8500)}
    with pytest.raises(ValueError, match="at most 1000000 are allowed"):
        members_bytes(SignedMembers(MemberList("pilot", 1, sites, {}, 1), {}))


@given(st.binary())
def test_any_bytes_are_a_list_or_refused(data: bytes) -> None:
    with pytest.raises(MalformedMembers):
        read_members(data)


@given(st.data())
def test_a_file_with_any_byte_changed_is_refused_or_no_longer_signed_or_the_same(data: st.DataObject) -> None:
    raw = bytearray(TEXT.encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_members(bytes(raw))
        signers = check_first(found)
    except ValueError:
        return
    assert found.list == WHOLE.list, "nobody has signed another list"
    assert len(signers) >= 2
