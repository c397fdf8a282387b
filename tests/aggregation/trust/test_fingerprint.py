"""Fingerprints: what two people read to each other, one for a key, one for a list."""

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.trust.fingerprint import fingerprint, grouped, members_sha256_of, sha256_of_groups, short_groups


@given(st.binary(min_size=32, max_size=32))
def test_a_keys_fingerprint_is_eight_groups_of_a_labelled_hash(key: bytes) -> None:
    said = fingerprint(key)
    assert re.fullmatch(r"([0-9A-F]{4} ){7}[0-9A-F]{4}", said)
    assert bytes.fromhex(said) == hashlib.sha256(b"umbel key fingerprint 1\n" + key).digest()[:16]


@given(st.binary(min_size=32, max_size=32))
def test_a_hash_that_was_read_out_is_the_hash(digest: bytes) -> None:
    sha256 = digest.hex()
    assert sha256_of_groups(grouped(sha256)) == sha256 == sha256_of_groups(sha256)
    assert len(grouped(sha256).split()) == 16


@pytest.mark.parametrize("text", ["", "7F3A", "0" * 63, "0" * 65, "g" * 64, "٠" * 64])
def test_what_is_no_hash_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        sha256_of_groups(text)


def test_a_hash_in_short_is_the_beginning_of_what_is_read_out() -> None:
    assert short_groups("07f5be6fa2bdb100033fd3b4") == "07F5 BE6F A2BD B100"
    assert short_groups("") == ""


def test_the_setting_of_a_list_takes_both_spellings_and_names_itself() -> None:
    assert members_sha256_of("07F5 BE6F " * 8) == "07f5be6f" * 8 == members_sha256_of("07f5be6f" * 8)
    with pytest.raises(ValueError, match="members_sha256 must be the 64 hex digits that `umbel members show` prints"):
        members_sha256_of("07F5")
