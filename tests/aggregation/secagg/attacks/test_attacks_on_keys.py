"""Attacks on whose keys a client takes: a coordinator's own, a stranger's, old ones, and such as are no keys."""

import base64
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.aggregation.secagg.attacks.adversary import (
    advert_of,
    advertised,
    bare,
    forged_advert,
    masked,
    opened,
    require_silent,
    roster_of,
    secret_vector,
    secrets_of,
    shares_for,
    without_signatures,
)
from tests.aggregation.secagg.federation import OPENING, Federation, context_of, identity
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.errors import BadKey, Disagreement, ForgedMessage, MalformedMessage
from umbel.aggregation.secagg.messages import Inbox, ShareKeys
from umbel.aggregation.secagg.session import Session
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import ClientId, RunId

VICTIM = 0


# --- keys that are the coordinator's own ------------------------------------------------------------------------------


def substituted(federation: Federation) -> Tensor:
    """The coordinator shows the victim its own keys as those of everybody else; what it reads of that vector."""
    context, victim = federation.context, federation.clients[VICTIM]
    own = {index: secrets_of(context, index, "coordinator") for index in federation.adverts if index != VICTIM}
    adverts = [forged_advert(context, index, one) for index, one in own.items()]
    roster = roster_of(federation, [federation.adverts[VICTIM], *adverts])
    session = Session(context, OPENING, {one.index: one for one in [federation.adverts[VICTIM], *adverts]})

    dealt = ShareKeys.decode(victim.share(roster), VICTIM, session.neighbours(VICTIM))
    pairs = {holder: shares_for(dealt, session, holder, secrets) for holder, secrets in own.items()}
    nothing = dealt.dealt[1]  # it opens for nobody else; a client goes on without
    victim.hear(Inbox(tuple(session.adverts), dict.fromkeys(own, nothing)).encode())
    vector = masked(victim)
    self_mask = opened(session, {holder: pair[0] for holder, pair in pairs.items()})
    seed = opened(session, {holder: pair[1] for holder, pair in pairs.items()})
    return bare(vector, session, VICTIM, self_mask, KeyPair(seed))


def test_substituted_keys_are_refused() -> None:
    federation = advertised(4)
    with pytest.raises(
        ForgedMessage, match="the message of client-0001 is not signed with the identity key of client-0001"
    ):
        substituted(federation)
    require_silent(federation.clients[VICTIM])


def test_substituted_keys_would_give_everything_away(monkeypatch: pytest.MonkeyPatch) -> None:
    without_signatures(monkeypatch)
    assert torch.equal(substituted(advertised(4)), secret_vector(VICTIM))


def test_one_substituted_key_is_enough_to_stop() -> None:
    federation = advertised(5)
    false = forged_advert(federation.context, 3, secrets_of(federation.context, 3, "coordinator"))
    with pytest.raises(ForgedMessage, match="client-0003"):
        federation.clients[VICTIM].share(roster_of(federation, {**federation.adverts, 3: false}.values()))


@pytest.mark.parametrize("swapped", ["channel_key", "mask_key"])
def test_half_of_a_members_keys_cannot_be_exchanged(swapped: str) -> None:
    federation = advertised(4)
    own: dict[str, Any] = {swapped: KeyPair(bytes(range(32))).public}
    advert = replace(federation.adverts[2], **own)
    with pytest.raises(ForgedMessage, match="client-0002"):
        federation.clients[VICTIM].share(roster_of(federation, {**federation.adverts, 2: advert}.values()))


def test_a_members_two_keys_cannot_change_places() -> None:
    federation = advertised(4)
    honest = federation.adverts[2]
    advert = replace(honest, channel_key=honest.mask_key, mask_key=honest.channel_key)
    with pytest.raises(ForgedMessage, match="client-0002"):
        federation.clients[VICTIM].share(roster_of(federation, {**federation.adverts, 2: advert}.values()))


def test_a_clients_own_keys_are_in_the_roster_as_it_sent_them() -> None:
    """Whoever has stolen the identity key, too, cannot make the client take others for its own."""
    federation = advertised(4)
    keys = KeyPair(bytes([1] * 32)).public, KeyPair(bytes([2] * 32)).public
    other = advert_of(federation.context, VICTIM, *keys, identity("client-0000"))
    with pytest.raises(Disagreement, match="does not contain the keys that this client advertised"):
        federation.clients[VICTIM].share(roster_of(federation, {**federation.adverts, VICTIM: other}.values()))


def test_a_client_that_is_left_out_of_the_roster_says_nothing() -> None:
    federation = advertised(5)
    with pytest.raises(Disagreement, match="does not contain the keys that this client advertised"):
        federation.clients[VICTIM].share(roster_of(federation, [federation.adverts[i] for i in (1, 2, 3, 4)]))
    require_silent(federation.clients[VICTIM])


# --- identities that are nobody's -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_out", "refusal"),
    [((), "states 5 entries, but the cohort has only 4"), ((3,), "lists client 4, but the cohort has 4 clients")],
)
def test_a_stranger_has_no_place_in_the_roster(left_out: tuple[int, ...], refusal: str) -> None:
    federation = advertised(4)
    keys = KeyPair(bytes([1] * 32)).public, KeyPair(bytes([2] * 32)).public
    stranger = advert_of(federation.context, 4, *keys, identity("a stranger"))
    members = (one for index, one in federation.adverts.items() if index not in left_out)
    with pytest.raises(MalformedMessage, match=refusal):
        federation.clients[VICTIM].share(roster_of(federation, [*members, stranger]))


def test_a_client_that_is_listed_with_a_strangers_key_does_not_begin() -> None:
    """Otherwise the coordinator would be this client to everybody else."""
    cohort = list(context_of(4).cohort)
    cohort[VICTIM] = (cohort[VICTIM][0], public_key_text(identity("coordinator").public_key().public_bytes_raw()))
    with pytest.raises(
        Disagreement, match="identity key that the coordinator lists for this client is not this client's key"
    ):
        SecureClient(context_of(4, cohort=tuple(cohort)), VICTIM, identity("client-0000"), bytes)


def with_key(key: str) -> Context:
    """A cohort of four, the last of which has this identity key."""
    return context_of(4, cohort=(*context_of(4).cohort[:3], (ClientId("client-0003"), key)))


FIRST_KEY = context_of(4).cohort[0][1]


def test_one_identity_cannot_be_two_members() -> None:
    with pytest.raises(ValueError, match="the same identity key"):
        with_key(FIRST_KEY)


@pytest.mark.parametrize(
    "spelled",
    [
        FIRST_KEY[:42] + chr(ord(FIRST_KEY[42]) + 1) + "=",
        FIRST_KEY + "\n",
        FIRST_KEY[:20] + "!" + FIRST_KEY[20:],
        base64.b64encode(base64.b64decode(FIRST_KEY) + b"\0").decode(),
        base64.b64encode(bytes(32)).decode(),
        base64.b64encode((1).to_bytes(32, "little")).decode(),
        "",
        "ü",
    ],
    ids=["unused bits", "line break", "not base64", "33 bytes", "order 4", "identity", "empty", "not ascii"],
)
def test_an_identity_key_has_one_spelling_and_is_one(spelled: str) -> None:
    if spelled == FIRST_KEY[:42] + chr(ord(FIRST_KEY[42]) + 1) + "=":
        assert base64.b64decode(spelled) == base64.b64decode(FIRST_KEY), "the same key, as Python reads it"
    with pytest.raises(ValueError, match="identity key of client-0003"):
        with_key(spelled)


# --- keys that are no keys --------------------------------------------------------------------------------------------


def with_keys(federation: Federation, index: int, channel_key: bytes, mask_key: bytes) -> bytes:
    """The roster with a corrupt member's own choice of keys, properly signed."""
    context = federation.context
    advert = advert_of(context, index, channel_key, mask_key, identity(context.names[index]))
    return roster_of(federation, {**federation.adverts, index: advert}.values())


def numbered(u: int) -> bytes:
    return u.to_bytes(32, "little")


@pytest.mark.parametrize("place", ["channel", "mask"])
@pytest.mark.parametrize(
    "key",
    [
        numbered(0),
        numbered(1),
        numbered((1 << 255) - 20),
        numbered(0x00B8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0),
        numbered(0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F),
        numbered((1 << 255) - 19),
        numbered((1 << 255) - 18),
        numbered((1 << 255) - 19 + 9),
        numbered((1 << 255) + 9),
    ],
    ids=["0", "1", "p-1", "order 8", "order 8 too", "p", "p+1", "p+9", "bit 255"],
)
def test_keys_that_no_client_makes_are_refused_though_signed(key: bytes, place: str) -> None:
    federation = advertised(4)
    good = KeyPair(bytes(range(32))).public
    roster = with_keys(federation, 3, *((key, good) if place == "channel" else (good, key)))
    with pytest.raises(BadKey, match="client-0003 advertised an invalid key"):
        federation.clients[VICTIM].share(roster)
    require_silent(federation.clients[VICTIM])


@pytest.mark.parametrize("of", ["its own", "another's channel key", "another's mask key"])
def test_no_key_stands_twice_in_a_roster(of: str) -> None:
    """A member that repeats the victim's neighbour's key would be taken for it."""
    federation = advertised(4)
    good, other = KeyPair(bytes(range(32))).public, federation.adverts[1]
    twice = {"its own": good, "another's channel key": other.channel_key, "another's mask key": other.mask_key}[of]
    with pytest.raises(BadKey, match="twice"):
        federation.clients[VICTIM].share(with_keys(federation, 3, good, twice))


@pytest.mark.parametrize(
    "earlier",
    [{"attempt": 2}, {"round": 2}, {"run": RunId("other")}, {"attempt_id": "1f" * 16}],
    ids=lambda of: next(iter(of)),
)
def test_keys_of_another_attempt_are_refused(earlier: dict[str, object]) -> None:
    """The coordinator may know their seeds: that of a client who dropped out was revealed."""
    federation, before = advertised(4), advertised(4, **earlier)
    with pytest.raises(ForgedMessage, match="client-0002"):
        federation.clients[VICTIM].share(roster_of(federation, {**federation.adverts, 2: before.adverts[2]}.values()))


def test_a_member_is_not_another_of_its_index() -> None:
    """Two signed messages whose indices have changed places."""
    federation = advertised(4)
    one, two = federation.adverts[1], federation.adverts[2]
    swapped = {**federation.adverts, 1: replace(two, index=1), 2: replace(one, index=2)}
    with pytest.raises(ForgedMessage, match="client-0001"):
        federation.clients[VICTIM].share(roster_of(federation, swapped.values()))
