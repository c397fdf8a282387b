"""Messages of secure rounds that are late, early, another's, garbage, or said otherwise the second time: each is
refused by its name, and changes nothing; the same again has the same answer."""

import asyncio
import copy
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from tests.federations.secure_cohort import LAYOUT, STATE, Attempt, secure_run, work_of
from tests.federations.secure_device import SecureDevice
from tests.federations.server_device import House, LateClock, house, problem, rows, run_file
from umbel.aggregation.plans.codec import Codec
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.crypto.signing import Label, sign
from umbel.aggregation.secagg.messages import AdvertiseKeys, Unmasking
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.update.wire import header_for
from umbel.server.http.limits import SECURE_BYTES_MAX

pytestmark = pytest.mark.usefixtures("any_database_in_time")
N = 4
KEY_PHASES = [Phase.ADVERTISE_KEYS, Phase.SHARE_KEYS, Phase.CONSISTENCY_CHECK, Phase.UNMASKING]
Ask = Callable[["Scene"], Awaitable[httpx.Response]]


class Scene:
    """A secure round in which it is `phase`'s turn, and nobody has spoken in it yet. `one` may; `other` may, too."""

    def __init__(self, attempt: Attempt, phase: Phase) -> None:
        self.attempt = attempt
        self.phase = phase
        self.one, self.other = attempt.parties[:2]

    @property
    def it(self) -> House:
        return self.attempt.it

    async def own(self, party: SecureDevice) -> bytes:
        """What this client has to say in the phase."""
        if self.phase is Phase.ADVERTISE_KEYS:
            return party.party.advertise()
        heard = await party.get(self.phase)
        take = {
            Phase.SHARE_KEYS: party.party.share,
            Phase.CONSISTENCY_CHECK: party.party.agree,
            Phase.UNMASKING: party.party.reveal,
        }
        return take[self.phase](heard)

    async def put(self, body: bytes, phase: Phase | None = None) -> httpx.Response:
        return await self.one.put(phase or self.phase, body)


async def brought_to(it: House, phase: Phase, run: str | None = None) -> Scene:
    """A round of four, all of whom have spoken in every phase before this one."""
    await it.begin(run or secure_run(target=N, minimum=3), STATE)
    attempt = Attempt.of(it, LateClock(), await it.devices(N, sample_count=0))
    await attempt.each(SecureDevice.begin)
    for before in Phase:
        if before is phase:
            break
        assert await attempt.speak(before, range(N))
    if not (phase.is_before_inputs or phase is Phase.MASKED_INPUT):
        await handed_in(it)
    return Scene(attempt, phase)


async def handed_in(it: House) -> None:
    """Masked updates are in a sum that is stored, and gone: the coordinator does that in its own time."""

    def n_in_sums() -> list[int]:
        return [len(json.loads(str(row[4]))) for row in rows(it.settings)["partial_sums"]]

    while n_in_sums() != [N] or rows(it.settings)["uploads"]:  # noqa: ASYNC110 - nothing rings
        await asyncio.sleep(0.01)


async def unchanged(it: House) -> Callable[[], Awaitable[None]]:
    """To be awaited when nothing may have changed since, nor have been counted."""

    async def there() -> dict[str, object]:
        await it.state.coordinator.drivers["demo"].flush_traffic()
        return {name: found for name, found in rows(it.settings).items() if name != "leases"}  # no request's doing

    before = await there()

    async def check() -> None:
        assert await there() == before

    return check


# --- the same again, and something else -------------------------------------------------------------------------------


def rival(scene: Scene, body: bytes) -> bytes:
    """Another message of the same client, as good as its first one."""
    one = scene.one.party
    if scene.phase is Phase.ADVERTISE_KEYS:
        return SecureClient(one.context, one.index, scene.one.device.key, os.urandom).advertise()
    assert scene.phase is Phase.SHARE_KEYS
    again = copy.copy(one)
    again._answers = {}  # pyright: ignore[reportPrivateUsage]
    return again._share(scene.roster)  # type: ignore[attr-defined]


@pytest.mark.parametrize("phase", [Phase.ADVERTISE_KEYS, Phase.SHARE_KEYS], ids=str)
def test_the_same_again_is_answered_and_something_else_refused(phase: Phase, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            scene = await brought_to(it, phase)
            if phase is Phase.SHARE_KEYS:
                scene.roster = await scene.one.get(phase)  # type: ignore[attr-defined]
            said = await scene.own(scene.one)
            other = rival(scene, said)
            assert other != said
            assert (await scene.put(said)).status_code == 204
            check = await unchanged(it)
            assert (await scene.put(said)).status_code == 204
            assert problem(await scene.put(other)) == "changed-message"
            await check()
            for later in range(1, N):  # it is said that it was said, also when its turn is over
                assert (
                    await scene.attempt.parties[later].put(phase, await scene.own(scene.attempt.parties[later]))
                ).status_code == 204
            assert (await scene.put(said)).status_code == 204
            assert problem(await scene.put(other)) == "changed-message"
            await finish(scene, since=list(Phase)[list(Phase).index(phase) + 1])

    asyncio.run(scenario())


async def finish(scene: Scene, since: Phase) -> None:
    """The rest of the round, which comes to what it must."""
    phases = list(Phase)
    for phase in phases[phases.index(since) :]:
        assert await scene.attempt.speak(phase, range(N))
    [record] = await scene.it.ended(1)
    assert record["committed"], record["reason"]
    model = (await scene.it.model(record["model_sha256"]))["w"]
    assert model.equal(scene.attempt.model(STATE["w"], range(N)))


def test_a_report_again_has_the_same_answer_whatever_it_says_then(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            scene = await brought_to(it, Phase.MASKED_INPUT)
            await scene.one.hear()
            update = scene.one.masked(scene.attempt.changes[0])
            first = await scene.one.send_input(update)
            assert first.json()["outcome"] == "accepted"
            await settled(scene)
            check = await unchanged(it)
            assert (await scene.one.report(update)).json() == first.json()
            assert (await scene.one.report(update, update_sha256="0" * 64)).json() == first.json()
            assert problem(await scene.one.device.upload(scene.one.offer.id, bytes(len(update)))) in (
                "upload-complete",
                "assignment-closed",
            )
            await check()
            for party, change in zip(scene.attempt.parties[1:], scene.attempt.changes[1:], strict=True):
                await party.hear()
                await party.send_input(party.masked(change))
            await finish(scene, since=Phase.CONSISTENCY_CHECK)

    asyncio.run(scenario())


async def settled(scene: Scene) -> None:
    """The sum so far is handed in."""
    await scene.attempt.driver._closer.share.settle()


@pytest.mark.parametrize("phase", [Phase.CONSISTENCY_CHECK, Phase.UNMASKING], ids=str)
def test_after_the_sum_is_closed_the_same_again_is_answered_too(phase: Phase, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            scene = await brought_to(it, phase)
            said = await scene.own(scene.one)
            done = 204 if phase is Phase.CONSISTENCY_CHECK else 202
            assert (await scene.put(said)).status_code == done
            await settled(scene)
            check = await unchanged(it)
            assert (await scene.put(said)).status_code == done
            wrong = bytearray(said)
            wrong[-1] ^= 1
            assert problem(await scene.put(bytes(wrong))) == "malformed-request"
            await check()
            if phase is Phase.UNMASKING:
                for party in scene.attempt.parties[1:]:
                    assert (await party.put(phase, await scene.own(party))).status_code in (202, 204)
                await it.ended(1)
                assert (await scene.put(said)).status_code == 204
                return
            for party in scene.attempt.parties[1:]:
                assert (await party.put(phase, await scene.own(party))).status_code == 204
            await finish(scene, since=Phase.UNMASKING)

    asyncio.run(scenario())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", KEY_PHASES, ids=str)
def test_what_is_no_message_of_this_client_is_refused_and_changes_nothing(phase: Phase, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            scene = await brought_to(it, phase)
            own, theirs = await scene.own(scene.one), await scene.own(scene.other)
            await settled(scene)
            check = await unchanged(it)
            garbage = [b"", b"\0", os.urandom(64), os.urandom(132), os.urandom(4096), own[:-1], own + b"\0", theirs]
            garbage += [bytes(len(own)), bytes([*own[:-1], own[-1] ^ 1]), b"\xff" * len(own), b"\xff" * 8]
            for body in garbage:
                assert problem(await scene.put(body)) == "malformed-request", body[:20]
            assert problem(await scene.put(bytes(SECURE_BYTES_MAX + 1))) == "body-too-large"
            url = f"/v1/assignments/{scene.one.offer.id}/secure/{phase}"
            assert problem(await it.http.put(url, content=own)) == "malformed-signature"
            assert problem(await it.http.get(url)) == "malformed-signature"
            octets = {"Content-Type": "application/octet-stream"}
            forged = {**scene.one.device.headers("PUT", url, own), **octets}
            assert problem(await it.http.put(url, content=theirs[: len(own)], headers=forged)) == "wrong-digest"
            assert problem(await scene.other.device.send("PUT", url, own, octets)) == "unknown-assignment"
            assert problem(await scene.other.device.send("GET", url)) == "unknown-assignment"
            nowhere = f"/v1/assignments/{scene.one.offer.id}/secure/handshake"
            assert problem(await scene.one.device.send("PUT", nowhere, own, octets)) == "not-found"
            assert problem(await scene.one.device.send("GET", nowhere)) == "not-found"
            await check()
            assert (await scene.put(own)).status_code in (202, 204)

    asyncio.run(scenario())


@pytest.mark.parametrize("phase", list(Phase), ids=str)
def test_messages_of_other_phases_are_not_taken(phase: Phase, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            scene = await brought_to(it, phase)
            await settled(scene)
            check, phases, fetched = await unchanged(it), list(Phase), 0
            for other in phases:
                answer = await scene.put(os.urandom(64), other)
                if other is not phase:
                    assert answer.status_code >= 400, (other, answer.status_code)
                    assert problem(answer) in ("assignment-closed", "malformed-request"), other
                    told = await scene.one.device.send("GET", f"/v1/assignments/{scene.one.offer.id}/secure/{other}")
                    fetched += len(told.content) if told.status_code == 200 else 0
                    if phases.index(other) > phases.index(phase):
                        assert told.status_code == 204, "not yet"
            assert problem(await scene.put(b"", Phase.MASKED_INPUT)) == "malformed-request", "that is a report"
            told = await scene.one.device.send("GET", f"/v1/assignments/{scene.one.offer.id}/secure/advertise-keys")
            assert problem(told) == "not-found"
            scene.attempt.driver.note_message(scene.one.offer.id, down=-fetched)  # that alone was counted
            await check()

    asyncio.run(scenario())


def test_shares_that_come_while_the_roster_is_open_are_refused_and_the_round_goes_on_with_all_clients(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            scene = await brought_to(it, Phase.ADVERTISE_KEYS)
            await scene.attempt.speak(Phase.ADVERTISE_KEYS, range(N - 1))
            check = await unchanged(it)
            answer = await scene.put(os.urandom(64), Phase.SHARE_KEYS)
            assert problem(answer) == "assignment-closed"
            assert "the roster of this round is not closed yet" in answer.json()["detail"]
            await check()
            await scene.attempt.speak(Phase.ADVERTISE_KEYS, [N - 1])
            await finish(scene, since=Phase.SHARE_KEYS)

    asyncio.run(scenario())


def test_a_reveal_before_its_turn_is_refused_and_not_said_to_be_needed_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            scene = await brought_to(it, Phase.CONSISTENCY_CHECK)
            shares = {dealer: pair[0] for dealer, pair in scene.one.party._held.items()}  # pyright: ignore[reportPrivateUsage]
            early = Unmasking(scene.one.party.index, shares).encode()
            assert problem(await scene.put(early, Phase.UNMASKING)) == "assignment-closed"
            await finish(scene, since=Phase.CONSISTENCY_CHECK)

    asyncio.run(scenario())


def test_keys_that_nobody_should_have_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            scene = await brought_to(it, Phase.ADVERTISE_KEYS)
            assert (await scene.other.put("advertise-keys", await scene.own(scene.other))).status_code == 204
            theirs = AdvertiseKeys.decode(scene.other.party.advertise())
            fresh, party = KeyPair(os.urandom(32)).public, scene.one.party
            for pair in (
                (bytes(32), fresh),  # of small order
                (fresh, b"\x01" + bytes(31)),
                (fresh, fresh),
                (fresh[:31] + bytes([fresh[31] | 0x80]), theirs.mask_key),  # not the one way to write it
                (fresh, theirs.mask_key),
                (theirs.mask_key, fresh),
            ):
                unsigned = AdvertiseKeys(party.index, *pair, b"")
                signature = sign(scene.one.device.key, Label.ADVERTISE_KEYS, party.context.digest, unsigned.payload)
                body = AdvertiseKeys(party.index, *pair, signature).encode()
                assert problem(await scene.put(body)) == "malformed-request"
            other_context = sign(scene.one.device.key, Label.ADVERTISE_KEYS, bytes(32), theirs.payload)
            body = AdvertiseKeys(party.index, fresh, theirs.channel_key[::-1], other_context).encode()
            assert problem(await scene.put(body)) == "malformed-request"
            assert (await scene.put(party.advertise())).status_code == 204

    asyncio.run(scenario())


# --- masked updates and their reports ---------------------------------------------------------------------------------


def test_a_masked_update_has_one_length_one_codec_and_a_report_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            scene = await brought_to(it, Phase.MASKED_INPUT)
            one = scene.one
            await one.hear()
            update = one.masked(scene.attempt.changes[0])
            check = await unchanged(it)
            for wrong in (update[:-1], update + b"\0", update[:-8], update[:64]):
                assert problem(await one.device.upload(one.offer.id, wrong)) == "lying-length"
            other = header_for(LAYOUT, Codec.INTEGER, len(update) - 64).encode() + update[64:]
            assert problem(await one.device.upload(one.offer.id, other)) == "wrong-codec"
            assert problem(await one.report(update)) == "upload-incomplete"
            await check()
            assert (await one.device.upload(one.offer.id, update)).status_code == 201
            check = await unchanged(it)
            clear = await one.device.report(one.offer.id, update, sample_count=7)
            assert problem(clear) == "report-refused"
            assert "secure" in clear.json()["detail"]
            for changed, kind in (
                ({"update_sha256": "0" * 64}, "report-refused"),
                ({"signature": "A" * 86 + "=="}, "report-refused"),
                ({"signature": "A" * 40}, "malformed-request"),
                ({"sample_count": 7}, "malformed-request"),
                ({"metrics": {"loss": 0.1}}, "malformed-request"),
            ):
                assert problem(await one.report(update, **changed)) == kind, changed
            await check()
            assert (await one.report(update)).json()["outcome"] == "accepted"

    asyncio.run(scenario())


def test_a_masked_report_is_refused_where_the_round_is_not_secure(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(target=2, minimum=2), STATE)
            devices = await it.devices(2)
            [work, _] = await asyncio.gather(*(one.work(LAYOUT) for one in devices))
            check = await unchanged(it)
            url, report = f"/v1/assignments/{work['id']}", {"update_sha256": "0" * 64, "signature": "A" * 86 + "=="}
            answer = await devices[0].send("PUT", f"{url}/report", json.dumps(report).encode())
            assert problem(answer) == "report-refused"
            assert "not a secure round" in answer.json()["detail"]
            for phase in Phase:
                assert problem(await devices[0].send("PUT", f"{url}/secure/{phase}", b"x")) in (
                    "assignment-closed",
                    "malformed-request",
                )
                assert problem(await devices[0].send("GET", f"{url}/secure/{phase}")) in (
                    "assignment-closed",
                    "not-found",
                )
            await check()

    asyncio.run(scenario())


@pytest.mark.parametrize("phase", [Phase.ADVERTISE_KEYS, Phase.SHARE_KEYS], ids=str)
def test_updates_are_not_taken_before_it_is_known_who_has_shared(phase: Phase, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            scene = await brought_to(it, phase)
            check = await unchanged(it)
            report = {"update_sha256": "0" * 64, "signature": "A" * 86 + "=="}
            url = f"/v1/assignments/{scene.one.offer.id}/report"
            answer = await scene.one.device.send("PUT", url, json.dumps(report).encode())
            assert answer.json()["outcome"] == "surplus"
            assert "not time yet" in answer.json()["reason"]
            await check()
            for later in list(Phase)[list(Phase).index(phase) :]:
                assert await scene.attempt.speak(later, range(N))
            assert (await it.ended(1))[0]["committed"]

    asyncio.run(scenario())


# --- after the end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stopped", [False, True], ids=["committed", "abandoned"])
def test_an_attempt_that_is_over_takes_nothing_more(is_stopped: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            scene = await brought_to(it, Phase.SHARE_KEYS if is_stopped else Phase.UNMASKING)
            if is_stopped:
                stopped = await it.http.post("/v1/admin/runs/demo/stop", json={"reason": "enough"}, headers=it.admin)
                assert stopped.status_code == 200
            else:
                await scene.attempt.speak(Phase.UNMASKING, range(N))
            await it.ended(1)
            check = await unchanged(it)
            for phase in Phase:
                answer = await scene.put(os.urandom(64), phase)
                if phase is Phase.UNMASKING:
                    assert answer.status_code == 204, "it is not needed any more"
                else:
                    assert problem(answer) == "assignment-closed", phase
                told = await scene.one.device.send("GET", f"/v1/assignments/{scene.one.offer.id}/secure/{phase}")
                assert problem(told) == "assignment-closed", phase
            await check()

    asyncio.run(scenario())


def test_a_client_reveals_one_thing_only(tmp_path: Path) -> None:
    """Another message of shares is refused though each of them is the right one, and the first still counts."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            scene = await brought_to(it, Phase.UNMASKING)
            said = await scene.own(scene.one)
            index = scene.one.party.index
            shares = Unmasking.decode(said, index, N).shares
            other = Unmasking(index, {dealer: share for dealer, share in shares.items() if dealer == index}).encode()
            assert (await scene.put(said)).status_code == 202
            check = await unchanged(it)
            assert problem(await scene.put(other)) == "changed-message"
            assert (await scene.put(said)).status_code == 202
            await check()
            await scene.attempt.speak(Phase.UNMASKING, range(1, N))
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            assert (await scene.put(other)).status_code == 204, "nothing is needed any more"

    asyncio.run(scenario())


def test_who_is_not_in_the_sum_has_nothing_to_sign_or_reveal(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            run = secure_run(target=4, minimum=4, over_selection=1.25)
            await it.begin(run, STATE)
            attempt = Attempt.of(it, LateClock(), await it.devices(5, sample_count=0))
            await attempt.each(SecureDevice.begin)
            await attempt.speak(Phase.ADVERTISE_KEYS, range(5))
            await attempt.speak(Phase.SHARE_KEYS, range(5))
            left_over = attempt.parties[4]
            await left_over.hear()
            await attempt.speak(Phase.MASKED_INPUT, range(4))
            await attempt.speak(Phase.CONSISTENCY_CHECK, range(4))
            shares = {dealer: pair[0] for dealer, pair in left_over.party._held.items()}  # pyright: ignore[reportPrivateUsage]
            body = Unmasking(left_over.party.index, shares).encode()
            assert problem(await left_over.put("unmasking", body)) in ("malformed-request", "assignment-closed")
            assert problem(await left_over.put("consistency-check", os.urandom(64))) == "assignment-closed"
            await attempt.speak(Phase.UNMASKING, range(4))
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            assert (await it.model(record["model_sha256"]))["w"].equal(attempt.model(STATE["w"], range(4)))
            assert work_of(4).sample_count not in (record["sample_count"],)

    asyncio.run(scenario())
