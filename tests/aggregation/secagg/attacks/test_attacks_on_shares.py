"""Attacks on shares: on their way, by who deals them, and by who reveals them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.aggregation.secagg.attacks.adversary import (
    advertised,
    heard,
    inbox_of,
    masked,
    secret_vector,
    secrets_of,
    shares_for,
    sum_of,
)
from tests.aggregation.secagg.federation import Federation
from umbel.aggregation.secagg.crypto.derive import Vector
from umbel.aggregation.secagg.crypto.sealed import SEALED_BYTES
from umbel.aggregation.secagg.crypto.shamir import SHARE_BYTES, split
from umbel.aggregation.secagg.errors import (
    BadShare,
    ChangedMessage,
    CheatingDealer,
    MalformedMessage,
    SecAggError,
    TooFew,
)
from umbel.aggregation.secagg.messages import Dealt, ShareKeys, Unmasking, encode_agreements
from umbel.aggregation.secagg.unmasking import Lacking, Unmasker

VICTIM = 0
DEALER = 2


def shared(n: int) -> Federation:
    federation = advertised(n)
    federation.share()
    return federation


# --- on their way -----------------------------------------------------------------------------------------------------


def with_sealed(dealt: Dealt, sealed: bytes) -> Dealt:
    return replace(dealt, sealed=sealed)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def swapped(federation: Federation, dealt: Dealt) -> Dealt:
    """Another dealer's shares for the same holder, with its commitments."""
    return federation.dealt[3].dealt[VICTIM]


def misrouted(federation: Federation, dealt: Dealt) -> Dealt:
    """The same dealer's shares for another holder, with their commitments."""
    return federation.dealt[DEALER].dealt[3]


def reflected(federation: Federation, dealt: Dealt) -> Dealt:
    """What the holder itself has sealed for the dealer."""
    return federation.dealt[VICTIM].dealt[DEALER]


def of_another_attempt(federation: Federation, dealt: Dealt) -> Dealt:
    other = Federation.of(5, attempt=2)
    other.advertise()
    other.share()
    return other.dealt[DEALER].dealt[VICTIM]


def other_commitments(federation: Federation, dealt: Dealt) -> Dealt:
    return with_sealed(federation.dealt[3].dealt[VICTIM], dealt.sealed)


def exchanged_commitments(federation: Federation, dealt: Dealt) -> Dealt:
    return Dealt(dealt.key_commitment, dealt.self_mask_commitment, dealt.sealed)


def zeros(federation: Federation, dealt: Dealt) -> Dealt:
    return with_sealed(dealt, bytes(len(dealt.sealed)))


def flips(at: int) -> Callable[[Federation, Dealt], Dealt]:
    return lambda _, dealt: with_sealed(dealt, flipped(dealt.sealed, at))


CHANGES: dict[str, Callable[[Federation, Dealt], Dealt]] = {
    "swapped": swapped,
    "misrouted": misrouted,
    "reflected": reflected,
    "of another attempt": of_another_attempt,
    "other commitments": other_commitments,
    "exchanged commitments": exchanged_commitments,
    "zeros": zeros,
    "first bit": flips(0),
    "second share": flips(SHARE_BYTES),
    "tag": flips(SEALED_BYTES - 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_shares_that_were_changed_on_their_way_are_not_held(change: Callable[[Federation, Dealt], Dealt]) -> None:
    """The client names their dealer, goes on, and reveals no share of it: the others' still make the sum."""
    federation = shared(5)
    own = {index: message for index, message in federation.dealt.items() if index != VICTIM}
    message = own[DEALER]
    false = replace(message, dealt={**message.dealt, VICTIM: change(federation, message.dealt[VICTIM])})
    for index in federation.shared[1:]:
        federation.clients[index].hear(federation.inbox(index))
    victim = federation.clients[VICTIM]
    victim.hear(inbox_of(federation, VICTIM, federation.shared, {**own, DEALER: false}))
    [complaint] = victim.complaints
    assert complaint.startswith("client-0002: ")

    total = federation.mask({index: secret_vector(index) for index in range(5)})
    federation.agree()
    answer = victim.reveal(encode_agreements(federation.agreed))
    assert Unmasking.decode(answer, VICTIM, 5).shares.keys() == {0, 1, 3, 4}
    federation.reveal().masks(Vector.LEVELS).apply(total)
    assert torch.equal(total, sum_of(range(5)))


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda _: b""])
def test_an_inbox_of_another_length_is_refused(change: Callable[[bytes], bytes]) -> None:
    federation = shared(5)
    with pytest.raises(MalformedMessage):
        federation.clients[VICTIM].hear(change(federation.inbox(VICTIM)))


def test_an_inbox_that_claims_somebody_who_dealt_nothing_opens_no_sum() -> None:
    """Nothing is shown by it: the key of a client that never shared cannot be made, so the sum stays masked."""
    federation = advertised(6)
    federation.share(without=[5])
    nothing = ShareKeys(5, bytes(32), dict.fromkeys(range(6), Dealt(bytes(16), bytes(16), bytes(SEALED_BYTES))), b"")
    for index, client in federation.clients.items():
        if index != 5:
            dealt = {one: message for one, message in federation.dealt.items() if one != index}
            client.hear(inbox_of(federation, index, range(6), {**dealt, 5: nothing}))
            assert [one[:11] for one in client.complaints] == ["client-0005"]
            masked(client)
    federation.inputs = (0, 1, 2, 3, 4)
    federation.agree()
    unmasker = Unmasker(federation.session, tuple(range(6)), federation.inputs, {**federation.dealt, 5: nothing})
    for index in federation.inputs:
        unmasker.take(
            Unmasking.decode(federation.clients[index].reveal(encode_agreements(federation.agreed)), index, 6)
        )
    assert not unmasker.is_enough
    with pytest.raises(TooFew, match="0 shares of client-0005's secret"):
        unmasker.open()


# --- by who deals them ------------------------------------------------------------------------------------------------


def test_shares_that_their_dealer_has_not_signed_are_refused() -> None:
    federation = shared(5)
    message = federation.dealt[DEALER]
    with pytest.raises(SecAggError, match="client-0002 is not signed"):
        federation.session.check_shares(replace(message, self_mask_commitment=bytes(32)))
    with pytest.raises(SecAggError, match="client-0003 is not signed"):
        federation.session.check_shares(replace(message, index=3))


@pytest.mark.parametrize("is_gone", [False, True], ids=["in the sum", "gone"])
def test_a_dealer_whose_good_shares_make_no_secret_is_named(monkeypatch: pytest.MonkeyPatch, *, is_gone: bool) -> None:
    """It commits to every share, so each holder takes its own; together they lie on no polynomial of its secret."""
    federation = advertised(5)
    with monkeypatch.context() as patch:
        patch.setattr("umbel.aggregation.secagg.client.split", lambda _, *rest: split(bytes(32), *rest))
        message = federation.clients[DEALER].share(federation.roster)
    federation.share(without=[DEALER])
    federation.dealt[DEALER] = ShareKeys.decode(message, DEALER, federation.session.neighbours(DEALER))
    federation.hear()
    assert not any(client.complaints for client in federation.clients.values())
    inputs = [index for index in range(5) if not (is_gone and index == DEALER)]
    federation.mask({index: secret_vector(index) for index in inputs})
    federation.agree()
    with pytest.raises(CheatingDealer, match="client-0002 has dealt wrong shares") as caught:
        federation.reveal()
    assert caught.value.dealers == {DEALER: "client-0002"}


def test_all_dealers_whose_good_shares_make_no_secret_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named one at a time, each would spoil an attempt of its own."""
    federation, cheating = advertised(5), (1, 3)
    with monkeypatch.context() as patch:
        patch.setattr("umbel.aggregation.secagg.client.split", lambda _, *rest: split(bytes(32), *rest))
        messages = {index: federation.clients[index].share(federation.roster) for index in cheating}
    federation.share(without=cheating)
    for index, message in messages.items():
        federation.dealt[index] = ShareKeys.decode(message, index, federation.session.neighbours(index))
    federation.hear()
    federation.mask({index: secret_vector(index) for index in range(5)})
    federation.agree()
    with pytest.raises(CheatingDealer, match="client-0001, client-0003 have dealt wrong shares") as caught:
        federation.reveal()
    assert caught.value.dealers == {1: "client-0001", 3: "client-0003"}


@pytest.mark.parametrize("is_gone", [False, True], ids=["in the sum", "gone"])
def test_a_dealer_whose_shares_open_for_nobody_is_named(*, is_gone: bool) -> None:
    """It spoils the round, and everybody sees that it was it."""
    federation = shared(5)
    message = federation.dealt[DEALER]
    false = {i: with_sealed(one, bytes(len(one.sealed))) for i, one in message.dealt.items()}
    federation.dealt[DEALER] = replace(message, dealt=false)
    federation.hear()
    complaints = [client.complaints for index, client in federation.clients.items() if index != DEALER]
    assert [[one[:11] for one in some] for some in complaints] == [["client-0002"]] * 4
    federation.mask({index: secret_vector(index) for index in range(5) if not (is_gone and index == DEALER)})
    federation.agree()
    found_words = "0 shares of client-0002's secret were" if is_gone else "1 share of client-0002's secret was"
    with pytest.raises(TooFew, match=f"only {found_words} revealed; 4 are needed"):
        federation.reveal()
    unmasker, agreements = federation.unmasker(), encode_agreements(federation.agreed)
    for n_answered, index in enumerate(federation.inputs, start=1):
        unmasker.take(Unmasking.decode(federation.clients[index].reveal(agreements), index, 5))
        others = tuple(sorted(unmasker.answered - {DEALER}))
        found = Lacking({DEALER: others} if n_answered >= 4 else {}, {})
        assert unmasker.lacking == found, "before, it may be the silent"
    assert not unmasker.is_enough


def test_a_complaint_holds_no_secret() -> None:
    federation = shared(5)
    message = federation.dealt[DEALER]
    false = replace(message, dealt=dict.fromkeys(message.dealt, other_commitments(federation, message.dealt[VICTIM])))
    own = {index: one for index, one in federation.dealt.items() if index != VICTIM}
    federation.clients[VICTIM].hear(inbox_of(federation, VICTIM, federation.shared, {**own, DEALER: false}))
    assert federation.clients[VICTIM].complaints == (
        "client-0002: the share does not match the commitment of client 2 for client 0",
    )


# --- by who reveals them ----------------------------------------------------------------------------------------------


def answered(gone: int = 4) -> tuple[Federation, Unmasker, dict[int, Unmasking]]:
    """All but one of six are in the sum, and have answered."""
    federation = heard(6)
    federation.mask({index: secret_vector(index) for index in range(6) if index != gone})
    federation.agree()
    message = encode_agreements(federation.agreed)
    answers = {i: Unmasking.decode(federation.clients[i].reveal(message), i, 6) for i in federation.inputs}
    return federation, federation.unmasker(), answers


def other_kind(federation: Federation, answers: dict[int, Unmasking], dealer: int) -> bytes:
    """The share of the dealer's other secret."""
    pair = shares_for(federation.dealt[dealer], federation.session, 3, secrets_of(federation.context, 3))
    return pair[0 if dealer == 4 else 1]


def other_holders(federation: Federation, answers: dict[int, Unmasking], dealer: int) -> bytes:
    return answers[2].shares[dealer]


def other_dealers(federation: Federation, answers: dict[int, Unmasking], dealer: int) -> bytes:
    return answers[3].shares[2]


def off_by_one(federation: Federation, answers: dict[int, Unmasking], dealer: int) -> bytes:
    return flipped(answers[3].shares[dealer], 0)


def no_number(federation: Federation, answers: dict[int, Unmasking], dealer: int) -> bytes:
    return b"\xff" * SHARE_BYTES


@pytest.mark.parametrize("dealer", [1, 4], ids=["in the sum", "gone"])
@pytest.mark.parametrize("false", [other_kind, other_holders, other_dealers, off_by_one, no_number])
def test_who_reveals_a_wrong_share_is_named_and_the_sum_opens_without_it(
    false: Callable[[Federation, dict[int, Unmasking], int], bytes], dealer: int
) -> None:
    federation, unmasker, answers = answered()
    wrong = replace(answers[3], shares={**answers[3].shares, dealer: false(federation, answers, dealer)})
    sentence = f"client-0003 revealed another share than the one that client-000{dealer} dealt to it"
    with pytest.raises(BadShare, match=sentence):
        unmasker.take(wrong)
    assert unmasker.answered == set(), "nothing of it was taken"
    for index in (0, 1, 2, 5):
        unmasker.take(answers[index])
    assert not unmasker.is_enough, "t is five"
    unmasker.take(answers[3])
    unmasker.open()


def test_who_is_not_in_the_sum_has_nothing_to_reveal() -> None:
    _, unmasker, answers = answered()
    with pytest.raises(SecAggError, match="client-0004 is not in the sum"):
        unmasker.take(replace(answers[3], index=4))


def test_a_share_that_was_not_asked_for_is_refused() -> None:
    federation = advertised(6)
    federation.share(without=[5])
    federation.hear()
    federation.mask({index: secret_vector(index) for index in range(5)})
    federation.agree()
    unmasker = federation.unmasker()
    answer = federation.clients[3].reveal(encode_agreements(federation.agreed))
    message = Unmasking.decode(answer, 3, 6)
    with pytest.raises(
        SecAggError, match="client-0003 revealed a share of the secret of client-0005, which it was not asked for"
    ):
        unmasker.take(replace(message, shares={**message.shares, 5: bytes(33)}))


@pytest.mark.parametrize("is_less", [False, True], ids=["another share", "one share less"])
def test_another_answer_of_the_same_client_is_refused_and_changes_nothing(*, is_less: bool) -> None:
    """Two that are each in order: of a share more, or less, than before."""
    _, unmasker, answers = answered()
    less = replace(answers[3], shares={dealer: share for dealer, share in answers[3].shares.items() if dealer != 1})
    first, second = (answers[3], less) if is_less else (less, answers[3])
    unmasker.take(first)
    with pytest.raises(ChangedMessage, match="client-0003 has already revealed different shares"):
        unmasker.take(second)
    unmasker.take(first)
    for index in (0, 1, 2, 5):
        unmasker.take(answers[index])
    assert unmasker.is_enough is is_less, "t is five: the first one counts"


# --- whose doing it is that shares are missing ------------------------------------------------------------------------


def ten_answers() -> tuple[Unmasker, dict[int, Unmasking]]:
    """What ten clients would reveal, of whom seven are enough. So a dealer is named where four left its share out."""
    federation = heard(10)
    federation.mask({index: secret_vector(index) for index in range(10)})
    federation.agree()
    message = encode_agreements(federation.agreed)
    answers = {i: Unmasking.decode(federation.clients[i].reveal(message), i, 10) for i in range(10)}
    assert federation.session.threshold == 7
    return federation.unmasker(), answers


def test_who_leaves_out_all_shares_but_its_own_is_named_and_no_honest_dealer() -> None:
    """Three are silent, which the others survive; so it hangs on this one."""
    unmasker, answers = ten_answers()
    for index in range(6):
        unmasker.take(answers[index])
    unmasker.take(Unmasking(6, {6: answers[6].shares[6]}))
    assert not unmasker.is_enough
    assert unmasker.lacking == Lacking({}, {6: (0, 1, 2, 3, 4, 5, 7, 8, 9)})


@pytest.mark.parametrize("n_silent", [0, 1, 2, 3])
@pytest.mark.parametrize("n_without", [1, 2, 3, 4, 5])
def test_a_dealer_is_named_where_so_many_left_its_share_out_that_no_t_could_have_come(
    n_without: int, n_silent: int
) -> None:
    unmasker, answers = ten_answers()
    without = tuple(index for index in range(10) if index != DEALER)[:n_without]
    for index in range(10 - n_silent):
        shares = {dealer: share for dealer, share in answers[index].shares.items() if dealer != DEALER}
        unmasker.take(Unmasking(index, shares) if index in without else answers[index])
    if n_without >= 4:
        assert unmasker.lacking == Lacking({DEALER: without}, {})
    elif n_silent + n_without > 3:
        assert unmasker.lacking == Lacking({}, dict.fromkeys(without, (DEALER,)))
    else:
        assert unmasker.is_enough
        assert unmasker.lacking == Lacking({}, {})


def test_a_false_dealer_and_who_leaves_out_anothers_share_are_both_named() -> None:
    unmasker, answers = ten_answers()
    for index in range(7):
        left_out = {DEALER} if index in (3, 4, 5, 6) else set[int]()
        left_out |= {0} if index == 4 else set()
        kept = {dealer: share for dealer, share in answers[index].shares.items() if dealer not in left_out}
        unmasker.take(Unmasking(index, kept))
    assert unmasker.lacking == Lacking({DEALER: (3, 4, 5, 6)}, {4: (0,)})


def test_the_same_answer_twice_is_one_answer() -> None:
    _, unmasker, answers = answered()
    for _ in range(5):
        unmasker.take(answers[3])
    with pytest.raises(TooFew, match="1 share of client-0000's secret was revealed"):
        unmasker.open()


def test_without_commitments_nobody_would_know_who_spoiled_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong share is taken; what comes out is no secret, and the dealer, who is honest, is blamed."""
    monkeypatch.setattr("umbel.aggregation.secagg.unmasking.require_share", lambda *_: None)
    _, unmasker, answers = answered()
    unmasker.take(replace(answers[3], shares={**answers[3].shares, 1: flipped(answers[3].shares[1], 0)}))
    for index in (0, 1, 2, 5):
        unmasker.take(answers[index])
    with pytest.raises(CheatingDealer, match="client-0001"):
        unmasker.open()
