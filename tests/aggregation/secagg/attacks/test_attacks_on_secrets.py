"""Attacks on the two secrets of one client: whoever had both of them, would have its vector."""

from collections.abc import Callable, Collection
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.aggregation.secagg.attacks.adversary import (
    agreed,
    bare,
    heard,
    in_the_sum,
    masked,
    opened,
    pair_masks_of,
    revealed,
    secret_vector,
    secrets_of,
    self_mask_of,
    shares_for,
)
from tests.aggregation.secagg.federation import Federation
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.crypto.masks import Masks
from umbel.aggregation.secagg.crypto.shamir import Interpolation, share_value
from umbel.aggregation.secagg.errors import Disagreement

VICTIM = 0
Found = TypeVar("Found")


def both_asked(federation: Federation) -> Tensor:
    """The coordinator asks the same clients for the one secret of the victim, and then for the other."""
    session, shared = federation.session, federation.shared
    vectors = {index: masked(client) for index, client in federation.clients.items()}
    shares = list[dict[int, bytes]]()
    for inputs, asked in ((shared, shared), (shared[1:], shared[1:])):
        signatures = {index: agreed(federation.clients[index], inputs) for index in asked}
        shares.append({index: revealed(federation.clients[index], signatures)[VICTIM] for index in asked})
    return bare(vectors[VICTIM], session, VICTIM, opened(session, shares[0]), KeyPair(opened(session, shares[1])))


def test_nobody_reveals_a_second_time() -> None:
    federation = heard(4)
    with pytest.raises(Disagreement, match="the message 'inputs' twice, with different content"):
        both_asked(federation)


def answer_again(client: SecureClient, step: str, data: bytes, take: Callable[[bytes], Found]) -> Found:
    """`SecureClient._once`, without its point."""
    answer = take(data)
    vars(client)["_answers"][step] = b"", answer
    return answer


def test_clients_that_answered_twice_would_show_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecureClient, "_once", answer_again)
    monkeypatch.setattr(SecureClient, "_erase", lambda _: None)
    assert torch.equal(both_asked(heard(4)), secret_vector(VICTIM))


@pytest.mark.parametrize("gone", [(), (4,), (3, 4)], ids=["all", "one gone", "two gone"])
def test_of_each_neighbour_exactly_one_share_is_revealed_and_always_the_right_one(gone: Collection[int]) -> None:
    federation = in_the_sum(8, [index for index in range(8) if index not in gone])
    holder = 7
    shares = revealed(federation.clients[holder], federation.agreed)
    assert shares.keys() == set(range(8))
    for dealer in range(7):
        pair = shares_for(federation.dealt[dealer], federation.session, holder, secrets_of(federation.context, holder))
        assert shares[dealer] == pair[dealer in gone]


def said_to_be_gone(federation: Federation) -> Tensor:
    """The victim's vector was kept back: the others reveal its key as that of a client that had dropped out."""
    vector = masked(federation.clients[VICTIM])
    for index in federation.shared[1:]:
        masked(federation.clients[index])
    federation.inputs = federation.shared[1:]
    federation.agree()
    answers = {i: revealed(federation.clients[i], federation.agreed)[VICTIM] for i in federation.inputs}
    seed = opened(federation.session, answers)
    assert KeyPair(seed).public == federation.adverts[VICTIM].mask_key
    return vector - pair_masks_of(federation.session, VICTIM, KeyPair(seed), federation.inputs)


def test_a_vector_that_was_kept_back_is_still_masked() -> None:
    federation = heard(4)
    left = said_to_be_gone(federation)
    self_mask = self_mask_of(federation.session, VICTIM, secrets_of(federation.context, VICTIM).self_mask)
    assert int((left == secret_vector(VICTIM)).sum()) == 0
    assert torch.equal(left - self_mask, secret_vector(VICTIM)), "and with nothing else"
    with pytest.raises(Disagreement):
        agreed(federation.clients[VICTIM], federation.inputs)


def test_without_a_self_mask_a_vector_that_was_kept_back_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.aggregation.secagg.client.self_mask_key", lambda *_: bytes(32))
    known = torch.zeros(64, dtype=torch.int32)
    Masks([bytes(32)], [1]).apply(known)
    assert torch.equal(said_to_be_gone(heard(4)) - known, secret_vector(VICTIM))


def test_every_share_of_less_than_t_holders_gives_no_secret() -> None:
    federation = heard(6)
    session, corrupt = federation.session, (2, 3, 4, 5)
    pairs = {i: shares_for(federation.dealt[VICTIM], session, i, secrets_of(federation.context, i)) for i in corrupt}
    own = secrets_of(federation.context, VICTIM)
    points = tuple(index + 1 for index in corrupt)
    for kind, secret in enumerate((own.self_mask, own.mask.seed)):
        guess = Interpolation(points, len(points)).number([share_value(pairs[index][kind]) for index in corrupt])
        assert guess != int.from_bytes(secret, "little")
