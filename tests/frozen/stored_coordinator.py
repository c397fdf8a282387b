"""A coordinator that was stopped in the midst of three runs, and what becomes of them when it is started again.

`over`: a run that has ended, with a rollback behind it; its updates are kept. `open`: a plain round of which two of
three reports are in, and half of the third update. `masked`: a secure round of which two of four masked updates are in.
"""

import hashlib
import json
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from tests.federations.audit_house import operating
from tests.federations.server_device import House, Json, repr_digest
from tests.frozen.over_http import SECURE, Played, Stage, StandingClock, again, begun, rounds, steady_house, unmask
from umbel.client.cli.audit import audit_run, replay_run

ABOUT = "about.json"
_LONG = "over_selection = 1.0"
RUNS = {
    "over": Stage(rounds(3, 3) + '[retention]\nupdates = "all"\n', back_in=("training", 3, 1), n_devices=4),
    "open": Stage(rounds(2, 3), n_devices=4),
    "masked": Stage(
        rounds(2, 4, 3, _LONG + "\nattempts_max = 3") + '[codec]\nname = "integer"\nstep = 0.25\n' + SECURE, n_devices=4
    ),
}


async def stop_in_the_midst(folder: Path) -> None:
    """Make the three runs, as far as they are to come. What is not the coordinator's to keep is in a file beside."""
    clock = StandingClock()
    async with steady_house(folder / "coordinator", clock) as it:
        over = await begun(it, clock, RUNS["over"], "over")
        await over.all()
        about = {"open": await _half_done(await begun(it, clock, RUNS["open"], "open"))}
        about["masked"] = await _half_masked(await begun(it, clock, RUNS["masked"], "masked"))
    (folder / ABOUT).write_text(json.dumps({"late_s": clock.late_s, **about}))


async def _half_done(run: Played) -> Json:
    task, assignments = await run.opens()
    for device, assignment in assignments[:2]:
        await run.moves(1.0)
        assert await run.train(device, assignment, task, is_partial=False)
    device, assignment = assignments[2]
    update = run.update_of(assignment)
    fields = {"Upload-Length": str(len(update)), "Upload-Complete": "?0", "Repr-Digest": repr_digest(update)}
    begin = update[: len(update) // 2]
    answer = await device.send("POST", f"/v1/assignments/{assignment['id']}/update", begin, fields)
    assert answer.status_code == 201, answer.text
    return {"assignments": {one.name: asked for one, asked in assignments}}


async def _half_masked(run: Played) -> Json:
    _, assignments = await run.opens()
    parties = [run.party(*one) for one in assignments]
    for party in parties:
        await party.advertise()
    told = {}
    for party in parties:
        roster = await party.get("share-keys")
        told[party.device.name] = roster.hex()
        assert (await party.put("share-keys", party.party.share(roster))).status_code == 204
    for party in parties[:2]:
        await run.send_masked(party)
    return {"assignments": {one.name: asked for one, asked in assignments}, "rosters": told}


# --- after the start --------------------------------------------------------------------------------------------------


class Reopened:
    """The coordinator's folder, opened with today's code."""

    def __init__(self, folder: Path) -> None:
        self.about: Json = json.loads((folder / ABOUT).read_text())
        self.clock = StandingClock()
        self.clock.late_s = self.about["late_s"]
        self.house = steady_house(folder / "coordinator", self.clock)

    def run(self, it: House, name: str) -> Played:
        return again(it, self.clock, RUNS[name], name)


async def go_on_plain(folder: Path) -> Json:
    """The third update is sent to its end, and the run goes on to its own."""
    reopened = Reopened(folder)
    async with reopened.house as it:
        run = reopened.run(it, "open")
        device = run.devices[_number_of(run, reopened.about, 2)]
        assignment = reopened.about["open"]["assignments"][device.name]
        assert (await device.work(run.layout)) | _OF_NOW == assignment | _OF_NOW, "it is asked for the same again"
        update, url = run.update_of(assignment), f"/v1/assignments/{assignment['id']}/update"
        stands = await device.send("HEAD", url)
        assert (stands.headers["upload-offset"], stands.headers["upload-complete"]) == (str(len(update) // 2), "?0")
        answer = await device.patch(assignment["id"], update[len(update) // 2 :], len(update) // 2, is_last=True)
        assert answer.status_code == 204, answer.text
        answer = await device.report(assignment["id"], update)
        assert answer.json()["outcome"] == "accepted", answer.text
        await run.has_ended(1)
        await run.all()
        hashes, _ = await run.facts()
        return hashes


_OF_NOW = {"window_s": 0.0}


def _number_of(run: Played, about: Json, rank: int) -> int:
    name = sorted(about["open"]["assignments"])[rank]
    return [one.name for one in run.devices].index(name)


async def go_on_masked(folder: Path) -> Json:
    """The devices have their keys still: the two that have sent nothing yet send theirs, and the sum is opened."""
    reopened = Reopened(folder)
    async with reopened.house as it:
        run, about = reopened.run(it, "masked"), reopened.about["masked"]
        parties = [run.party(one, about["assignments"][one.name]) for one in run.devices]
        for party in parties:
            party.party.advertise()
            party.party.share(bytes.fromhex(about["rosters"][party.device.name]))
        for party in parties[:2]:
            await party.hear()
            party.party.sign_input(hashlib.sha256(run.masked_of(party)).digest())  # as it was sent
        for party in parties[2:]:
            await run.send_masked(party)
        await unmask(parties)
        await run.has_ended(1)
        await run.all()
        hashes, _ = await run.facts()
        return hashes


async def begin_masked_again(folder: Path) -> Json:
    """The devices have lost their keys: they decline, and the next attempt makes the model."""
    reopened = Reopened(folder)
    async with reopened.house as it:
        run = reopened.run(it, "masked")
        assignments = reopened.about["masked"]["assignments"]
        for device in run.devices:
            assignment = assignments[device.name]
            answer = await device.send("PUT", f"/v1/assignments/{assignment['id']}/decline", _LOST_KEYS)
            assert answer.status_code in (204, 409), answer.text
        await run.moves(max(one["window_s"] for one in assignments.values()) + 2.0)
        await run.has_ended(1)
        await run.all()
        hashes, _ = await run.facts()
        return hashes


_LOST_KEYS = b'{"reason": "a restart lost the keys of this attempt"}'


async def look_back(folder: Path) -> Json:
    """What the run that is over still answers: records, versions, bundles, models, an audit, its rounds made again."""
    reopened = Reopened(folder)
    async with reopened.house as it:
        run = reopened.run(it, "over")
        hashes, whole = await run.facts()
        for one in whole["versions"]:
            await it.model(one["sha256"])  # asks for the file of each version, and reads it
        await operating(it, lambda operator: audit_run(operator, "over", folder / "audit.jsonl"))
        await operating(it, lambda operator: replay_run(operator, "over", all_=True))
        answer = await it.http.get("/v1/admin/runs", headers=it.admin)
        told: list[dict[str, Any]] = sorted(answer.json(), key=lambda one: one["name"])
        n_lines = (folder / "audit.jsonl").read_text().count("\n")
        return {**hashes, "audit_lines": n_lines, "runs": {one["name"]: one["status"] for one in told}}


COMES_OF_IT: Mapping[str, Callable[[Path], Coroutine[Any, Any, Json]]] = {
    "over": look_back,
    "open": go_on_plain,
    "masked": go_on_masked,
    "masked, begun again": begin_masked_again,
}
