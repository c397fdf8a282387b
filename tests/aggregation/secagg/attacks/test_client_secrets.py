"""What is left of a client that is done, what of its secrets people may read, and how random they are."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from tests.aggregation.secagg.attacks.adversary import (
    Secrets,
    advertised,
    heard,
    require_silent,
    secret_vector,
    secrets_of,
    shares_for,
)
from tests.aggregation.secagg.federation import identity, seeded
from tests.aggregation.secagg.told import STEPS, VICTIM, told
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.crypto.derive import Vector
from umbel.aggregation.secagg.crypto.shamir import SHARE_BYTES, split
from umbel.aggregation.secagg.errors import OutOfTurn
from umbel.aggregation.secagg.messages import (
    AdvertiseKeys,
    Unmasking,
    encode_agreements,
)


def everything(found: object, seen: set[int]) -> Iterator[bytes]:
    """All bytes that can be reached from an object, through its attributes, items and private keys."""
    if id(found) in seen:
        return
    seen.add(id(found))
    parts: list[object] = []
    match found:
        case bytes():
            yield found
        case X25519PrivateKey():
            yield found.private_bytes_raw()
        case Mapping():
            parts += [*found.keys(), *found.values()]  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        case list() | tuple() | set():
            parts += found  # pyright: ignore[reportUnknownArgumentType]
        case _ if is_dataclass(found):
            parts += [getattr(found, one.name) for one in fields(found)]
        case _:
            parts += vars(found).values() if hasattr(found, "__dict__") else ()
    for part in parts:
        yield from everything(part, seen)


def holds(client: SecureClient, secret: bytes) -> bool:
    return any(secret in one for one in everything(client, set()))


def own_secrets(client: SecureClient) -> list[bytes]:
    secrets: Secrets = secrets_of(client.context, client.index)
    return [secrets.channel.seed, secrets.mask.seed, secrets.self_mask]


def test_this_search_finds_the_secrets_of_a_client_that_has_not_finished() -> None:
    victim = told("agree").victim
    assert [holds(victim, secret) for secret in own_secrets(victim)] == [True, True, True]


def test_after_its_last_word_a_client_holds_no_secret() -> None:
    victim = told("reveal").victim
    assert [holds(victim, secret) for secret in own_secrets(victim)] == [False, False, False]


def test_after_its_last_word_a_client_holds_no_share_that_it_did_not_reveal() -> None:
    """Nor one that it did, beside its answer: whoever seizes it later learns what the coordinator knows already."""
    for until, is_held in (("agree", True), ("reveal", False)):
        so_far = told(until)
        federation, own = so_far.federation, secrets_of(so_far.federation.context, VICTIM)
        for dealer in range(1, 5):
            of_self_mask, of_key = shares_for(federation.dealt[dealer], federation.session, VICTIM, own)
            assert holds(so_far.victim, of_key) is is_held
            assert holds(so_far.victim, of_self_mask), "first among its shares, then in its answer"


@pytest.mark.parametrize("until", STEPS)
def test_a_client_that_leaves_forgets_everything_and_says_nothing(until: str) -> None:
    so_far = told(until)
    so_far.victim.abort()
    assert [holds(so_far.victim, secret) for secret in own_secrets(so_far.victim)] == [False, False, False]
    require_silent(so_far.victim)
    for step, data in so_far.said.items():
        with pytest.raises(OutOfTurn):
            getattr(so_far.victim, step)(data)


def test_a_step_that_broke_off_is_not_taken_again() -> None:
    """Or a client that ran out of memory would share its secrets over two polynomials, or seal twice with one key."""
    federation, calls = advertised(4), iter(range(99))
    name = federation.context.names[VICTIM]
    random = seeded(name)

    def failing(n_bytes: int) -> bytes:
        if next(calls) == 4:
            raise MemoryError
        return random(n_bytes)

    victim = SecureClient(federation.context, VICTIM, identity(name), failing)
    assert victim.advertise() == federation.adverts[VICTIM].encode()
    with pytest.raises(MemoryError):
        victim.share(federation.roster)
    require_silent(victim)


def test_no_secret_is_in_what_people_may_read() -> None:
    """Not in a repr, whole or cut in pieces, of any of the objects on both sides."""
    federation = heard(4)
    federation.mask({index: secret_vector(index) for index in range(3)})
    federation.agree()
    victim = federation.clients[VICTIM]
    secrets = [*own_secrets(victim), *(own_secrets(federation.clients[3]))]
    answer = Unmasking.decode(victim.reveal(encode_agreements(federation.agreed)), VICTIM, 4)
    shown = [victim, federation.clients[1], answer, federation.dealt[1], federation.unmasker(), federation.session]
    shown += [secrets_of(federation.context, 1).mask, federation.clients[1].masks(Vector.WORDS), federation.reveal()]
    text = "".join(map(repr, shown))
    for secret in [*secrets, *answer.shares.values()]:
        assert repr(secret)[2:-1] not in text
        assert secret.hex() not in text


# --- randomness -------------------------------------------------------------------------------------------------------


def test_every_secret_is_256_bits_of_the_source_and_each_is_drawn_anew() -> None:
    """Weak or reused randomness is the commonest flaw of such code; here nothing is made of anything else."""
    drawn: list[tuple[int, bytes]] = []
    federation, source = advertised(5), seeded("source")
    name = federation.context.names[VICTIM]

    def noted(n_bytes: int) -> bytes:
        drawn.append((n_bytes, source(n_bytes)))
        return drawn[-1][1]

    victim = SecureClient(federation.context, VICTIM, identity(name), noted)
    assert [n_bytes for n_bytes, _ in drawn] == [32, 32, 32]
    federation.adverts[VICTIM] = AdvertiseKeys.decode(victim.advertise())
    victim.share(federation.roster)
    coefficients = sum(n_bytes for n_bytes, _ in drawn[3:])
    t = federation.session.threshold
    assert coefficients >= 2 * (t - 1) * SHARE_BYTES
    assert len({data for _, data in drawn}) == len(drawn)


def test_a_secret_is_shared_with_other_polynomials_each_time() -> None:
    source = seeded("polynomials")
    assert split(bytes(32), 3, [1, 2, 3], source) != split(bytes(32), 3, [1, 2, 3], source)


@pytest.mark.parametrize("vector", Vector)
def test_equal_vectors_of_two_attempts_have_nothing_in_common(vector: Vector) -> None:
    """Their difference is as uniform as each: 65,536 bytes, 255 degrees of freedom; equal bytes are one in 256."""
    zeros = torch.zeros(16384, dtype=torch.int32)
    attempts = [heard(4), heard(4, attempt=2)]  # of the same keys: only the session differs
    sent = [zeros.clone() for _ in attempts]
    for federation, part in zip(attempts, sent, strict=True):
        federation.clients[VICTIM].masks(vector).apply(part)
    for uniform in (*sent, sent[0] - sent[1]):
        counts = torch.bincount(uniform.view(torch.uint8).to(torch.int64), minlength=256).to(torch.float64)
        assert 150 < float(((counts - 256) ** 2 / 256).sum()) < 380
    floats = torch.stack([part.to(torch.float64) for part in sent])
    assert abs(float(torch.corrcoef(floats)[0, 1])) < 5 / 128


def test_the_two_vectors_of_one_client_have_nothing_in_common() -> None:
    client, sent = heard(4).clients[VICTIM], [torch.zeros(4096, dtype=torch.int64) for _ in Vector]
    for vector, part in zip(Vector, sent, strict=True):
        client.masks(vector).apply(part)
    assert not (sent[0] == sent[1]).any()
