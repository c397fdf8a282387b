"""All runs of this coordinator: it opens and creates them, and follows what other replicas do.

`reception.py` answers the requests of devices.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from sqlalchemy.exc import IntegrityError

from umbel.aggregation.model.kinds import require_fitting, require_steppable
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.privacy.section import require_private_model
from umbel.aggregation.round.states import Declined, Recruiting
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import RunView
from umbel.aggregation.trust.members import MemberList, SignedMembers
from umbel.aggregation.types import ClientId, RunId
from umbel.server import journal
from umbel.server.blobs.blobs import UnknownBlob
from umbel.server.devices.fitness import stranger
from umbel.server.devices.waiting import Bells
from umbel.server.problems import Refused, shutting_down
from umbel.server.runs.bundle_facts import run_created
from umbel.server.runs.decision import DeclineInput, PastAttempt
from umbel.server.runs.driver import RunDriver
from umbel.server.runs.memory import view_of
from umbel.server.services import Services
from umbel.server.stopping import stopped
from umbel.server.store.outage import DatabaseAway
from umbel.server.store.rounds import FirstModelTrained
from umbel.server.store.versions import BeingRemoved, creator_of
from umbel.server.sums.model_removal import hold
from umbel.server.sums.torch_import import torch_imported

_log = logging.getLogger(__name__)
RUNS_BELL = "runs"
FLUSH_S = 1.0
LOOK_S = 0.25
OVER_KEPT_S = 600.0


class Coordinator:
    """The drivers of all runs.

    Of a run that is over only its view is kept once no request has asked for the run for `OVER_KEPT_S`. The next
    request opens it again.
    """

    def __init__(self, services: Services) -> None:
        self.services = services
        self.drivers: dict[RunId, RunDriver] = {}
        self.bells = Bells()
        self.is_closing = False
        self._over: dict[RunId, RunView] = {}
        self._opening = asyncio.Lock()
        self._counting_outage = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None

    # --- runs ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Continue every stored run from its stored state, and begin to follow other replicas."""
        for name in await self.services.rounds.revisions():
            if driver := await self._open(name):
                await self._let_go_if_idle(driver)
        await self._sign_on()
        self._looking = asyncio.create_task(self._keep_looking(), name="what other replicas do")

    async def close(self) -> None:
        self.hang_up()
        if self._looking is not None:
            await stopped(self._looking)
        for driver in self.drivers.values():
            await driver.close()
        await self.services.waiters.settle()

    def hang_up(self) -> None:
        """Answer every request that is held open, because the coordinator is shutting down."""
        self.is_closing = True
        self.bells.ring_all()
        for driver in self.drivers.values():
            driver.bells.ring_all()

    async def driver(self, run: RunId) -> RunDriver:
        """The driver of a run, which another replica may just have created. Raises `Refused` for an unknown run."""
        if (driver := self.drivers.get(run)) is None and (run in self._over or not self.services.replicas.is_alone):
            driver = await self._open(run)
        if driver is None:
            detail = f"there is no run named {run!r}; the coordinator's operator can list the runs: umbel run list"
            raise Refused("unknown-run", detail)
        driver.asked_at = self.services.clock.now()
        return driver

    def views(self) -> tuple[RunView, ...]:
        """A view of every run, the oldest first."""
        views = self._over | {name: view_of(driver.live) for name, driver in self.drivers.items()}
        return tuple(sorted(views.values(), key=lambda view: (view.created_at, view.name)))

    async def create_run(
        self,
        file: RunFile,
        model_sha256: str,
        members: SignedMembers | None = None,
        *,
        may_share_model: bool = False,
    ) -> tuple[RunDriver, bool]:
        """Return the run of this file, created if there is none, and whether it is new.

        `members`: the member list that the file names. From now on the run draws no other client, even if the run is
        not new. `may_share_model`: whether a new secure run may begin with a model that another secure run trains.
        Raises `Refused` if it may not, or if the name belongs to a run with another file or model.
        """
        await self.count_outage()  # first: while there is no run, no replica signs that it is at work
        is_new = False
        if (driver := await self._open(RunId(file.name))) is None:
            needs_new_model = file.secure is not None and file.privacy is None and not may_share_model
            is_new = await self._add_run(file, model_sha256, members, needs_new_model=needs_new_model)
            await self._sign_on()  # the last sign may be of before the run: time without a run is no outage of it
            driver = await self._open(RunId(file.name))
        assert driver is not None, "the run was just stored, and runs are never deleted"
        if driver.run.file != file or driver.run.first_model_sha256 != model_sha256:
            detail = (
                f"a run named {file.name!r} already exists, with another run file or first model. A run cannot be "
                "changed: give this one another name"
            )
            raise Refused("run-exists", detail)
        if members is not None and await driver.members.give(members):
            await self._expel_strangers(driver, members.list)
            self.runs_changed()
        return driver, is_new

    async def _expel_strangers(self, driver: RunDriver, members: MemberList) -> None:
        """Stop drawing waiting clients that are not members, and wake their requests, which are then refused."""
        journal.members_given(driver.name, members.words)
        for candidate in await driver.waiting.candidates():
            if await stranger(self.services.registry, members, candidate.client) is not None:
                await driver.waiting.expel(candidate.client)
                driver.bells.ring((candidate.client,))

    async def _add_run(
        self, file: RunFile, model_sha256: str, members: SignedMembers | None, *, needs_new_model: bool
    ) -> bool:
        """Store a new run. Returns False if another request has stored it first."""
        services, owner = self.services, creator_of(RunId(file.name), model_sha256)
        model = await services.models.model(model_sha256)
        if model is None:
            raise Refused(
                "unknown-model", "the first model is not stored here; upload it first, to /v1/admin/models/{sha256}"
            )
        layout = await self._layout(model.layout_digest)
        try:
            require_fitting(file.tensor_rules, layout, file.coarsest_step)
            require_steppable(file.aggregation, file.training, layout)
            if file.privacy is not None:
                require_private_model(layout)
        except ValueError as error:
            raise Refused("malformed-request", str(error)) from error
        await torch_imported()
        from umbel.aggregation.optimizers.build import optimizer_of
        from umbel.server.sums.model_files import first_master

        try:
            master = await asyncio.get_running_loop().run_in_executor(
                services.worker, first_master, services.blobs, model_sha256, layout, optimizer_of(*file.server_terms())
            )
            await hold(services, owner, {model_sha256, master})
        except (UnknownBlob, BeingRemoved) as error:
            raise Refused(
                "unknown-model", "this model was deleted with an old version of a run; upload it again"
            ) from error
        now = services.clock.now()
        first = Recruiting(file.first_plan(layout.update.n_values), since=now)
        bundle = services.audit_key.seal(file.name, 0, "", run_created(file, model, master, layout.to_json(), now))
        try:
            await services.rounds.add_run(
                file, model, master, first, now, bundle, members, needs_new_model=needs_new_model
            )
        except FirstModelTrained as error:
            await services.versions.release(owner)
            raise Refused("first-model-in-use", _other_weights(error.run)) from error
        except IntegrityError:
            await services.versions.release(owner)
            if await services.rounds.load(RunId(file.name)) is None:
                raise
            return False
        journal.run_created(file.name, file.rounds.count, model_sha256)
        if members is not None:
            journal.members_given(file.name, members.list.words)
        return True

    async def _open(self, name: RunId) -> RunDriver | None:
        """The driver of a run, made if there is none yet; None if no such run is stored."""
        async with self._opening:
            if (known := self.drivers.get(name)) is not None:
                return known
            live = await self.services.rounds.load(name)
            if live is None:
                return None
            driver = RunDriver(self.services, live, await self._layout(live.run.model.layout_digest), self.runs_changed)
            await driver.start()
            self.drivers[name] = driver
            self._over.pop(name, None)
            self.runs_changed()
            return driver

    async def _let_go_if_idle(self, driver: RunDriver) -> None:
        """Keep only the view of a run that is over and that no request has asked for lately."""
        async with self._opening:
            is_idle = self.services.clock.now() - driver.asked_at >= OVER_KEPT_S
            if driver.is_over and is_idle and self.drivers.get(driver.name) is driver:
                self._over[driver.name] = view_of(self.drivers.pop(driver.name).live)
                await driver.close()

    async def _layout(self, digest: str) -> Layout:
        layout = await self.services.models.layout(digest)
        assert layout is not None, "a model is stored with its layout"
        return layout

    def runs_changed(self) -> None:
        """Answer the requests that wait for another set of runs, or for another status of one."""
        self.bells.ring((RUNS_BELL,))

    # --- other replicas -----------------------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        """Follow what other replicas do, and store the traffic that was counted here."""
        while True:
            try:
                await self._look()
            except DatabaseAway:
                pass  # the database logs it, once
            except Exception:
                _log.exception("the regular check of all runs failed; trying again")
            await asyncio.sleep(FLUSH_S if self.services.replicas.is_alone else LOOK_S)

    async def _look(self) -> None:
        await self.count_outage()
        if not all(driver.is_over for driver in self.drivers.values()):
            await self.services.uptime.sign()
        revisions: Mapping[RunId, int] = {}
        if not self.services.replicas.is_alone:
            for client in await self.services.registry.refresh(self.services.clock.now()):
                await self.release(ClientId(client))
            revisions = await self.services.rounds.revisions()
        for name in {**revisions, **self.drivers}:
            try:
                await self._look_at(name, revisions.get(name))
            except DatabaseAway:
                raise
            except Exception:  # the other runs must continue
                _log.exception("run %s: the regular check of this run failed; trying again", name)

    async def count_outage(self) -> None:
        """If no coordinator was at work for a while, count that time in no round's window."""
        if await self.services.uptime.outage() is None:
            return
        async with self._counting_outage:
            if (outage := await self.services.uptime.outage()) is None:
                return  # another request has counted it
            drivers = [one for one in self.drivers.values() if not one.is_over]
            if drivers:
                journal.was_away(outage.now - outage.since)
            for driver in drivers:
                try:
                    await driver.was_away(outage)
                except Exception:  # its next step counts the outage
                    _log.exception(
                        "run %s: could not extend the open window by the time of an outage; the next step tries again",
                        driver.name,
                    )
            await self.services.uptime.sign()

    async def _sign_on(self) -> None:
        """Count an outage, then write a sign of life."""
        await self.count_outage()
        await self.services.uptime.sign()

    async def _look_at(self, name: RunId, revision: int | None) -> None:
        driver = None if name in self._over else self.drivers.get(name) or await self._open(name)
        if driver is None:
            return
        if revision not in (None, driver.live.revision):
            await driver.catch_up()
        await driver.flush_traffic()
        if driver.is_over:
            await self._let_go_if_idle(driver)
        else:
            await driver.pacing.look()

    # --- all runs -----------------------------------------------------------------------------------------------------

    async def release(self, client: ClientId) -> None:
        """Release a revoked client: no round waits for it or draws it, and its held requests are answered.

        Reports that were accepted from it still count.
        """
        for driver in self.drivers.values():
            await driver.waiting.expel(client)
            if driver.open_round(client):
                declined = Declined(self.services.clock.now(), client, "the operator removed this client")
                with suppress(PastAttempt):
                    await driver.submit(DeclineInput(declined, driver.assignment_id(client)))
            driver.bells.ring((client,))
            driver.wake()
        self.runs_changed()

    def counts_on(self, client: ClientId) -> bool:
        """Whether the coverage of a run that is not over names this client."""
        return any(client in it.run.file.coverage.sites for it in self.drivers.values() if not it.is_over)

    def refuse_if_closing(self) -> None:
        if self.is_closing:
            raise shutting_down()


def _other_weights(run: RunId) -> str:
    """What an operator does who needs another first model. `run`: the one that trains this one."""
    return (
        f"the secure run {run!r} trains this first model too. Sites decline a second sum over the same weights unless "
        "its clients are the same or quite different, because subtracting the two sums could reveal one site's update. "
        "Create the run from other first weights: umbel model init --seed N, with a seed that no run has used. Where "
        "a seed changes nothing, as with pretrained weights, only the continuation of the other run is left. The "
        "same weights in another file are no way out, because the two sums could still be subtracted. To continue "
        f"from {run!r}, export its newest version after its end. If the cohorts of both runs will be exactly the same, "
        "or share hardly a client, allow this run: umbel run create --same-first-model"
    )
