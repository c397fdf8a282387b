"""A coordinator that keeps everything learns the sum, and of no client anything else: tried on the record of a whole
round with a drop-out, by an attacker who succeeds as soon as one defence is taken away (`secagg_attack.py`).

What is stored is looked at over SQLite, and over PostgreSQL, where two coordinators share it and one hears what is
revealed and the other unmasks. What clients say is the same over both; what follows from that alone is tried on one.
"""

import asyncio
import base64
import copy
import struct
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import cast

import httpx
import pytest
import torch
from torch import Tensor

from tests.federations.secagg_attack import CLOSE, Attack, Evidence, Vectors
from tests.federations.secure_cohort import Attempt, secure_run
from tests.federations.secure_device import SecureDevice, change_of
from tests.federations.secure_record import Record, recorded
from tests.federations.server_device import AttendedClock, House, Json, LateClock, house
from tests.servers.postgres import Cluster
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.crypto.derive import ShareKind, Vector, pair_mask_key
from umbel.aggregation.secagg.crypto.masks import Masks
from umbel.aggregation.secagg.crypto.signing import Label, sign
from umbel.aggregation.secagg.errors import SecAggError
from umbel.aggregation.secagg.messages import (
    AdvertiseKeys,
    Roster,
    ShareKeys,
    Unmasking,
    decode_indices,
    encode_agreements,
    encode_indices,
)
from umbel.aggregation.secagg.numbers.composition import composition_of
from umbel.aggregation.secagg.numbers.contribution import Contribution, LocalWork
from umbel.aggregation.secagg.session import Session
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.types import ClientId
from umbel.server.sums import relay

N, GONE, VICTIM = 5, 2, 0
STATE = {"w": torch.zeros(3000)}
LAYOUT = Layout.of_state(STATE)
COUNTS = (1_934_847_123, 2_047_113_907, 1_871_902_451, 1_998_765_439, 2_120_304_057)
STEPS = (731_902_117, 800_000_003)
RUN = (
    secure_run(target=N, minimum=3)
    .replace("sample_count_max = 1000", "sample_count_max = 4000000000")
    .replace("expected_sample_count = 10", "expected_sample_count = 2000000000")
    .replace("first_norm = 0.175", "first_norm = 0.55")
)


def work_of(i: int) -> LocalWork:
    return LocalWork(
        COUNTS[i],
        STEPS[0] + 7919 * i,
        STEPS[1] + 7919 * i,
        {"loss": 0.718_281_8 + i / 3, "accuracy": 0.612_345_6 + i / 70},
    )


@dataclass
class Secrets:
    """What one client has that nobody else may."""

    seeds: Mapping[str, bytes]
    shares: Mapping[str, bytes]


@dataclass
class Recorded:
    """A round that was recorded, up to some phase, and who took part in it."""

    record: Record
    parties: list[SecureDevice]
    changes: list[Tensor]
    secrets: list[Secrets]
    ended: Json | None

    def truth(self, i: int) -> Contribution:
        return self.parties[i].contribution(self.changes[i])

    def evidence(self) -> Evidence:
        """Of what went over the wire: what any coordinator has."""
        context = self.parties[0].party.context
        names = list(context.names)
        first = names[0]
        roster = Roster.decode(self._answer(first, "share-keys"), N)
        session = Session.of_roster(context, roster)
        evidence = Evidence(composition_of(self.parties[0].offer, LAYOUT), session, {})
        dealt = {}
        for one in self.parties:
            name, index = one.device.name, names.index(ClientId(one.device.name))
            assert AdvertiseKeys.decode(self._body(name, "PUT", "advertise-keys")).index == index
            dealt[index] = ShareKeys.decode(self._body(name, "PUT", "share-keys"), index, session.neighbours(index))
            evidence.updates[index] += [sent.body for sent in self.record.sent_by(name, "POST", "/update")]
            for sent in self.record.sent_by(name, "PUT", "unmasking"):
                evidence.revealed.append((index, Unmasking.decode(sent.body, index, N).shares))
        evidence.dealt = dealt
        return evidence

    def _body(self, name: str, method: str, ending: str) -> bytes:
        return self.record.sent_by(name, method, ending)[0].body

    def _answer(self, name: str, ending: str) -> bytes:
        return next(one.answer for one in self.record.sent_by(name, "GET", ending) if one.answer)


def vectors_of(contribution: Contribution) -> Vectors:
    return Vectors(torch.cat(list(contribution.levels())), contribution.words)


@asynccontextmanager
async def coordinators(record: Record, clock: LateClock) -> AsyncGenerator[list[House]]:
    """One over SQLite, or two over PostgreSQL; what is said to them is recorded."""
    folders = [record.data] if record.database_url is None else [record.data / "one", record.data / "other"]
    shared = {
        "database_url": record.database_url,
        "blobs": str(record.data / "blobs"),
        "admin_key_file": record.data / "admin.key",
        "audit_key_file": record.data / "audit.key",
    }
    async with AsyncExitStack() as stack:
        houses = [await stack.enter_async_context(house(one, clock, **shared)) for one in folders]
        for it in houses:
            transport = record.transport(httpx.ASGITransport(it.app))
            it.http = httpx.AsyncClient(transport=transport, base_url="http://umbel", timeout=30.0)
        yield houses


async def one_that_does_not_unmask(houses: Sequence[House]) -> House:
    """Once the round has closed; where there is but one, that."""
    first, last = houses[0], houses[-1]
    driver = await first.driver()
    return last if await driver._closer.leads(driver.live) else first


def play(
    tmp_path: Path,
    kind: type[SecureClient] = SecureClient,
    until_phase: Phase | None = None,
    database_url: str | None = None,
) -> Recorded:
    """A recorded round of five, one of whom uploads its update and then is never heard of again."""

    async def scenario(record: Record) -> Recorded:
        clock = AttendedClock()
        async with coordinators(record, clock) as houses:
            it = houses[0]
            await it.begin(RUN, STATE)
            devices = await it.devices(N, sample_count=0)
            parties = [SecureDevice(one, LAYOUT, work_of(i), kind=kind) for i, one in enumerate(devices)]
            changes = [change_of(LAYOUT, 40 + i) for i in range(N)]
            attempt = Attempt(it, clock, parties, changes)
            await attempt.each(SecureDevice.begin)
            seeds = [seeds_of(one) for one in parties]
            await attempt.speak(Phase.ADVERTISE_KEYS, range(N))
            await attempt.speak(Phase.SHARE_KEYS, range(N))
            record.look("shared")
            await parties[GONE].hear()
            uploaded = await parties[GONE].device.upload(parties[GONE].offer.id, parties[GONE].masked(changes[GONE]))
            assert uploaded.status_code == 201
            left = [i for i in range(N) if i != GONE]
            await attempt.speak(Phase.MASKED_INPUT, left[:2])
            record.look("half of the inputs")
            await attempt.speak(Phase.MASKED_INPUT, left[2:])
            record.look("inputs")
            shares = [shares_of(one) for one in parties]
            await attempt.run_out()
            record.look("closed")
            ended = None
            if until_phase is not Phase.CONSISTENCY_CHECK:
                await attempt.speak(Phase.CONSISTENCY_CHECK, left)
                record.look("agreed")
                attempt.move_to(await one_that_does_not_unmask(houses))
                await attempt.speak(Phase.UNMASKING, left)
                [ended] = await it.ended(1)
                record.look("ended")
                await asked(it)
            secrets = [Secrets(*pair) for pair in zip(seeds, shares, strict=True)]
            return Recorded(record, parties, changes, secrets, ended)

    with pytest.MonkeyPatch.context() as patch, recorded(patch, tmp_path, database_url) as record:
        return asyncio.run(scenario(record))


async def asked(it: House) -> None:
    """What operators see of the run afterwards."""
    for path in ("", "/progress", "/audit", "/versions"):
        assert (await it.http.get(f"/v1/admin/runs/demo{path}", headers=it.admin)).status_code == 200


def seeds_of(one: SecureDevice) -> dict[str, bytes]:
    party = one.party
    return {"channel": party._channel.seed, "mask": party._mask.seed, "self mask": party._self_mask}  # pyright: ignore[reportPrivateUsage]


def shares_of(one: SecureDevice) -> dict[str, bytes]:
    held = one.party._held  # pyright: ignore[reportPrivateUsage]
    return {f"{kind.name} of {dealer}": pair[kind][:32] for dealer, pair in held.items() for kind in ShareKind}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A round of clients that keep to the protocol."""
    return play(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Such a round, over either database."""
    if request.param == "sqlite":
        return cast(Recorded, request.getfixturevalue("whole"))
    postgresql: Cluster = request.getfixturevalue("postgresql")
    return play(tmp_path_factory.mktemp("replicas"), database_url=postgresql.new_database())


# --- the round as it is -----------------------------------------------------------------------------------------------


def test_the_round_commits_what_four_of_five_put_in(stored: Recorded) -> None:
    assert stored.ended is not None
    assert stored.ended["committed"], stored.ended["reason"]
    assert stored.ended["sample_count"] == sum(count for i, count in enumerate(COUNTS) if i != GONE)


def test_no_client_is_found_out(stored: Recorded) -> None:
    evidence = stored.evidence()
    assert len(evidence.updates) == N, "that of the one who was gone came, too"
    loot = Attack(evidence).loot()
    assert set(loot.secrets[ShareKind.SELF_MASK]) == set(range(N)) - {GONE}
    assert set(loot.secrets[ShareKind.MASK_KEY]) == {GONE}
    assert loot.vectors == {}


def test_nothing_that_can_be_made_of_the_messages_is_like_a_clients_change(whole: Recorded) -> None:
    truths, total = dict(enumerate(whole.changes)), total_of(whole)
    attack = Attack(whole.evidence())
    found = attack.correlations(truths, total)
    assert len(found) > 100
    assert max(found.values()) < CLOSE, max(found, key=lambda key: found[key])


def total_of(whole: Recorded) -> Vectors:
    parts = [vectors_of(whole.truth(i)) for i in range(N) if i != GONE]
    return Vectors(
        sum((one.levels for one in parts[1:]), parts[0].levels), sum((one.words for one in parts[1:]), parts[0].words)
    )


def test_the_attacker_would_know_a_change_if_it_saw_one(whole: Recorded) -> None:
    evidence = whole.evidence()
    in_the_clear = bytearray(evidence.updates[VICTIM][0])
    composition = evidence.composition
    packed = b"".join(part.numpy().tobytes() for part in composition.modular.packed(whole.truth(VICTIM).levels()))
    in_the_clear[64 : 64 + len(packed)] = packed
    evidence.updates[VICTIM] = [bytes(in_the_clear)]
    found = Attack(evidence).correlations(dict(enumerate(whole.changes)), total_of(whole))
    assert found[f"{VICTIM} as it came", VICTIM] > 5 * CLOSE


# --- what is stored, logged and sent ----------------------------------------------------------------------------------


def numbers_of(whole: Recorded, i: int) -> Iterator[tuple[str, bytes]]:
    """A client's counts, losses and vectors in whatever form they might be written."""
    work, change, truth = whole.parties[i].work, whole.changes[i], whole.truth(i)
    for name, count in (("samples", work.sample_count), ("done", work.steps_done), ("planned", work.steps_planned)):
        yield f"{name}, decimal", str(count).encode()
        yield from ((f"{name}, {code}", struct.pack(code, count)) for code in ("<I", ">I", "<q", ">q", "<d"))
    for name, value in work.metrics.items():
        yield f"{name}, decimal", repr(value).encode()
        yield from ((f"{name}, {code}", struct.pack(code, value)) for code in ("<d", ">d", "<f"))
    norm = float(change.norm())
    yield from (("norm, decimal", f"{norm:.7g}".encode()), ("norm", struct.pack("<d", norm)))
    for at in (0, 1000, 2990):
        yield f"change at {at}", change[at : at + 4].numpy().tobytes()
        yield f"change at {at}, double", change[at : at + 3].double().numpy().tobytes()
        yield f"weighted change at {at}", truth.values[at : at + 4].numpy().tobytes()
    levels = vectors_of(truth).levels
    packed = b"".join(part.numpy().tobytes() for part in truth.composition.modular.packed(truth.levels()))
    for at in (0, 512, 2048):
        for dtype in (torch.int16, torch.int32, torch.int64):
            yield f"levels at {at}, {dtype}", levels[at : at + 24].to(dtype).numpy().tobytes()
    for at in (0, len(packed) // 2, len(packed) - 16):
        yield f"packed levels at {at}", packed[at : at + 16]
    for at, word in enumerate(truth.words.tolist()):
        if abs(word) > 1 << 28:
            yield f"word {at}", struct.pack("<q", word)


def in_all_scripts(what: str, secret: bytes) -> Iterator[tuple[str, bytes]]:
    yield what, secret
    yield f"{what}, hex", secret.hex().encode()
    yield f"{what}, base64", base64.b64encode(secret)[: len(secret) * 4 // 3]


def places_of(needle: bytes, where: Mapping[str, bytes]) -> list[str]:
    return [place for place, data in where.items() if needle in data]


@pytest.mark.parametrize("i", range(N))
def test_a_clients_numbers_are_written_nowhere_and_never_sent(i: int, stored: Recorded) -> None:
    wire = {f"{n} {one.method} {one.path}": one.body + one.answer for n, one in enumerate(stored.record.exchanged)}
    where = {**stored.record.kept, **wire}
    for what, needle in numbers_of(stored, i):
        assert places_of(needle, where) == [], what


@pytest.mark.parametrize("i", range(N))
def test_a_clients_secrets_are_written_nowhere(i: int, stored: Recorded) -> None:
    wire = {f"{n} {one.method} {one.path}": one.body + one.answer for n, one in enumerate(stored.record.exchanged)}
    for what, secret in {**stored.secrets[i].seeds, **stored.secrets[i].shares}.items():
        for script, needle in in_all_scripts(what, secret):
            assert places_of(needle, stored.record.kept) == [], script
    for what, seed in stored.secrets[i].seeds.items():
        for script, needle in in_all_scripts(what, seed):
            assert places_of(needle, wire) == [], script


def test_the_scans_see_what_is_there(stored: Recorded) -> None:
    kept, party = stored.record.kept, stored.parties[VICTIM].party
    assert any("updates/" in place or "chunk" in place for place in kept), (
        "masked updates were in store when it was looked"
    )
    assert any("partials/" in place for place in kept)
    advert = party_advert(stored)
    for data in (base64.b64encode(advert), party.context.attempt_id.encode()):
        assert places_of(data, kept), "what is stored is found"
    assert places_of(str(sum(count for i, count in enumerate(COUNTS) if i != GONE)).encode(), kept), "sums are public"
    is_alone = stored.record.database_url is None
    assert len(stored.record.log.getvalue()) > (10_000 if is_alone else 5_000)  # SQLite's driver tells every call
    looks = [place for place in kept if place.startswith("handed over") and place.endswith("rows")]
    heard = {i for i in range(N) if any(f"d{i}" in place for place in looks)}
    assert heard == (set() if is_alone else set(range(N)) - {GONE})


def party_advert(whole: Recorded) -> bytes:
    return whole.record.sent_by("d0", "PUT", "advertise-keys")[0].body


def test_what_coordinators_hand_one_another_without_a_seal_is_found_in_their_database(
    tmp_path: Path, postgresql: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "seal_relayed", lambda _to, _session, _index, message, _random: message)
    monkeypatch.setattr(relay, "open_relayed", lambda _own, _session, _index, sealed: sealed)
    weak = play(tmp_path, database_url=postgresql.new_database())
    rows = {place: data for place, data in weak.record.kept.items() if place.endswith("rows")}
    revealed = [share for _, shares in weak.evidence().revealed for share in shares.values()]
    assert len(revealed) == (N - 1) * N
    for share in revealed:
        assert places_of(share[:32], rows) != []


# --- one defence less -------------------------------------------------------------------------------------------------


class Forgetful(SecureClient):
    """Erases nothing, and forgets which sum it has agreed to."""

    def _erase(self) -> None:
        pass

    def agree(self, inputs: bytes) -> bytes:
        self._answers.pop("inputs", None)
        self._answers.pop("agreements", None)
        return super().agree(inputs)


class PublicPairs(SecureClient):
    """Derives what it shares with others from nothing that is secret."""

    def masks(self, vector: Vector) -> Masks:
        whole, session = super().masks(vector), self._require_session()
        others = [other for other in session.neighbours(self.index) if other in self._shared]
        pairs = [pair_mask_key(bytes(32), session.digest, vector, self.index, other) for other in others]
        return Masks([whole._keys[0], *pairs], whole._signs)  # pyright: ignore[reportPrivateUsage]


class NoMaskOfItsOwn(SecureClient):
    """Is masked by what it shares with others alone."""

    def masks(self, vector: Vector) -> Masks:
        whole = super().masks(vector)
        return Masks(whole._keys[1:], whole._signs[1:])  # pyright: ignore[reportPrivateUsage]


class Careless(SecureClient):
    """Signs whatever sum it is told of, and does not look who else has."""

    def _agree(self, data: bytes) -> bytes:
        session = self._require_session()
        self._inputs = decode_indices(data, N)
        payload = session.consistency_payload(self._shared, self._inputs)
        return sign(self._identity, Label.CONSISTENCY, session.digest, payload)

    def _reveal(self, data: bytes) -> bytes:
        return Unmasking(self.index, {v: pair[v not in self._inputs] for v, pair in self._held.items()}).encode()


Revealed = list[tuple[int, Mapping[int, bytes]]]


def revealed_of(parties: Sequence[SecureClient], inputs: Sequence[int]) -> Revealed:
    """What these clients reveal when they are told that this is the sum, and shown what all of them have signed."""
    signatures = {one.index: one.agree(encode_indices(inputs)) for one in parties}
    answers = [(one.index, one.reveal(encode_agreements(signatures))) for one in parties]
    return [(index, Unmasking.decode(answer, index, N).shares) for index, answer in answers]


def is_found(attacked: Recorded, evidence: Evidence, i: int) -> bool:
    """Whether the attacker has this client's levels and words, to the bit."""
    truth, mask = vectors_of(attacked.truth(i)), (1 << evidence.composition.secure.bits) - 1
    return any(
        not bool(((one.levels ^ truth.levels) & mask).any()) and one.words.equal(truth.words)
        for one in Attack(evidence).loot().vectors.get(i, {}).values()
    )


def test_clients_that_answer_twice_give_one_of_them_away(tmp_path: Path, whole: Recorded) -> None:
    others = [i for i in range(N) if i != VICTIM]
    for i in others[2:]:
        with pytest.raises(SecAggError):
            copy.copy(whole.parties[i].party).agree(encode_indices(others))
    weak = play(tmp_path, Forgetful)
    evidence = weak.evidence()
    assert not is_found(weak, evidence, VICTIM)
    gone = weak.parties[GONE].party  # it had signed its vector, and lives
    gone.sign_input(sha256(evidence.updates[GONE][0]).digest())
    evidence.revealed += revealed_of([weak.parties[i].party for i in others], others)
    assert is_found(weak, evidence, VICTIM)


def test_masks_that_anybody_can_derive_give_everyone_in_the_sum_away(tmp_path: Path) -> None:
    weak = play(tmp_path, PublicPairs)
    evidence = weak.evidence()
    assert [i for i in range(N) if is_found(weak, evidence, i)] == [i for i in range(N) if i != GONE]


def test_without_masks_of_their_own_who_was_late_is_given_away(tmp_path: Path) -> None:
    weak = play(tmp_path, NoMaskOfItsOwn)
    evidence = weak.evidence()
    assert [i for i in range(N) if is_found(weak, evidence, i)] == [GONE]


def test_without_a_check_of_who_is_in_the_sum_it_may_be_one(tmp_path: Path) -> None:
    weak = play(tmp_path, Careless, Phase.CONSISTENCY_CHECK)
    evidence, left = weak.evidence(), [weak.parties[i].party for i in range(N) if i != GONE]
    assert not is_found(weak, evidence, VICTIM)
    evidence.revealed += revealed_of(left, [VICTIM])
    assert is_found(weak, evidence, VICTIM)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A round of clients that keep to the protocol, who have not been told yet who is in the sum."""
    return play(tmp_path_factory.mktemp("closed"), SecureClient, Phase.CONSISTENCY_CHECK)


def test_a_sum_of_one_and_one_of_others_is_signed_by_nobody(closed: Recorded) -> None:
    for i in (0, 1, 3, 4):
        for inputs in ((VICTIM,), (0, 1, 3), (0, 1, 2, 3, 4, 5)):
            one = copy.copy(closed.parties[i].party)
            with pytest.raises(SecAggError):
                one.agree(encode_indices(inputs))
            assert one._self_mask == b""  # pyright: ignore[reportPrivateUsage]


def test_two_views_of_the_sum_have_no_shares_revealed(closed: Recorded) -> None:
    views = {0: (0, 1, 3, 4), 1: (0, 1, 3, 4), 3: (0, 1, 2, 3), 4: (0, 1, 3, 4)}
    parties = {i: copy.copy(closed.parties[i].party) for i in views}
    signatures = {i: one.agree(encode_indices(views[i])) for i, one in parties.items()}
    for i, one in parties.items():
        same = {other: signed for other, signed in signatures.items() if views[other] == views[i]}
        for shown in (signatures, same):
            with pytest.raises(SecAggError):
                copy.copy(one).reveal(encode_agreements(shown))


def test_two_vectors_under_the_same_masks_show_their_difference(closed: Recorded) -> None:
    victim, evidence = closed.parties[VICTIM], closed.evidence()
    bits = evidence.composition.secure.bits
    other = SecureDevice(victim.device, LAYOUT, LocalWork(1, 1, 1), victim.assignment, victim.client)
    change = torch.full((LAYOUT.n_values,), 1e-4)
    again = other.masked(change)
    with pytest.raises(SecAggError):
        copy.copy(victim.party).sign_input(sha256(again).digest())
    assert "difference" not in Attack(evidence).loot().vectors.get(VICTIM, {})
    evidence.updates[VICTIM].append(again)
    found = Attack(evidence).loot().vectors[VICTIM]["difference"]
    first, second = vectors_of(closed.truth(VICTIM)), vectors_of(other.contribution(change))
    assert found.words[2] == COUNTS[VICTIM] - 1
    assert not bool(((found.levels ^ (first.levels - second.levels)) & ((1 << bits) - 1)).any())


def test_a_new_attempt_has_other_masks_for_the_same_work(tmp_path: Path, closed: Recorded) -> None:
    again = play(tmp_path, SecureClient, Phase.CONSISTENCY_CHECK)
    evidence = closed.evidence()
    evidence.updates[VICTIM] += again.evidence().updates[VICTIM]
    assert len(evidence.updates[VICTIM]) == 2
    assert Attack(evidence).loot().vectors == {}
