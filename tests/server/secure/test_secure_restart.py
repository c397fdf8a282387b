"""A coordinator that goes away in any phase of a secure round: another over the same data goes on to the same model.
Masked updates lie in store no longer than until the sum with them does."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.federations.secure_cohort import STATE, Attempt, secure_run
from tests.federations.secure_device import SecureDevice
from tests.federations.server_device import House, LateClock, house, rows, stored_updates
from tests.servers.waits import until
from umbel.aggregation.secagg.numbers.composition import composition_of
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.update.grid import IntegerSum
from umbel.server.sums import share
from umbel.server.sums.share import Folding, HandedIn, ReplicaShare

pytestmark = pytest.mark.usefixtures("any_database_in_time")
N = 4


async def begun(it: House, n: int = N) -> Attempt:
    await it.begin(secure_run(target=n, minimum=3), STATE)
    attempt = Attempt.of(it, LateClock(), await it.devices(n, sample_count=0))
    await attempt.each(SecureDevice.begin)
    return attempt


async def require_the_model(attempt: Attempt) -> None:
    [record] = await attempt.it.ended(1)
    assert record["committed"], record["reason"]
    assert record["sample_count"] == sum(one.work.sample_count for one in attempt.parties)
    assert (await attempt.it.model(record["model_sha256"]))["w"].equal(
        attempt.model(STATE["w"], range(len(attempt.parties)))
    )


def partial_sums(it: House) -> list[Path]:
    return [path for path in (it.settings.data / "blobs" / "partials").rglob("*") if path.is_file()]


async def say_again(attempt: Attempt, phase: Phase) -> None:
    """What clients do that have had no answer: they send the same again."""
    for one in attempt.parties:
        if phase is Phase.ADVERTISE_KEYS:
            answer = await one.put(phase, one.party.advertise())
        elif phase is Phase.SHARE_KEYS:
            answer = await one.put(phase, one.party.share(await one.get(phase)))
        elif phase is Phase.CONSISTENCY_CHECK:
            answer = await one.put(phase, one.party.agree(await one.get(phase)))
        else:
            continue
        assert answer.status_code == 204, answer.text


@pytest.mark.parametrize("phase", list(Phase)[:-1], ids=str)
def test_after_every_phase_another_coordinator_goes_on(phase: Phase, tmp_path: Path) -> None:
    async def scenario() -> None:
        phases = list(Phase)
        n = phases.index(phase) + 1
        async with house(tmp_path) as it:
            attempt = await begun(it)
            for one in phases[:n]:
                assert await attempt.speak(one, range(N))
        async with house(tmp_path) as it:
            attempt.move_to(it)
            await say_again(attempt, phase)
            for one in phases[n:]:
                assert await attempt.speak(one, range(N))
            await require_the_model(attempt)

    asyncio.run(scenario())


@pytest.mark.parametrize("phase", list(Phase), ids=str)
def test_in_the_midst_of_every_phase_another_coordinator_goes_on(phase: Phase, tmp_path: Path) -> None:
    async def scenario() -> None:
        phases = list(Phase)
        n = phases.index(phase)
        async with house(tmp_path) as it:
            attempt = await begun(it)
            for one in phases[:n]:
                assert await attempt.speak(one, range(N))
            assert await attempt.speak(phase, (1, 3) if phase is not Phase.UNMASKING else (1,))
        async with house(tmp_path) as it:
            attempt.move_to(it)
            for one in phases[n:]:
                assert await attempt.speak(one, (0, 2) if one is phase is not Phase.UNMASKING else range(N))
            await require_the_model(attempt)

    asyncio.run(scenario())


def test_shares_that_all_reveal_at_once_to_a_new_coordinator_count(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            attempt = await begun(it)
            for one in list(Phase)[:-1]:
                assert await attempt.speak(one, range(N))
            answers = [one.party.reveal(await one.get("unmasking")) for one in attempt.parties]
        async with house(tmp_path) as it:
            attempt.move_to(it)
            pairs = zip(attempt.parties, answers, strict=True)
            held = (one.put("unmasking", said, "?wait_s=20") for one, said in pairs)
            assert [one.status_code for one in await asyncio.gather(*held)] == [204] * N, "nobody is asked again"
            await require_the_model(attempt)

    asyncio.run(scenario())


def test_requests_that_come_at_once_know_one_round_and_not_each_its_own(tmp_path: Path) -> None:
    """What is revealed to one of them must be known to the others."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            attempt = await begun(it)
            driver = attempt.driver
            driver.secure.forget()
            at_hand = driver.assignments.of

            async def from_the_database(*asked: object) -> object:
                await asyncio.sleep(0)  # as in a coordinator that has just started
                return await at_hand(*asked)

            driver.secure._assignment_of = from_the_database
            first, second = await asyncio.gather(driver.secure._of(driver.live), driver.secure._of(driver.live))
            assert first is second

    asyncio.run(scenario())


def test_updates_that_were_not_handed_in_are_folded_from_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async def not_yet(_share: ReplicaShare) -> None:
            return

        with monkeypatch.context() as patch:
            patch.setattr(ReplicaShare, "_hand_in", not_yet)
            async with house(tmp_path) as it:
                attempt = await begun(it)
                for phase in list(Phase)[:2]:
                    await attempt.speak(phase, range(N))
                await attempt.speak(Phase.MASKED_INPUT, (0, 3))
                assert len(stored_updates(it.settings)) == 2
        async with house(tmp_path) as it:
            attempt.move_to(it)
            await attempt.speak(Phase.MASKED_INPUT, (1, 2))
            await attempt.speak(Phase.CONSISTENCY_CHECK, range(N))
            await attempt.speak(Phase.UNMASKING, range(N))
            await require_the_model(attempt)

    asyncio.run(scenario())


def test_a_masked_update_is_deleted_as_soon_as_the_sum_with_it_is_in_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "HAND_IN_S", 0.0)

    async def scenario() -> None:
        async with house(tmp_path) as it:
            attempt = await begun(it)
            for phase in list(Phase)[:2]:
                await attempt.speak(phase, range(N))
            composition = composition_of(attempt.parties[0].offer, attempt.parties[0].layout)
            for i in range(N):
                await attempt.speak(Phase.MASKED_INPUT, (i,))
                await until("a store without updates", lambda: not stored_updates(it.settings))
                await until("one stored sum", lambda: len(partial_sums(it)) == 1)
                [path] = partial_sums(it)
                assert path.stat().st_size == 8 * (composition.n_levels + composition.n_words), "of the model's size"
            await attempt.speak(Phase.CONSISTENCY_CHECK, range(N))
            assert rows(it.settings)["partial_sums"]
            await attempt.speak(Phase.UNMASKING, range(N))
            await require_the_model(attempt)
            assert not rows(it.settings)["partial_sums"], "the end of an attempt removes the rows of its sums"
            await until("a store without sums", lambda: not partial_sums(it))

    asyncio.run(scenario())


def test_a_sum_is_not_written_for_each_update_of_a_trickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is as large as eight updates."""
    monkeypatch.setattr(share, "HAND_IN_S", 3600.0)
    monkeypatch.setattr(share, "KEPT_MAX", 2)

    async def scenario() -> None:
        async with house(tmp_path) as it:
            attempt = await begun(it)
            for phase in list(Phase)[:2]:
                await attempt.speak(phase, range(N))
            mine = attempt.driver._closer.share
            await attempt.speak(Phase.MASKED_INPUT, (0,))
            await until("the first sum", lambda: not stored_updates(it.settings))
            await attempt.speak(Phase.MASKED_INPUT, (1,))
            await until("a hand-in that waits", lambda: mine._handing_in is not None and not mine._handing_in.done())
            assert (mine._n_posted, len(stored_updates(it.settings))) == (1, 1)
            await attempt.speak(Phase.MASKED_INPUT, (2,))
            await until("the second sum", lambda: not stored_updates(it.settings))
            assert mine._n_posted == 2
            await attempt.speak(Phase.MASKED_INPUT, (3,))
            await attempt.speak(Phase.CONSISTENCY_CHECK, range(N))
            await attempt.speak(Phase.UNMASKING, range(N))
            await require_the_model(attempt)

    asyncio.run(scenario())


def test_updates_that_come_at_once_are_deleted_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            attempt = await begun(it)
            for phase in list(Phase)[:3]:
                await attempt.speak(phase, range(N))
            await until("a store without updates", lambda: not stored_updates(it.settings))
            assert len(partial_sums(it)) == 1
            await attempt.speak(Phase.CONSISTENCY_CHECK, range(N))
            await attempt.speak(Phase.UNMASKING, range(N))
            await require_the_model(attempt)

    asyncio.run(scenario())


@pytest.mark.slow
def test_while_updates_keep_coming_few_of_them_are_in_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the sum is being made, and while it is being written, another always comes."""
    n, arriving, total, write = 9, list[int](), Folding.total, Folding.write

    async def another(folding: Folding) -> None:
        before = len(folding.clients)
        await until("another update", lambda: not arriving or len(folding.clients) > before)

    async def never_still(self: Folding) -> IntegerSum:
        found = await total(self)
        await another(self)
        return found

    async def write_slowly(self: Folding, path: Path) -> HandedIn:
        written = await write(self, path)
        await another(self)
        return written

    async def scenario() -> None:
        async with house(tmp_path) as it:
            attempt = await begun(it, n)
            for phase in list(Phase)[:2]:
                await attempt.speak(phase, range(n))
            monkeypatch.setattr(share, "KEPT_MAX", 2)
            monkeypatch.setattr(Folding, "total", never_still)
            monkeypatch.setattr(Folding, "write", write_slowly)
            arriving.extend(range(n))
            while arriving:
                await attempt.speak(Phase.MASKED_INPUT, (arriving[0],))
                arriving.pop(0)
                await until("at most two stored updates", lambda: len(stored_updates(it.settings)) <= 2)
                assert len(partial_sums(it)) <= 2, "that of before goes when the next is in its place"
            await attempt.speak(Phase.CONSISTENCY_CHECK, range(n))
            await attempt.speak(Phase.UNMASKING, range(n))
            await require_the_model(attempt)

    asyncio.run(scenario())


def test_no_sum_takes_the_place_of_one_with_more_in_it(tmp_path: Path) -> None:
    """What the first had in it is not in store any more."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            attempt = await begun(it)
            for phase in list(Phase)[:2]:
                await attempt.speak(phase, range(N))
            await attempt.speak(Phase.MASKED_INPUT, (0, 3))
            await until("a store without updates", lambda: not stored_updates(it.settings))
            rounds, live = it.state.services.rounds, attempt.driver.live
            [posted] = await rounds.partial_sums(live.round_id)
            assert posted.clients == ("d0", "d3")
            assert not await rounds.post_partial_sum(live, replace(posted, clients=("d3",)))
            assert not await rounds.post_partial_sum(live, replace(posted, clients=("d0", "d1", "d3"))), "not in yet"
            assert await rounds.partial_sums(live.round_id) == (posted,)

    asyncio.run(scenario())


def test_of_an_abandoned_attempt_nothing_masked_is_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            attempt = await begun(it)
            for phase in list(Phase)[:2]:
                await attempt.speak(phase, range(N))
            await attempt.speak(Phase.MASKED_INPUT, (0, 3))
            stopped = await it.http.post("/v1/admin/runs/demo/stop", json={"reason": "enough"}, headers=it.admin)
            assert stopped.status_code == 200
            [record] = await it.ended(1)
            assert not record["committed"]
            await until(
                "a store without updates and sums", lambda: not stored_updates(it.settings) and not partial_sums(it)
            )

    asyncio.run(scenario())
