"""What a token binds counts, and nobody else gets it; what a client says of itself is shown, and counts for nothing."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import httpx
import pytest

from tests.federations.server_device import Device, House, Json, LateClock, house, problem, rows, run_file, small_state
from tests.servers.waits import until_told
from umbel.aggregation.model.layout import Layout
from umbel.server.http.routes_admin import TOKENS_MAX

pytestmark = pytest.mark.usefixtures("any_database")

FLOOR = run_file(target=2, minimum=2) + '[coverage]\nsites = ["hospital-a"]\ntiers = ["gold"]\nstrict = true\n'
WEEK_S = 7 * 86400.0
Labels: TypeAlias = Mapping[str, str]


async def enrolled(
    it: House, name: str, *, is_bound: bool = False, labels: Labels | None = None, says: Labels | None = None
) -> Device:
    """A client whose token binds its name, if so, and `labels`, and that says more of itself."""
    [token] = await it.tokens(client=name if is_bound else None, labels=labels)
    device = Device(it.http, name)
    answer = await device.enrol(token, says)
    assert answer.status_code == 200, answer.text
    return device


async def views(it: House) -> dict[str, Json]:
    answer = await it.http.get("/v1/admin/clients", headers=it.admin)
    return {view["id"]: view for view in answer.json()}


def test_a_token_that_binds_a_name_enrols_that_name_only_and_is_still_good_after_a_wrong_try(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [token] = await it.tokens(client="hospital-a", labels={"tier": "gold"})
            refusal = await Device(it.http, "hospital-b").enrol(token)
            assert problem(refusal) == "token-mismatch"
            assert refusal.json()["detail"] == (
                "this token is for 'hospital-a', and this client enrols as 'hospital-b'. If you are 'hospital-a', use "
                "that name; if you are 'hospital-b', ask the operator for a token for 'hospital-b'"
            )
            assert (await Device(it.http, "hospital-a").enrol(token)).status_code == 200

    asyncio.run(scenario())


def test_labels_are_the_tokens_and_beside_them_the_clients_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [token] = await it.tokens(client="north", labels={"tier": "gold"})
            refusal = await Device(it.http, "north").enrol(token, {"tier": "silver"})
            assert problem(refusal) == "token-mismatch"
            assert "tier=gold, but the enrolment says tier=silver" in refusal.json()["detail"]
            assert (await Device(it.http, "north").enrol(token, {"side": "n"})).status_code == 200
            await enrolled(it, "south", says={"tier": "gold"})
            found = await views(it)
        assert found["north"]["labels"] == {"tier": "gold", "side": "n"}
        assert (found["north"]["bound_labels"], found["north"]["is_name_bound"]) == ({"tier": "gold"}, True)
        assert (found["south"]["labels"], found["south"]["bound_labels"]) == ({"tier": "gold"}, {})
        assert not found["south"]["is_name_bound"]

    asyncio.run(scenario())


def test_tokens_in_numbers_may_bind_labels_but_no_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            tokens = await it.tokens(2, labels={"tier": "phone"})
            assert (await Device(it.http, "any-name").enrol(tokens[0])).status_code == 200
            for order in ({"count": 2, "client": "one"}, {"client": "No Slug"}, {"labels": {"tier": "No Slug"}}):
                answer = await it.http.post("/v1/admin/tokens", json=order, headers=it.admin)
                assert problem(answer) == "malformed-request"

    asyncio.run(scenario())


def test_one_order_makes_tokens_up_to_the_limit_and_none_beyond_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            for count in (0, TOKENS_MAX + 1):
                answer = await it.http.post("/v1/admin/tokens", json={"count": count}, headers=it.admin)
                assert problem(answer) == "malformed-request"
                assert f"count must lie between 1 and {TOKENS_MAX}, not {count}" in answer.json()["detail"]
            assert rows(it.settings)["tokens"] == []
            assert len(set(await it.tokens(TOKENS_MAX))) == TOKENS_MAX
            assert len(rows(it.settings)["tokens"]) == TOKENS_MAX

    asyncio.run(scenario())


def test_a_name_that_an_unused_token_binds_is_kept_until_that_token_expires(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.tokens(client="hospital-a", ttl_s=60.0)
            [unbound] = await it.tokens()
            [of_another] = await it.tokens(client="hospital-b")
            squatter = Device(it.http, "hospital-a")
            assert problem(await squatter.enrol(unbound)) == "name-taken"
            assert problem(await squatter.enrol(of_another)) == "token-mismatch"
            clock.late_s = 61.0
            assert (await squatter.enrol(unbound)).status_code == 200

    asyncio.run(scenario())


def test_no_token_is_made_for_a_name_that_somebody_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.devices(1)
            answer = await it.http.post("/v1/admin/tokens", json={"client": "d0"}, headers=it.admin)
            assert problem(answer) == "name-taken"

    asyncio.run(scenario())


def test_a_name_that_a_runs_coverage_counts_on_is_kept_while_the_run_lasts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(FLOOR, small_state())
            [unbound] = await it.tokens()
            assert problem(await Device(it.http, "hospital-a").enrol(unbound)) == "name-taken"
            await it.http.post("/v1/admin/runs/demo/stop", json={"reason": "enough"}, headers=it.admin)
            assert (await Device(it.http, "hospital-a").enrol(unbound)).status_code == 200

    asyncio.run(scenario())


def test_a_squatter_of_a_name_fills_no_coverage_and_the_operator_hears_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            squatter = await enrolled(it, "hospital-a", labels={"tier": "gold"})  # before there is the run
            await it.begin(FLOOR, small_state())
            layout = Layout.of_state(small_state())
            assert problem(await squatter.check_in(layout, wait_s=0.0)) == "unbound-name"
            [away] = (await it.progress())["turned_away"]
            assert away["client"] == "hospital-a"
            assert "binds no name" in away["reason"]

    asyncio.run(scenario())


async def two_wait_for(it: House, what: str) -> bool:
    live = (await it.progress())["live"]
    return live["waiting"] == 2 and what in live["why"]


def test_only_a_tier_that_a_token_binds_counts_for_coverage(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(FLOOR, small_state())
            site = await enrolled(it, "hospital-a", is_bound=True)
            liar = await enrolled(it, "liar", says={"tier": "gold"})
            held = [asyncio.create_task(one.work(layout, wait_s=1.0)) for one in (site, liar)]
            await until_told("two clients that wait for tier gold", lambda: two_wait_for(it, "tier gold"))
            gold = await enrolled(it, "gold", labels={"tier": "gold"})
            held.append(asyncio.create_task(gold.work(layout)))
            await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
            live = (await it.progress())["live"]
            assert {"hospital-a", "gold"} <= {one["client"] for one in live["clients"]}
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)

    asyncio.run(scenario())


def test_a_key_that_another_name_has_is_refused_and_told_what_to_do_and_its_token_stays_good(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            north = await enrolled(it, "north")
            [token] = await it.tokens()
            twin = Device(it.http, "north-2", key=north.key)
            refusal = await twin.enrol(token)
            assert problem(refusal) == "key-taken"
            told = refusal.json()["detail"]
            assert "as 'north'" in told
            assert "--state" in told
            assert "umbel client remove north" in told
            assert set(await views(it)) == {"north"}
            assert (await Device(it.http, "south").enrol(token)).status_code == 200

    asyncio.run(scenario())


def test_an_enrolment_that_somebody_else_sends_again_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            sent = list[httpx.Request]()

            async def note(request: httpx.Request) -> None:
                sent.append(request)

            it.http.event_hooks["request"].append(note)
            device = Device(it.http, "d0")
            [token] = await it.tokens()
            assert (await device.enrol(token)).status_code == 200
            assert problem(await it.http.send(sent[-1])) == "replayed-nonce"
            assert (await device.enrol(token)).status_code == 200, "the client itself signs anew"

    asyncio.run(scenario())


def test_of_two_names_that_bring_one_key_at_once_one_is_enrolled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            tokens = await it.tokens(8)
            first = Device(it.http, "d0")
            devices = [first, *(Device(it.http, f"d{i}", key=first.key) for i in range(1, 8))]
            answers = await asyncio.gather(*(one.enrol(token) for one, token in zip(devices, tokens, strict=True)))
            assert sorted(one.status_code for one in answers) == [200] + [409] * 7
            assert {problem(one) for one in answers if one.status_code == 409} == {"key-taken"}
            assert len(await views(it)) == 1

    asyncio.run(scenario())


def test_the_key_of_a_client_that_was_removed_may_come_back_under_another_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            north = await enrolled(it, "nroth")
            await it.http.delete("/v1/admin/clients/nroth", headers=it.admin)
            [token] = await it.tokens()
            assert (await Device(it.http, "north", key=north.key).enrol(token)).status_code == 200

    asyncio.run(scenario())


def test_tokens_go_a_week_after_their_end_and_a_repeated_enrolment_still_gets_its_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            used, unused = await it.tokens(2, ttl_s=60.0)
            device = Device(it.http, "north")
            assert (await device.enrol(used)).status_code == 200
            for late_s, told in ((0.0, "token-used"), (WEEK_S, "token-used"), (WEEK_S + 61.0, "unknown-token")):
                now = clock.now() + late_s
                await it.state.services.registry.enrolments.sweep(now)
                assert problem(await Device(it.http, "other").enrol(used)) == told
            assert problem(await Device(it.http, "other").enrol(unused)) == "unknown-token"
            assert (await device.enrol(used)).status_code == 200

    asyncio.run(scenario())
