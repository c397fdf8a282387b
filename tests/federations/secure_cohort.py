"""A cohort of one secure attempt, which goes through the phases together; some of it may fall silent on the way.

What it must come to is computed here from what every client put in, without a mask: the same bits.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.federations.secure_device import SecureDevice, change_of
from tests.federations.server_device import Device, House, Json, LateClock, run_file
from tests.servers.waits import until, until_told
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.round.machine import next_deadline
from umbel.aggregation.secagg.numbers.composition import composition_of
from umbel.aggregation.secagg.numbers.contribution import LocalWork
from umbel.aggregation.secagg.numbers.totals import Totals, totals
from umbel.aggregation.secagg.turns import Phase

N_VALUES = 300
STATE = {"w": torch.zeros(N_VALUES)}
LAYOUT = Layout.of_state(STATE)
SECURE = """\
[codec]
name = "integer"
step = 0.25
first_norm = 0.175
[secure_aggregation]
expected_sample_count = 10
minimum_work = 0.5
"""


def secure_run(count: int = 1, target: int = 4, minimum: int = 3, window_s: float = 600.0, **changed: float) -> str:
    return run_file(count=count, target=target, minimum=minimum, window_s=window_s, **changed) + SECURE


def work_of(number: int) -> LocalWork:
    """Different work for each client. Every third does part of what was planned."""
    return LocalWork(3 + 2 * number, 2 if number % 3 == 0 else 4, 4, {"loss": 0.25 * number, "accuracy": 0.5})


def summed(parties: Sequence[SecureDevice], changes: Sequence[Tensor]) -> Totals:
    """What these clients' integers add up to, in the clear."""
    offer, layout = parties[0].offer, parties[0].layout
    composition = composition_of(offer, layout)
    levels = torch.zeros(composition.n_levels, dtype=torch.int64)
    words = torch.zeros(composition.n_words, dtype=torch.int64)
    for one, change in zip(parties, changes, strict=True):
        made = one.contribution(change)
        levels += torch.cat([part.to(torch.int64) for part in made.levels()])
        words += made.words
    return totals(composition, levels.to(torch.int32), words, [one.offer.rank for one in parties])


@dataclass
class Attempt:
    """One attempt of a house's run. `late`: its clock, which goes to the next deadline when somebody is waited for in
    vain.
    """

    it: House
    late: LateClock
    parties: list[SecureDevice]
    changes: list[Tensor]

    @classmethod
    def of(cls, it: House, late: LateClock, devices: Sequence[Device], number: int = 1) -> "Attempt":
        parties = [SecureDevice(one, LAYOUT, work_of(i)) for i, one in enumerate(devices)]
        return cls(it, late, parties, [change_of(LAYOUT, 100 * number + i) for i in range(len(devices))])

    @property
    def driver(self) -> Any:
        return self.it.state.coordinator.drivers["demo"]

    def move_to(self, it: House) -> None:
        """Go on with another coordinator."""
        self.it = it
        for one in self.parties:
            one.device.http = it.http

    async def go(self, silent: Collection[int] = (), since: Phase | None = None) -> None:
        """The whole attempt, or as much as there is of it. `silent`: who says nothing from phase `since` on."""
        is_over, quiet = False, False
        await self.each(SecureDevice.begin)
        for phase in Phase:
            quiet |= phase is since
            speaking = [i for i in range(len(self.parties)) if not (quiet and i in silent)]
            is_over = is_over or not await self.speak(phase, speaking)
            if is_over:
                return
            if phase is since and silent:
                await self.run_out()
                is_over = self.driver.state.phase not in ("training", "closing")

    async def speak(self, phase: Phase, who: Iterable[int]) -> bool:
        """These clients' messages of a phase; False if the attempt is over before."""
        if self.driver.state.phase not in ("training", "closing") or self.driver.plan != self.plan:
            return False
        if phase is Phase.ADVERTISE_KEYS:
            await self.each(lambda one: one.advertise(), who)
        elif phase is Phase.SHARE_KEYS:
            await self.each(lambda one: one.share(), who)
        elif phase is Phase.MASKED_INPUT:
            await self.each(self._input, who)
        elif phase is Phase.CONSISTENCY_CHECK:
            await self.each(lambda one: one.agree(), who)
        else:
            await self.each(_reveal, who)
        return True

    @property
    def plan(self) -> Any:
        return self.driver.plan

    async def each(self, act: Callable[[SecureDevice], Awaitable[object]], who: Iterable[int] | None = None) -> None:
        chosen = self.parties if who is None else [self.parties[i] for i in who]
        await asyncio.gather(*(act(one) for one in chosen))

    async def _input(self, one: SecureDevice) -> None:
        await one.hear()
        answer = await one.send_input(one.masked(self.changes[self.parties.index(one)]))
        assert answer.json()["outcome"] == "accepted", answer.text

    async def run_out(self) -> None:
        """The time of the phase under way is over."""
        driver, before = self.driver, _place(self.driver)
        deadline = next_deadline(driver.state)
        assert deadline is not None
        self.late.late_s += max(0.0, deadline - self.late.now()) + 0.01
        driver.wake()
        await until("the phase after the one whose time is over", lambda: _place(driver) != before)

    def model(self, before: Tensor, who: Iterable[int]) -> Tensor:
        """The model that these clients' work makes."""
        chosen = list(who)
        mean = summed([self.parties[i] for i in chosen], [self.changes[i] for i in chosen]).mean
        return (before.double() + mean.mean_slice(0, N_VALUES)).float()


async def _reveal(one: SecureDevice) -> None:
    answer = await one.put("unmasking", one.party.reveal(await one.get("unmasking")))
    assert answer.status_code in (202, 204), answer.text


def _place(driver: Any) -> tuple[object, ...]:
    state = driver.state
    exchange = getattr(state, "exchange", None)
    return driver.live.round_id, state.phase, exchange and exchange.phase


async def ordered(it: House, verb: str) -> None:
    answer = await it.http.post(f"/v1/admin/runs/demo/{verb}", json={"reason": "a test"}, headers=it.admin)
    assert answer.status_code == 200, answer.text


async def _wait(driver: Any, count: int) -> bool:
    """Whether so many clients wait for work."""
    return bool(await driver.waiting.count() >= count)


@asynccontextmanager
async def all_waiting(it: House, devices: Sequence[Device]) -> AsyncGenerator[None]:
    """All of them wait for work, and are seen to."""
    driver = it.state.coordinator.drivers["demo"]
    waiting = [asyncio.create_task(one.check_in(LAYOUT, wait_s=20.0)) for one in devices]
    try:
        await until_told("all devices waiting", lambda: _wait(driver, len(devices)))
        yield
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def asked_again(it: House, clock: LateClock, devices: Sequence[Device], number: int) -> Attempt:
    """The next attempt, for which all of them wait before anybody is drawn; those who were."""
    driver = it.state.coordinator.drivers["demo"]
    async with all_waiting(it, devices):
        await ordered(it, "resume")
        await until("a round that is open", lambda: driver.state.phase == "training")
        cohort = set(driver.state.cohort)
    return Attempt.of(it, clock, [one for one in devices if one.name in cohort], number)


def fates(record: Json) -> dict[str, str]:
    return {client["client"]: client["fate"] for client in record["clients"]}
