"""Which model files stay: those of versions that are kept, in any run, and those that somebody is about to refer to."""

import asyncio
from pathlib import Path

import pytest

from tests.federations.lifecycle_house import lifecycle_run, obeyed, order, train, versions
from tests.federations.server_device import House, house, problem, small_state
from umbel.aggregation.model.layout import Layout
from umbel.server.store.versions import BeingRemoved
from umbel.server.sums.model_removal import hold, sweep_models

pytestmark = pytest.mark.usefixtures("any_database")
LAYOUT = Layout.of_state(small_state())
KEEP_TWO = '[retention]\nversions = 2\n[stop]\nmetric = "evaluation.loss"\npatience = 9\nminimum = 1\n'


def models(it: House) -> set[str]:
    return {path.name for path in (it.settings.data / "blobs" / "models").iterdir()}


def test_old_versions_go_but_the_first_the_newest_and_the_best(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(KEEP_TWO, evaluate="true"), small_state())
            [device] = await it.devices(1)
            for n_ended, loss in enumerate((1.0, 0.9, 0.1, 0.8, 0.7, 0.6), start=1):
                await train(device, LAYOUT, 0.5, {"loss": loss})
                await it.ended(n_ended)
            found = await versions(it)
            assert [one["version"] for one in found if one["deleted_at"] is None] == [0, 2, 5, 6]
            url = f"/v1/admin/models/{found[1]['sha256']}"
            await sweep_models(it.state.services)
            assert (await it.http.get(url, headers=it.admin)).status_code == 200, "a download may still be under way"
            before = models(it)
            await sweep_models(it.state.services, kept_s=0.0)
            assert len(before) - len(models(it)) == 6, "of three versions, the files and their master copies"
            assert problem(await it.http.get(url, headers=it.admin)) == "unknown-model"
            for version in (0, 2, 5, 6):
                assert await it.model(found[version]["sha256"])
            assert problem(await order(it, "rollback", to=3)) == "version-deleted"
            await obeyed(it, "rollback", to=2)
            await train(device, LAYOUT, 0.5, {"loss": 0.1})
            await it.ended(8)
            await sweep_models(it.state.services, kept_s=0.0)
            assert (await it.progress())["run"]["model"]["version"] == 8
            assert await it.model((await versions(it))[8]["sha256"])

    asyncio.run(scenario())


def test_a_file_that_another_run_has_too_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run("[retention]\nversions = 1\n"), small_state())
            other = lifecycle_run().replace('"demo"', '"other"')
            model = (await versions(it))[0]["sha256"]
            assert (await it.put_run(other, model, "other")).status_code == 201
            [device] = await it.devices(1)
            for run in ("other", "demo", "demo"):
                device.run = run
                await train(device, LAYOUT, 0.5)
                await it.progress(wait_s=0.2)
            await it.ended(2)
            await sweep_models(it.state.services, kept_s=0.0)
            found = await versions(it)
            assert [one["deleted_at"] is None for one in found] == [True, False, True]
            assert await it.model(found[1]["sha256"]), "version 1 of the other run is the same file"

    asyncio.run(scenario())


def test_what_is_claimed_is_not_removed_and_what_is_removed_cannot_be_claimed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run("[retention]\nversions = 1\n"), small_state())
            [device] = await it.devices(1)
            for n_ended in (1, 2):
                await train(device, LAYOUT, 0.5)
                await it.ended(n_ended)
            services, old = it.state.services, (await versions(it))[1]["sha256"]
            await hold(services, "someone", {old})
            await sweep_models(services, kept_s=0.0)
            assert old in models(it)
            await services.versions.release("someone")
            gone = await services.versions.begin_removal(services.clock.now())
            assert old in gone
            with pytest.raises(BeingRemoved):
                await hold(services, "someone", {old})
            await sweep_models(services, kept_s=0.0)  # as after a crash in the middle of a removal
            assert old not in models(it)
            with pytest.raises(BeingRemoved):
                await hold(services, "someone", {old})

    asyncio.run(scenario())


def test_a_model_that_was_removed_can_be_uploaded_again_for_another_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run("[retention]\nversions = 1\n"), small_state())
            [device] = await it.devices(1)
            for n_ended in (1, 2):
                await train(device, LAYOUT, 0.5)
                await it.ended(n_ended)
            old = (await versions(it))[1]["sha256"]
            weights = await it.model(old)
            await sweep_models(it.state.services, kept_s=0.0)
            other = lifecycle_run().replace('"demo"', '"other"')
            assert problem(await it.put_run(other, old, "other")) == "unknown-model"
            assert await it.put_model(weights) == old
            assert (await it.put_run(other, old, "other")).status_code == 201
            await sweep_models(it.state.services, kept_s=0.0)
            assert old in models(it)

    asyncio.run(scenario())
