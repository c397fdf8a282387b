"""The coordinator's side of a secure round: the sum comes out, lies are refused, and a restart changes nothing."""

import hashlib
from collections.abc import Callable

import pytest
import torch

from tests.aggregation.secagg.federation import OPENING, Federation
from umbel.aggregation.secagg.coordinator import SecureCoordinator
from umbel.aggregation.secagg.crypto.derive import Vector
from umbel.aggregation.secagg.errors import BadShare, ChangedMessage, ForgedMessage, MalformedMessage, OutOfTurn, TooFew
from umbel.aggregation.secagg.messages import Unmasking
from umbel.aggregation.secagg.unmasking import Lacking

N = 5
VECTORS = {index: torch.arange(8, dtype=torch.int32) * (index + 1) for index in range(N)}


def agreed(without: int | None = None) -> Federation:
    """A round in which everybody but one has signed who is in the sum."""
    federation = Federation.of(N)
    federation.advertise()
    federation.share()
    federation.hear()
    federation.mask({index: vector for index, vector in VECTORS.items() if index != without})
    federation.agree()
    return federation


def answers(federation: Federation) -> dict[int, bytes]:
    agreements = SecureCoordinator.agreements(federation.agreed)
    return {index: federation.clients[index].reveal(agreements) for index in federation.inputs}


@pytest.mark.parametrize("without", [None, 2])
def test_the_masks_come_off_the_sum_whoever_drops_out_after_sharing(without: int | None) -> None:
    federation = Federation.of(N)
    federation.advertise()
    federation.share()
    federation.hear()
    vectors = {index: vector for index, vector in VECTORS.items() if index != without}
    total = federation.mask(vectors)
    federation.agree()
    federation.reveal().masks(Vector.LEVELS).apply(total)
    assert torch.equal(total, torch.stack(list(vectors.values())).sum(0, dtype=torch.int32))


def test_a_coordinator_that_was_restarted_tells_and_opens_the_same() -> None:
    federation = agreed(without=2)
    first, second = federation.party, federation.party
    assert first.roster() == second.roster()
    assert [first.inbox(index) for index in range(N)] == [second.inbox(index) for index in range(N)]
    assert first.inputs() == second.inputs()
    totals = list[torch.Tensor]()
    revealed = answers(federation)
    for party in (first, second):
        for index, answer in revealed.items():
            party.take_shares(index, answer)
        total = torch.zeros(8, dtype=torch.int32)
        party.open().masks(Vector.LEVELS).apply(total)
        totals.append(total)
    assert torch.equal(*totals)


def test_shares_that_come_twice_are_new_once_and_enough_are_enough() -> None:
    federation = agreed()
    party, revealed = federation.party, answers(federation)
    assert not party.is_enough
    assert party.lacking == Lacking({}, {})
    assert party.answered == frozenset()
    with pytest.raises(TooFew):
        party.open()
    for index, answer in revealed.items():
        assert party.take_shares(index, answer)
        assert not party.take_shares(index, answer)
    assert party.is_enough
    assert party.answered == set(range(N))


@pytest.mark.parametrize(
    "ask",
    [
        lambda party: party.session,
        lambda party: party.roster(),
        lambda party: party.check_shares(0, b""),
        lambda party: party.check_input(0, bytes(32), bytes(64)),
        lambda party: party.check_agreement(0, bytes(64)),
    ],
)
def test_nothing_is_read_before_the_roster_is_closed(ask: Callable[[SecureCoordinator], object]) -> None:
    party = SecureCoordinator(Federation.of(N).context, OPENING)
    assert not party.has_roster
    with pytest.raises(OutOfTurn, match=r"roster|shared"):
        ask(party)


@pytest.mark.parametrize(
    "ask",
    [
        lambda party: party.inbox(0),
        lambda party: party.inputs(),
        lambda party: party.check_input(0, bytes(32), bytes(64)),
        lambda party: party.check_agreement(0, bytes(64)),
        lambda party: party.take_shares(0, Unmasking(0, {}).encode()),
    ],
)
def test_nothing_of_later_phases_is_read_before_it_is_known_who_is_in_them(
    ask: Callable[[SecureCoordinator], object],
) -> None:
    federation = Federation.of(N)
    federation.advertise()
    party = SecureCoordinator(federation.context, OPENING)
    party.close_roster(federation.adverts.values())
    assert not party.has_shares
    with pytest.raises(OutOfTurn):
        ask(party)


def test_keys_in_anothers_name_are_refused() -> None:
    federation = Federation.of(N)
    party = SecureCoordinator(federation.context, OPENING)
    with pytest.raises(ForgedMessage, match="names another client"):
        party.check_keys(1, federation.clients[0].advertise())


def test_a_changed_byte_of_any_message_is_refused_with_its_reason() -> None:
    federation = agreed()
    party = federation.party
    for check, message in (
        (party.check_keys, federation.adverts[0].encode()),
        (party.check_shares, federation.dealt[0].encode()),
        (party.check_agreement, federation.agreed[0]),
    ):
        check(0, message)
        changed = bytearray(message)
        changed[-1] ^= 1
        with pytest.raises(ForgedMessage, match="client-0000"):
            check(0, bytes(changed))
        with pytest.raises((ForgedMessage, MalformedMessage)):
            check(0, message[:-1])


def test_a_masked_input_counts_only_as_its_client_has_signed_it() -> None:
    federation = agreed()
    party, digest = federation.party, hashlib.sha256(b"an update").digest()
    masked = VECTORS[0].clone()
    federation.clients[0].masks(Vector.LEVELS).apply(masked)
    sent = hashlib.sha256(masked.numpy().tobytes()).digest()
    signature = federation.clients[0].sign_input(sent)
    party.check_input(0, sent, signature)
    with pytest.raises(ForgedMessage, match="client-0000"):
        party.check_input(0, digest, signature)
    with pytest.raises(ForgedMessage, match="client-0001"):
        party.check_input(1, sent, signature)


def test_a_false_share_and_a_second_answer_are_refused_and_change_nothing() -> None:
    federation = agreed()
    party, revealed = federation.party, answers(federation)
    answer = Unmasking.decode(revealed[0], 0, N)
    false = {dealer: bytes(32) for dealer in answer.shares}
    with pytest.raises(BadShare, match="client-0000"):
        party.take_shares(0, Unmasking(0, false).encode())
    assert party.answered == frozenset()
    party.take_shares(0, revealed[0])
    fewer = dict(list(answer.shares.items())[1:])
    with pytest.raises(ChangedMessage, match="client-0000"):
        party.take_shares(0, Unmasking(0, fewer).encode())
    assert party.answered == {0}
