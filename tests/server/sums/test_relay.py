"""Three coordinators over one PostgreSQL, in one process: what is revealed at any reaches the one that unmasks."""

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import delete, insert, select, update

from tests.federations.secure_device import SecureDevice, change_of
from tests.federations.secure_federation import secure_run
from tests.federations.server_device import House, Json, LateClock, UntimedClock, house, problem
from tests.servers.files_now import contents_of
from tests.servers.postgres import Cluster
from tests.servers.waits import LIMIT_S, until, until_told
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.round.states import Closing
from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.crypto.sealed import open_relayed
from umbel.aggregation.secagg.messages import Unmasking
from umbel.aggregation.secagg.turns import Phase
from umbel.server.clock import Clock
from umbel.server.runs.coordinator import Coordinator
from umbel.server.store import tables
from umbel.server.store.keys import AuditKey
from umbel.server.store.replicas import RelayStore, closing_job
from umbel.server.sums.relay import Relay

LOG_PAGE_BYTES = 8192
LEASE, RELAYED = tables.table_of(tables.LeaseRow), tables.table_of(tables.RelayedRevealRow)
STATE = {"w": torch.zeros(200)}
LAYOUT = Layout.of_state(STATE)


@asynccontextmanager
async def replicas(
    tmp_path: Path, postgresql: Cluster, count: int, clock: Clock | None = None
) -> AsyncGenerator[tuple[list[House], list[AsyncExitStack]]]:
    """Coordinators, and what each of them can be closed by before the end."""
    shared: dict[str, Any] = {
        "database_url": postgresql.new_database(),
        "blobs": str(tmp_path / "blobs"),
        "admin_key_file": tmp_path / "admin.key",
        "audit_key_file": tmp_path / "audit.key",
    }
    async with AsyncExitStack() as all_of_them:
        stacks = [await all_of_them.enter_async_context(AsyncExitStack()) for _ in range(count)]
        yield (
            [
                await stack.enter_async_context(house(tmp_path / f"replica-{i}", clock, **shared))
                for i, stack in enumerate(stacks)
            ],
            stacks,
        )


async def parties(it: House, count: int = 1, window_s: float = 300.0) -> list[SecureDevice]:
    await it.begin(secure_run(count, window_s), STATE)
    return [SecureDevice(device, LAYOUT) for device in await it.devices(4)]


def speaks_to(party: SecureDevice, it: House) -> None:
    party.device.http = it.http


async def up_to_agreement(party: SecureDevice, number: int) -> None:
    await party.begin()
    await party.advertise()
    await party.share()
    await party.hear()
    assert (await party.send_input(party.masked(change_of(LAYOUT, number)))).json()["outcome"] == "accepted"
    await party.agree()


async def published(it: House) -> tuple[str, bytes] | None:
    """Which replica closes the round, and its key."""
    services, live = it.state.services, (await it.driver()).live
    query = select(LEASE.c.replica, LEASE.c.relay_key).where(LEASE.c.job == closing_job(live.round_id))
    async with services.rounds._db.reading() as tx:
        row = (await tx.execute(query)).one_or_none()
    return None if row is None or row.relay_key is None else (row.replica, row.relay_key)


async def leader_of(houses: Sequence[House]) -> House:
    replica, _ = await until_told("a replica that closes the round", lambda: published(houses[0]))
    return next(it for it in houses if it.state.services.replicas.id == replica)


async def committed(it: House) -> Json:
    [record] = await it.ended(1)
    assert record["committed"], record["reason"]
    assert record["reported"] == 4
    return record


def spellings(secret: bytes) -> Iterator[bytes]:
    """As bytes, as hex, and as base64, wherever in it the secret begins."""
    yield from (secret, secret.hex().encode(), secret.hex().upper().encode())
    for start in range(3):
        yield base64.b64encode(secret[start : start + 27])


def written(since: float, *folders: Path) -> bytes:
    """Every file that has been written to: of a database its tables and its log of writes, of coordinators all."""
    recent = [found for folder in folders for found in contents_of(folder, since)]
    log = b"".join(of_log(data) for path, data in recent if path.parent.name == "pg_wal")  # a record may lie in two
    return b"\0".join([log, *(data for path, data in recent if path.parent.name != "pg_wal")])


def of_log(segment: bytes) -> bytes:
    """What a segment of PostgreSQL's log of writes holds, without its pages' headers: a record goes on after one."""
    starts = range(0, len(segment), LOG_PAGE_BYTES)
    return b"".join(segment[at + (24 if at else 40) : at + LOG_PAGE_BYTES] for at in starts)


@pytest.mark.nightly
@pytest.mark.slow
def test_what_is_revealed_anywhere_reaches_the_one_that_unmasks_and_is_never_stored(
    tmp_path: Path, postgresql: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    revealed, handed_over, since = list[bytes](), list[bytes](), time.time() - 1.0
    put = RelayStore.put

    async def seen(self: RelayStore, round_id: int, key: bytes, sealed: Any) -> bool:
        is_stored = await put(self, round_id, key, sealed)
        if is_stored:  # else the key was another's by then, and nothing was written
            handed_over.extend(sealed.values())
        return is_stored

    async def scenario() -> None:
        async with replicas(tmp_path, postgresql, 3) as (houses, _):
            cohort = await parties(houses[0])
            for i, party in enumerate(cohort):
                speaks_to(party, houses[i % 3])
            await asyncio.gather(*(up_to_agreement(party, i) for i, party in enumerate(cohort)))
            leader = await leader_of(houses)
            others = [it for it in houses if it is not leader]
            for i, party in enumerate(cohort):
                speaks_to(party, others[i % 2])
                reveal = party.party.reveal

                def kept(agreements: bytes, reveal: Callable[[bytes], bytes] = reveal, index: int = i) -> bytes:
                    answer = reveal(agreements)
                    revealed.extend(Unmasking.decode(answer, index, 4).shares.values())
                    return answer

                monkeypatch.setattr(party.party, "reveal", kept)
            await asyncio.gather(*(party.reveal() for party in cohort))
            await committed(leader)

    monkeypatch.setattr(RelayStore, "put", seen)
    asyncio.run(scenario())
    stored = written(since, postgresql.directory, tmp_path)
    assert len(revealed) == 4 * 4
    assert len(handed_over) >= 3  # the fourth may have come when the round was over
    assert all(sealed in stored for sealed in handed_over), "the scan does not see what is stored"
    for share in revealed:
        assert not any(spelling in stored for spelling in spellings(share[:32]))


async def relayed(it: House) -> list[tuple[bytes, bytes]]:
    """What stands in the database for whoever unmasks: the key that each is sealed to, and the bytes."""
    async with it.state.services.rounds._db.reading() as tx:
        return [(row.relay_key, row.sealed) for row in await tx.execute(select(RELAYED))]


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "could not hand over" in line]


@pytest.mark.usefixtures("any_database")
def test_nothing_is_sealed_to_a_key_that_no_replica_has_signed_for_this_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with house(tmp_path / "house") as it:
            cohort = await parties(it)
            for step in (SecureDevice.begin, SecureDevice.advertise, SecureDevice.share):
                await asyncio.gather(*(step(party) for party in cohort))
            services, session = it.state.services, cohort[0].party._require_session()  # pyright: ignore[reportPrivateUsage]
            live = (await it.driver()).live
            job, thief, message = closing_job(live.round_id), KeyPair(secrets.token_bytes(32)), b"shares"
            replicas_key, another = services.audit_key, AuditKey(secrets.token_bytes(32))
            forged = {
                "none at all": None,
                "another key's": another.sign_relay_key(session.digest, thief.public),
                "of another attempt": replicas_key.sign_relay_key(secrets.token_bytes(32), thief.public),
                "of another key": replicas_key.sign_relay_key(session.digest, KeyPair(bytes(31) + b"\1").public),
                "of an audit bundle": replicas_key._key.sign(b"umbel audit bundle 1\n" + session.digest + thief.public),
            }

            async def plant(signature: bytes | None) -> None:
                async with services.rounds._db.writing("plant") as tx:
                    await tx.execute(delete(LEASE).where(LEASE.c.job == job))
                    planted = {"relay_key": thief.public, "relay_signature": signature}
                    await tx.execute(insert(LEASE).values(job=job, replica="anybody", **planted))

            def relay_that_has_heard() -> Relay:
                relay = Relay(services.relay, services.audit_key, live.round_id, session)
                relay.keep(0, message)
                return relay

            for number, (what, signature) in enumerate(forged.items(), start=1):
                relay = relay_that_has_heard()
                await plant(signature)
                for _ in range(3):
                    await relay.hand_over()
                assert await relayed(it) == [], what
                assert len(refusals(caplog)) == number, "it is told once"
            await plant(replicas_key.sign_relay_key(session.digest, thief.public))
            await relay_that_has_heard().hand_over()
            [(key, sealed)] = await relayed(it)
            assert key == thief.public, "who has the audit key is a replica"
            assert open_relayed(thief, session.digest, 0, sealed) == message

    asyncio.run(scenario())


def test_a_key_that_is_planted_among_replicas_gets_nothing_and_the_round_goes_on(
    tmp_path: Path, postgresql: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, postgresql, 2) as (houses, _):
            cohort = await parties(houses[0])
            await asyncio.gather(*(up_to_agreement(party, i) for i, party in enumerate(cohort)))
            leader = await leader_of(houses)
            other = next(it for it in houses if it is not leader)
            secure, services = (await leader.driver()).secure, other.state.services
            with monkeypatch.context() as patch:
                is_idle = asyncio.Event()

                async def collect_nothing(_: object) -> None:
                    is_idle.set()

                patch.setattr(secure, "collect", collect_nothing)  # it would put its own key back
                await asyncio.wait_for(is_idle.wait(), LIMIT_S)
                thief = KeyPair(secrets.token_bytes(32))
                async with services.rounds._db.writing("plant") as tx:
                    await tx.execute(update(LEASE).values(relay_key=thief.public))
                for party in cohort:
                    speaks_to(party, other)
                answers = [asyncio.create_task(party.reveal()) for party in cohort]

                async def is_refused() -> bool:
                    assert await relayed(other) == []
                    return bool(refusals(caplog))

                await until_told("a refusal in the log", is_refused)
            await asyncio.gather(*answers)
            await committed(leader)

    asyncio.run(scenario())


def test_when_the_one_that_unmasks_goes_what_it_had_taken_is_handed_to_the_next(
    tmp_path: Path, postgresql: Cluster
) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, postgresql, 3) as (houses, stacks):
            cohort = await parties(houses[0])
            await asyncio.gather(*(up_to_agreement(party, i) for i, party in enumerate(cohort)))
            leader = await leader_of(houses)
            before = await published(leader)
            others = [it for it in houses if it is not leader]
            for i, party in enumerate(cohort):
                speaks_to(party, others[i % 2])
            answers = [asyncio.create_task(party.reveal()) for party in cohort[:2]]
            secure = (await leader.driver()).secure

            def heard() -> int:
                attempt = secure._attempt
                return 0 if attempt is None else len(attempt.party.answered)

            await until("two clients' shares at the leader", lambda: heard() == 2, heard)
            await stacks[houses.index(leader)].aclose()
            assert not any(answer.done() for answer in answers), "with two of three shares nothing can be unmasked"
            after = await published(await leader_of(others))
            assert before is not None
            assert after is not None
            assert before[1] != after[1]
            await asyncio.gather(cohort[2].reveal(), *answers)  # with the first two, just enough
            await committed(others[0])

    asyncio.run(scenario())


def test_a_client_that_hears_of_its_turn_at_one_may_speak_to_another(
    tmp_path: Path, postgresql: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to speak in each phase does so at a replica that has not seen the phase before end."""

    async def scenario() -> None:
        async with replicas(tmp_path, postgresql, 2) as ((one, other), _):
            *rest, first = await parties(one)
            await other.driver()

            async def elsewhere(phase: str, body: bytes, query: str = "") -> int:
                speaks_to(first, other)
                status = (await first.put(phase, body, query)).status_code
                speaks_to(first, one)
                return status

            with monkeypatch.context() as patch:
                await blinded(patch, one, other)
                await asyncio.gather(*(party.begin() for party in (first, *rest)))
                assert await elsewhere("advertise-keys", first.party.advertise()) == 204
                await asyncio.gather(*(party.advertise() for party in rest))
                assert await elsewhere("share-keys", first.party.share(await first.get("share-keys"))) == 204
                await asyncio.gather(*(party.share() for party in rest))
                await asyncio.gather(*(party.hear() for party in (first, *rest)))
                updates = [party.masked(change_of(LAYOUT, i)) for i, party in enumerate((first, *rest))]
                speaks_to(first, other)
                for party, update in zip((first, *rest), updates, strict=True):
                    assert (await party.send_input(update)).json()["outcome"] == "accepted"
                speaks_to(first, one)
                assert (
                    await elsewhere("consistency-check", first.party.agree(await first.get("consistency-check"))) == 204
                )
                await asyncio.gather(*(party.agree() for party in rest))
                shares = first.party.reveal(await first.get("unmasking"))
                assert await elsewhere("unmasking", shares, "?wait_s=0") == 202
            await asyncio.gather(*(party.reveal() for party in rest))
            await committed(one)

    asyncio.run(scenario())


def test_a_client_that_hears_of_the_sum_at_one_may_refuse_it_at_another(
    tmp_path: Path, postgresql: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has not seen that the round has closed, and all three would have to sign."""

    async def scenario() -> None:
        clock = LateClock()
        async with replicas(tmp_path, postgresql, 2, clock) as ((one, other), _):
            cohort = await parties(one)
            await other.driver()
            with monkeypatch.context() as patch:
                await blinded(patch, one, other)
                await asyncio.gather(*(party.begin() for party in cohort))
                await asyncio.gather(*(party.advertise() for party in cohort))
                await asyncio.gather(*(party.share() for party in cohort))
                await asyncio.gather(*(party.hear() for party in cohort))
                for i, party in enumerate(cohort):
                    update = party.masked(change_of(LAYOUT, i))
                    assert (await party.send_input(update)).json()["outcome"] == "accepted"
                await cohort[0].get("consistency-check")
                speaks_to(cohort[0], other)
                assert (await cohort[0].decline("not with so few")).status_code == 204
                clock.late_s += 300.0  # the others, who say nothing, are waited for no longer
                (await other.driver()).wake()
                [record] = await other.ended(1)
                assert record["reason"].endswith("; declined by d0")

    asyncio.run(scenario())


def test_shares_that_come_to_a_replica_that_has_not_seen_the_end_are_not_refused(
    tmp_path: Path, postgresql: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, postgresql, 2) as (houses, _):
            cohort = await parties(houses[0])
            await asyncio.gather(*(up_to_agreement(party, i) for i, party in enumerate(cohort)))
            leader = await leader_of(houses)
            other = next(it for it in houses if it is not leader)
            for party in cohort:
                speaks_to(party, leader)
            shares = cohort[3].party.reveal(await cohort[3].get("unmasking"))
            driver = await other.driver()
            await until("unmasking at the other", lambda: is_in(driver, Phase.UNMASKING), lambda: driver.state)
            with monkeypatch.context() as patch:
                await blinded(patch, other)
                await asyncio.gather(*(party.reveal() for party in cohort[:3]))
                assert isinstance(driver.state, Closing), "it has seen the end"
                driver.secure.forget()  # as if it had not served this round before
                speaks_to(cohort[3], other)
                answer = await cohort[3].put("unmasking", shares, "?wait_s=0")
            assert answer.status_code == 204, problem(answer)

    asyncio.run(scenario())


def is_in(driver: Any, phase: Phase) -> bool:
    state = driver.state
    return isinstance(state, Closing) and state.exchange is not None and state.exchange.phase is phase


async def blinded(patch: pytest.MonkeyPatch, *houses: House) -> None:
    """Have the looks of these replicas at what others do come late: from now on they see nothing."""
    waiting_for = {it.state.coordinator for it in houses}

    async def see_nothing(self: Coordinator, *_: object) -> None:
        waiting_for.discard(self)  # it looks at one run after the other: the look before has ended

    patch.setattr(Coordinator, "_look_at", see_nothing)
    await until("looks that see nothing", lambda: not waiting_for)


def test_a_client_that_waits_at_one_hears_that_its_turn_has_come_at_another(
    tmp_path: Path, postgresql: Cluster
) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, postgresql, 2, UntimedClock()) as ((one, other), _):
            cohort = await parties(one)
            await asyncio.gather(*(party.begin() for party in cohort))
            speaks_to(cohort[0], other)
            await cohort[0].advertise()
            waiting = asyncio.create_task(cohort[0].get("share-keys", wait_s=29.0))
            await asyncio.gather(*(party.advertise() for party in cohort[1:]))
            assert await asyncio.wait_for(waiting, LIMIT_S)
            shares = cohort[0].party.share(waiting.result())
            waiting = asyncio.create_task(cohort[0].get("masked-input", wait_s=29.0))
            answer = await cohort[0].put("share-keys", shares)
            assert answer.status_code == 204, problem(answer)
            await asyncio.gather(*(party.share() for party in cohort[1:]))
            assert await asyncio.wait_for(waiting, LIMIT_S)

    asyncio.run(scenario())


def test_only_the_one_that_unmasks_says_that_it_took_too_long(
    tmp_path: Path, postgresql: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is at work when the time for shares is over. They are in; a replica that does not know ends nothing."""

    async def scenario() -> None:
        clock, looks = LateClock(), set[str]()
        async with replicas(tmp_path, postgresql, 2, clock) as (houses, _):
            cohort = await parties(houses[0])
            drivers = {it.state.services.replicas.id: await it.driver() for it in houses}

            async def over_time(me: str) -> None:
                """Return when the time for shares is over, and the other replica has seen that."""
                [other] = (driver for replica, driver in drivers.items() if replica != me)
                await until("unmasking at the other", lambda: is_in(other, Phase.UNMASKING), lambda: other.state)

                def has_looked() -> bool:
                    clock.late_s += max(0.0, other.state.exchange.ends_at + 1.0 - clock.now())
                    return bool(looks - {me})

                for _ in range(2):  # what follows from a look is done before the next
                    looks.clear()
                    await until("a look of the other at the clock", has_looked)

            for replica, driver in drivers.items():
                unmasked, may_end = driver._closer._unmasked, driver._may_end

                async def slowly(*given: Any, me: str = replica, unmasked: Any = unmasked) -> Any:
                    if (found := await unmasked(*given)) is not None:
                        await over_time(me)
                    return found

                async def asked(live: Any, me: str = replica, may_end: Any = may_end) -> bool:
                    answer = await may_end(live)
                    looks.add(me)
                    return bool(answer)

                monkeypatch.setattr(driver._closer, "_unmasked", slowly)
                monkeypatch.setattr(driver, "_may_end", asked)
            await asyncio.gather(*(up_to_agreement(party, i) for i, party in enumerate(cohort)))
            await asyncio.gather(*(party.reveal() for party in cohort))
            await committed(houses[0])
            assert looks

    asyncio.run(scenario())
