"""Member lists: what a quorum of officers has signed is believed, and nothing else is."""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from tests.federations.consortium import OFFICERS, SITES, after, first_list, public_key, signed, without
from umbel.aggregation.canonical import canonical
from umbel.aggregation.trust.members import (
    OFFICERS_MAX,
    BadOfficerSignature,
    MemberList,
    NotTheSuccessor,
    SignedMembers,
    TooFewSignatures,
    check_first,
    check_successor,
)

FIRST = first_list()
SECOND = without(FIRST, "south")


def test_an_officer_signs_the_hash_of_the_canonical_list() -> None:
    sha256 = hashlib.sha256(canonical(FIRST).encode()).hexdigest()
    assert FIRST.sha256 == sha256
    raw = base64.b64decode(public_key("anna"))
    signature = base64.b64decode(signed(FIRST, "anna").signatures[public_key("anna")])
    Ed25519PublicKey.from_public_bytes(raw).verify(signature, b"umbel member list 1\n" + sha256.encode())


def test_the_order_in_which_a_list_was_written_is_no_part_of_it() -> None:
    backwards = replace(FIRST, members={site: public_key(site) for site in reversed(SITES)})
    assert list(backwards.members) != list(FIRST.members)
    assert backwards.sha256 == FIRST.sha256


@pytest.mark.parametrize("n_signers", range(len(OFFICERS) + 1))
def test_a_quorum_of_its_officers_makes_a_first_list(n_signers: int) -> None:
    for names in combinations(OFFICERS, n_signers):
        if n_signers >= FIRST.quorum:
            assert check_first(signed(FIRST, *names)) == names
        else:
            with pytest.raises(TooFewSignatures, match=f"signed by {n_signers} of its own officers"):
                check_first(signed(FIRST, *names))


def test_strangers_and_members_do_not_count() -> None:
    with pytest.raises(TooFewSignatures, match=r"signed by 1 of its own officers \(anna\), but 2 must"):
        check_first(signed(FIRST, "anna", "mallory", "north"))


def test_one_officer_does_not_count_twice() -> None:
    with pytest.raises(TooFewSignatures):
        check_first(signed(FIRST, "anna", "anna"))


CHANGES: Mapping[str, MemberList] = {
    "another name": replace(FIRST, name="other"),
    "a member more": replace(FIRST, members={**FIRST.members, "mallory": public_key("mallory")}),
    "a member less": replace(FIRST, members={"north": public_key("north")}),
    "another key": replace(FIRST, members={**FIRST.members, "north": public_key("mallory")}),
    "two keys exchanged": replace(
        FIRST, members={**FIRST.members, "north": public_key("south"), "south": public_key("north")}
    ),
    "another officer": replace(FIRST, officers={**FIRST.officers, "mallory": public_key("mallory")}),
    "a lower quorum": replace(FIRST, quorum=1),
    "another epoch": replace(FIRST, epoch=2, previous="0" * 64),
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES.keys())
def test_a_list_that_was_changed_after_it_was_signed_is_refused(changed: MemberList) -> None:
    with pytest.raises(BadOfficerSignature, match="the list was changed after signing"):
        check_first(SignedMembers(changed, signed(FIRST, *OFFICERS).signatures))


@given(st.integers(0, 511))
def test_a_signature_with_any_bit_flipped_is_refused(bit: int) -> None:
    good = signed(FIRST, "anna", "bert")
    raw = bytearray(base64.b64decode(good.signatures[public_key("anna")]))
    raw[bit // 8] ^= 1 << bit % 8
    damaged = {**good.signatures, public_key("anna"): base64.b64encode(raw).decode()}
    with pytest.raises(BadOfficerSignature, match="'anna'"):
        check_first(SignedMembers(FIRST, damaged))


# --- the epoch after ---


def test_the_next_epoch_is_taken_from_a_quorum_of_the_officers_before() -> None:
    assert check_successor(FIRST, signed(SECOND, "bert", "cleo")) == ("bert", "cleo")


@pytest.mark.parametrize("names", [(), ("anna",), ("anna", "mallory"), ("north", "south", "west")])
def test_a_successor_that_too_few_have_signed_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(TooFewSignatures):
        check_successor(FIRST, signed(SECOND, *names))


def test_officers_who_make_themselves_have_no_say() -> None:
    coup = after(FIRST, officers={"mallory": public_key("mallory"), "mole": public_key("mole")})
    with pytest.raises(TooFewSignatures, match="signed by 0 of epoch 1's officers"):
        check_successor(FIRST, signed(coup, "mallory", "mole"))
    with pytest.raises(TooFewSignatures, match="signed by 1 of epoch 1's officers"):
        check_successor(FIRST, signed(coup, "anna", "mallory", "mole"))


def test_a_lower_quorum_needs_the_quorum_before() -> None:
    lowered = after(FIRST, quorum=1)
    with pytest.raises(TooFewSignatures):
        check_successor(FIRST, signed(lowered, "anna"))
    check_successor(FIRST, signed(lowered, "anna", "bert"))


def test_new_officers_must_show_that_they_are_there() -> None:
    handed_over = after(FIRST, officers={"dora": public_key("dora"), "emil": public_key("emil")})
    with pytest.raises(TooFewSignatures, match="of its own officers"):
        check_successor(FIRST, signed(handed_over, "anna", "bert", "dora"))
    assert check_successor(FIRST, signed(handed_over, "anna", "bert", "dora", "emil")) == ("anna", "bert")


def test_an_officer_who_changes_keys_signs_with_both() -> None:
    rekeyed = after(FIRST, officers={"anna": public_key("anna, new"), "bert": public_key("bert")})
    with pytest.raises(TooFewSignatures, match="of epoch 1's officers"):
        check_successor(FIRST, signed(rekeyed, "anna, new", "bert"))
    check_successor(FIRST, signed(rekeyed, "anna", "anna, new", "bert"))


def test_an_officer_who_was_removed_has_no_say_in_the_epoch_after() -> None:
    second = after(FIRST, officers={"anna": public_key("anna"), "bert": public_key("bert")})
    check_successor(FIRST, signed(second, "anna", "bert"))
    third = without(second, "west")
    with pytest.raises(TooFewSignatures):
        check_successor(second, signed(third, "anna", "cleo"))


NOT_NEXT: Mapping[str, MemberList] = {
    "the same epoch": FIRST,
    "the same epoch, changed": replace(FIRST, members={"north": public_key("north")}),
    "an epoch too far": replace(SECOND, epoch=3),
    "of another list": replace(SECOND, name="other"),
    "after another list": replace(SECOND, previous="0" * 64),
}


@pytest.mark.parametrize("shown", NOT_NEXT.values(), ids=NOT_NEXT.keys())
def test_what_every_officer_has_signed_and_does_not_follow_is_refused(shown: MemberList) -> None:
    with pytest.raises(NotTheSuccessor):
        check_successor(FIRST, signed(shown, *OFFICERS))


def test_an_older_epoch_is_refused() -> None:
    with pytest.raises(
        NotTheSuccessor, match="the known list is epoch 2 of 'pilot', so the next must be epoch 3, not 1"
    ):
        check_successor(SECOND, signed(FIRST, *OFFICERS))


@given(st.data())
def test_a_chain_of_changes_is_followed_and_no_link_may_be_left_out(data: st.DataObject) -> None:
    chain = [FIRST]
    for _ in range(data.draw(st.integers(2, 5))):
        sites = data.draw(st.sets(st.sampled_from([*SITES, "east", "centre"])))
        chain.append(after(chain[-1], members={site: public_key(site) for site in sites}))
    for old, new in pairwise(chain):
        check_successor(old, signed(new, *data.draw(st.permutations(OFFICERS))[:2]))
    first, second = sorted(data.draw(st.sets(st.integers(0, len(chain) - 1), min_size=2, max_size=2)))
    if second > first + 1:
        with pytest.raises(NotTheSuccessor):
            check_successor(chain[first], signed(chain[second], *OFFICERS))
    with pytest.raises(NotTheSuccessor):
        check_successor(chain[second], signed(chain[first], *OFFICERS))


# --- what no list may hold ---


@pytest.mark.parametrize("taken", ["north", "anna"])
def test_a_key_stands_under_one_name_only(taken: str) -> None:
    sybil = {"sybil": public_key(taken)}
    with pytest.raises(ValueError, match="have the same key; each must make its own"):
        replace(FIRST, members={**FIRST.members, **sybil})
    with pytest.raises(ValueError, match="have the same key; each must make its own"):
        replace(FIRST, officers={**FIRST.officers, **sybil})


def _respelled(key: str) -> str:
    """The same 32 bytes in other base64: two bits of its last digit say nothing."""
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    return f"{key[:42]}{digits[digits.index(key[42]) ^ 1]}="


def test_a_second_spelling_of_a_key_is_refused() -> None:
    alias = _respelled(public_key("north"))
    assert alias != public_key("north")
    assert base64.b64decode(alias) == base64.b64decode(public_key("north"))
    with pytest.raises(ValueError, match="not in canonical base64"):
        replace(FIRST, members={**FIRST.members, "sybil": alias})
    with pytest.raises(ValueError, match="not in canonical base64"):
        SignedMembers(FIRST, {alias: "A" * 86 + "=="})


BAD_KEYS = {
    "small order": base64.b64encode((1).to_bytes(32, "little")).decode(),
    "not below the prime": base64.b64encode(((1 << 255) - 18).to_bytes(32, "little")).decode(),
    "short": base64.b64encode(bytes(31)).decode(),
    "no base64": "north's key",
    "empty": "",
}


@pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS.keys())
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="the key of 'east'"):
        replace(FIRST, members={"east": key})


@pytest.mark.parametrize("name", ["", "North", "a" * 64, "../north", "nоrth", "north\n", "north "])
def test_a_name_must_be_one_that_looks_like_no_other(name: str) -> None:
    with pytest.raises(ValueError, match="must be 1 to 63"):
        replace(FIRST, members={name: public_key("north")})
    with pytest.raises(ValueError, match="must be 1 to 63"):
        replace(FIRST, name=name)


BAD_FACTS: Mapping[str, tuple[dict[str, object], str]] = {
    "epoch 0": ({"epoch": 0}, "epoch must be a whole number"),
    "epoch true": ({"epoch": True}, "epoch must be a whole number"),
    "quorum 0": ({"quorum": 0}, "quorum must be a whole number"),
    "quorum true": ({"quorum": True}, "quorum must be a whole number"),
    "a first epoch that follows": ({"previous": "0" * 64}, "no epoch before it"),
    "a second epoch that does not": ({"epoch": 2}, "`previous`, the SHA-256"),
    "previous is no hash": ({"epoch": 2, "previous": "A" * 64}, "`previous`, the SHA-256"),
    "too many officers": ({"officers": {f"o{i}": public_key(f"o{i}") for i in range(OFFICERS_MAX + 1)}}, "at most 100"),
}


@pytest.mark.parametrize(("facts", "sentence"), BAD_FACTS.values(), ids=BAD_FACTS.keys())
def test_facts_that_make_no_list_are_refused(facts: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(FIRST, **facts)  # type: ignore[arg-type]  # that is what is tested


def test_a_quorum_beyond_the_officers_is_never_reached() -> None:
    with pytest.raises(TooFewSignatures):
        check_first(signed(first_list(quorum=4), *OFFICERS, "mallory"))
    with pytest.raises(TooFewSignatures):
        check_first(signed(first_list(officers=()), *OFFICERS))


@pytest.mark.parametrize(
    ("members", "sentences"),
    [
        (FIRST, ()),
        (first_list(quorum=1), ("one officer alone", "two halves")),
        (first_list(officers=("anna", "bert", "cleo", "dora")), ("two halves",)),
        (first_list(quorum=4), ("cannot be reached",)),
        (first_list(sites=("north", "south")), ("at least 3 members",)),
    ],
    ids=["none", "quorum of one", "half", "too few officers", "too few members"],
)
def test_a_careful_officer_is_told(members: MemberList, sentences: tuple[str, ...]) -> None:
    found = members.concerns()
    assert len(found) == len(sentences)
    assert all(sentence in concern for sentence, concern in zip(sentences, found, strict=True))
