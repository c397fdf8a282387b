"""Attacks on who is said to be in a sum: sets that cannot be, and several sums at once."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.aggregation.secagg.attacks.adversary import (
    agreed,
    corrupt_signature,
    heard,
    in_the_sum,
    masked,
    opened,
    pair_masks_of,
    require_silent,
    revealed,
    secrets_of,
    self_mask_of,
    shares_for,
    sum_of,
)
from tests.aggregation.secagg.federation import Federation, context_of, identity
from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.crypto.signing import Label, sign
from umbel.aggregation.secagg.errors import Disagreement, ForgedMessage, MalformedMessage, TooFew
from umbel.aggregation.secagg.messages import encode_indices
from umbel.aggregation.secagg.session import Session

VICTIM = 0
Found = TypeVar("Found")


# --- a set that cannot be ---------------------------------------------------------------------------------------------


def u32s(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


@pytest.mark.parametrize(
    ("inputs", "refusal", "sentence"),
    [
        (encode_indices([1, 2, 3, 4]), Disagreement, "leaves this client out"),
        (encode_indices([0, 1, 2, 3, 5]), Disagreement, "contains a client that did not share its keys"),
        (u32s(5, 0, 1, 2, 3, 6), MalformedMessage, "lists client 6, but the cohort has 6 clients"),
        (u32s(6, 0, 1, 1, 2, 3, 4), MalformedMessage, "each once"),
        (u32s(5, 0, 1, 2, 4, 3), MalformedMessage, "ascending"),
        (u32s(6, 0, 1, 2, 3, 4), MalformedMessage, "28 bytes, not 24"),
        (u32s(0xFFFFFFFF, 0, 1, 2, 3, 4), MalformedMessage, "states 4294967295 entries, but the cohort has only"),
        (b"", MalformedMessage, "must begin with a count"),
        (encode_indices([0, 1, 2, 3]), TooFew, "4 clients are in the sum; at least 5 are needed"),
        (encode_indices([0]), TooFew, "1 client is in the sum; at least 5 are needed"),
        (encode_indices([]), Disagreement, "leaves this client out"),
    ],
    ids=[
        "without me",
        "dead already",
        "unknown",
        "twice",
        "order",
        "short",
        "count",
        "empty",
        "t-1",
        "only me",
        "nobody",
    ],
)
def test_a_sum_that_cannot_be_ends_the_round(inputs: bytes, refusal: type[Exception], sentence: str) -> None:
    federation = Federation.of(6)
    federation.advertise()
    federation.share(without=[5])
    federation.hear()
    victim = federation.clients[VICTIM]
    masked(victim)
    with pytest.raises(refusal, match=sentence):
        victim.agree(inputs)
    require_silent(victim)


def test_a_sum_of_fewer_than_the_minimum_ends_the_round() -> None:
    victim = heard(6, minimum=6).clients[VICTIM]
    masked(victim)
    with pytest.raises(TooFew, match="5 clients are in the sum; at least 6 are needed"):
        agreed(victim, range(5))


@pytest.mark.parametrize(
    ("shared", "refusal"),
    [
        ([1, 2, 3, 4, 5], "leaves this client out"),
        ([0, 1, 2, 3, 4, 6], "not in the roster"),
        ([0, 1, 2, 3], "only 4 "),
    ],
    ids=["without me", "not advertised", "t-1"],
)
def test_an_inbox_that_cannot_be_ends_the_round(shared: list[int], refusal: str) -> None:
    federation = Federation.of(7)
    federation.advertise(without=[6])
    federation.share()
    known = {dealer: federation.dealt[dealer] for dealer in shared if dealer not in (VICTIM, 6)}
    inbox = encode_indices(shared) + b"".join(known[dealer].dealt[VICTIM].encode() for dealer in sorted(known))
    with pytest.raises((Disagreement, TooFew), match=refusal):
        federation.clients[VICTIM].hear(inbox)
    require_silent(federation.clients[VICTIM])


# --- several sums -----------------------------------------------------------------------------------------------------

CORRUPT = (6, 7, 8)
SAID_DEAD: Mapping[int, tuple[int, ...]] = {0: (3, 4), 1: (4, 5), 2: (3, 5), 3: (4, 5), 4: (3, 5), 5: (3, 4)}


def many_views(federation: Federation) -> Tensor:
    """Each honest client of nine is told another sum, of seven: the sum of only three of them, where t - c are four.

    Clients 3, 4 and 5 are each said to be dead by four honest holders, and by the three corrupt ones: that is t = 7. So
    their masks come off 0, 1 and 2, which everybody says are alive.
    """
    session, context, shared = federation.session, federation.context, federation.shared
    secrets = {index: secrets_of(context, index) for index in CORRUPT}
    vectors = {index: masked(federation.clients[index]) for index in SAID_DEAD}
    views = {index: [one for one in shared if one not in dead] for index, dead in SAID_DEAD.items()}
    signatures = {one: corrupt_signature(session, one, shared, shared) for one in CORRUPT}
    signatures |= {index: agreed(federation.clients[index], view) for index, view in views.items()}
    answers = {i: revealed(federation.clients[i], {j: signatures[j] for j in view}) for i, view in views.items()}

    def secret(dealer: int, *, alive: bool) -> bytes:
        said = {holder: answers[holder][dealer] for holder in views if (dealer in views[holder]) is alive}
        pairs = {one: shares_for(federation.dealt[dealer], session, one, secrets[one]) for one in CORRUPT}
        return opened(session, said | {one: pair[0 if alive else 1] for one, pair in pairs.items()})

    alive = (0, 1, 2)
    total = torch.stack([vectors[index] for index in alive]).sum(0, dtype=torch.int32)
    for index in alive:
        total -= self_mask_of(session, index, secret(index, alive=True))
    keys = {index: KeyPair(secret(index, alive=False)) for index in (3, 4, 5)}
    for gone, pair in (keys | {one: secrets[one].mask for one in CORRUPT}).items():
        total += pair_masks_of(session, gone, pair, alive)
    return total


def test_clients_that_are_told_different_sums_reveal_nothing() -> None:
    federation = heard(9)
    with pytest.raises(ForgedMessage, match="is not signed with the identity key of client-"):
        many_views(federation)
    require_silent(federation.clients[VICTIM])


def test_without_the_consistency_check_the_sum_of_a_few_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.aggregation.secagg.client.check_signature", lambda *_: None)
    assert torch.equal(many_views(heard(9)), sum_of([0, 1, 2]))


def test_fewer_signatures_than_the_threshold_open_nothing() -> None:
    federation = in_the_sum(6, range(6))
    with pytest.raises(TooFew, match=r"only 4 clients .*; 5 are needed"):
        revealed(federation.clients[VICTIM], {index: federation.agreed[index] for index in range(4)})
    require_silent(federation.clients[VICTIM])


def test_signatures_of_clients_that_are_not_in_the_sum_do_not_count() -> None:
    federation = heard(6)
    inputs = range(5)
    for index in inputs:
        masked(federation.clients[index])
    signatures = {index: agreed(federation.clients[index], inputs) for index in (0, 1, 2, 3)}
    signatures[5] = corrupt_signature(federation.session, 5, federation.shared, inputs)
    with pytest.raises(TooFew, match="only 4 clients"):
        revealed(federation.clients[VICTIM], signatures)


def test_one_members_signature_is_not_another_members() -> None:
    federation = in_the_sum(6, range(6))
    signatures = {**federation.agreed, 4: federation.agreed[3]}
    with pytest.raises(ForgedMessage, match="client-0004"):
        revealed(federation.clients[VICTIM], signatures)


@pytest.mark.parametrize("label", [label for label in Label if label is not Label.CONSISTENCY])
def test_a_signature_of_another_kind_of_message_is_no_agreement(label: Label) -> None:
    federation = in_the_sum(6, range(6))
    payload = federation.session.consistency_payload(federation.shared, federation.shared)
    signature = sign(identity("client-0003"), label, federation.session.digest, payload)
    with pytest.raises(ForgedMessage, match="client-0003"):
        revealed(federation.clients[VICTIM], {**federation.agreed, 3: signature})


def other_shared(federation: Federation) -> bytes:
    """Client 3's word on the same U3, of another U2."""
    return corrupt_signature(federation.session, 3, range(6), range(6))


def other_inputs(federation: Federation) -> bytes:
    return corrupt_signature(federation.session, 3, range(7), range(5))


def exchanged(federation: Federation) -> bytes:
    return corrupt_signature(federation.session, 3, range(6), range(7))


def of_another_round(federation: Federation) -> bytes:
    session = Session(context_of(7, round=2), federation.session.opening, federation.session.adverts)
    return corrupt_signature(session, 3, range(7), range(6))


def of_another_roster(federation: Federation) -> bytes:
    adverts = dict(federation.session.adverts)
    adverts[6] = dataclasses.replace(adverts[6], signature=bytes(64))
    session = Session(federation.context, federation.session.opening, adverts)
    return corrupt_signature(session, 3, range(7), range(6))


@pytest.mark.parametrize("signed", [other_shared, other_inputs, exchanged, of_another_round, of_another_roster])
def test_an_agreement_on_something_else_is_none(signed: Callable[[Federation], bytes]) -> None:
    """By the member itself, properly signed."""
    federation = in_the_sum(7, range(6))
    with pytest.raises(ForgedMessage, match="client-0003"):
        revealed(federation.clients[VICTIM], {**federation.agreed, 3: signed(federation)})
    require_silent(federation.clients[VICTIM])
