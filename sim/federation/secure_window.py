"""A secure attempt in virtual time: the window, the exchange of keys, and the phases until its sum is unmasked.

It plays the state machine and the phases of `sim/secure/exchange.py` with the times, lines and drop-outs of a fleet.
Masks are left out unless they are asked for: neither the sum nor its members depend on them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from umbel.aggregation.plans.masks import ONE_STEP
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import Abandoned, Closing, Spoiled, Training
from umbel.aggregation.run.ledger import Book
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.masked_input import MaskedReader
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import Contribution, TooLittleWork, require_enough
from umbel.aggregation.secagg.turns import MODEL_SHARE
from umbel.aggregation.types import ClientId
from umbel.sim.federation.window import Cohort, Played
from umbel.sim.fleet.dropouts import DeviceStage
from umbel.sim.fleet.fates import Fates
from umbel.sim.secure.coordinator import MaskedSum
from umbel.sim.secure.devices import DeviceFate, SecureDevice, VirtualTime, Voice
from umbel.sim.secure.exchange import ExchangeParties, exchange
from umbel.sim.secure.voices import BlankVoice, RealVoice

_IN_WORK = (DeviceStage.DOWNLOAD, DeviceStage.TRAINING, DeviceStage.UPLOAD)
_AFTER_REPORT = (DeviceStage.CONSISTENCY_CHECK, DeviceStage.UNMASKING)


@dataclass(frozen=True, slots=True)
class SecurePlayed(Played):
    """`ended` is `Closing` if the sum can be unmasked, at the time `at`. `cohort` has the actual fates."""

    up: Mapping[ClientId, int]  # bytes of each client's messages, without model, update and report
    down: Mapping[ClientId, int]
    sums: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # of levels and words, if unmasked

    def spoiled(self, reason: str) -> "SecurePlayed":
        """The same attempt, abandoned because no model can be made of the sum."""
        ended, _ = advance(self.ended, Spoiled(self.at, reason))
        assert isinstance(ended, Abandoned)
        return replace(self, ended=ended)

    def book(self, sizes: Mapping[ClientId, int], declines: Mapping[ClientId, str]) -> Book:
        """As `Played.book`, with the bytes of messages."""
        book = Played.book(self, sizes, declines)
        for client, member in book.members.items():
            member.bytes_up += self.up[client]
            member.bytes_down += self.down[client]
        return book


def seed_of(plan: RoundPlan) -> str:
    """The seed of all random draws of one attempt; no two attempts have the same."""
    return f"{plan.seed}/{plan.number}/{plan.attempt}"


def without_enough_work(plan: RoundPlan, cohort: Cohort) -> dict[ClientId, str]:
    """The clients that send nothing because they did less of their work than a masked update needs, and the reasons.

    These sites have no policy of their own, so their floor is the run's (`client/rounds/secure.py`).
    """
    assert plan.secure is not None, "only secure rounds have such a floor"
    floor, found = plan.secure.minimum_work, dict[ClientId, str]()
    late_s = (1 - MODEL_SHARE) * plan.window_s if floor > ONE_STEP else math.inf
    fates = cohort.fates
    facts = zip(cohort.names, cohort.works, fates.fetched_s.tolist(), fates.report_s.tolist(), strict=True)
    for name, work, fetched_s, report_s in facts:
        if math.isinf(report_s):
            continue  # it is lost and reports nothing
        try:
            require_enough(work.steps_done, work.steps_planned, floor)
        except TooLittleWork as error:
            found[name] = str(error)
        if fetched_s > late_s:
            found[name] = "the model came too late"
    return found


@dataclass(frozen=True, slots=True)
class SecureWindow:
    """The window of a secure attempt. `play` can be called repeatedly; equal arguments give equal results."""

    opened: Training
    cohort: Cohort
    composition: Composition

    def play(
        self, declines: Mapping[ClientId, str], masked: Mapping[ClientId, Contribution] | None = None
    ) -> SecurePlayed:
        """From the opening to the end. `declines`: as in `Window.play`. `masked`: the inputs of all accepted
        clients, which they then mask with their own keys; None: nobody masks.
        """
        stage, total = VirtualTime(self.opened.opened_at), None if masked is None else MaskedSum(self.composition)
        update = bytes(MaskedReader(self.composition).update_bytes.start)

        def voice(name: ClientId, client: SecureClient) -> Voice:
            if masked is None:
                return BlankVoice(client, update)
            return RealVoice(client, masked.get(name, update))

        luck = {name: self._luck(rank) for rank, name in enumerate(self.cohort.names)}
        cast = ExchangeParties(luck, voice, seed_of(self.opened.plan), total, declines)
        done = exchange(stage, self.opened, self.composition.layout, cast)
        return SecurePlayed(
            done.state,
            stage.now,
            replace(self.cohort, fates=self._as_it_went(done.devices)),
            {name: stage.up[name] - device.input_bytes for name, device in done.devices.items()},
            {name: stage.down[name] for name in done.devices},
            total.unmasked(done.party) if total is not None and isinstance(done.state, Closing) else None,
        )

    def _luck(self, rank: int) -> DeviceFate:
        fates = self.cohort.fates
        lost, lines, latency_s = DeviceStage(int(fates.stage[rank])), fates.lines, float(fates.lines.latency_s[rank])
        return DeviceFate(
            float(fates.trained_s[rank]) - latency_s,
            latency_s,
            float(lines.up[rank]),
            float(lines.down[rank]),
            None if lost in _IN_WORK else lost.silent_from,
            self.opened.opened_at + float(fates.lost_s[rank]) if lost in _IN_WORK else math.inf,
        )

    def _as_it_went(self, devices: Mapping[ClientId, SecureDevice]) -> Fates:
        """The actual fates: a client that waits for its inbox sends later; one that leaves the round sends nothing."""
        fates, opened_at = self.cohort.fates, self.opened.opened_at
        sends_s = np.array([devices[name].sends_at for name in self.cohort.names]) - opened_at
        report_s = np.array([devices[name].reports_at for name in self.cohort.names]) - opened_at
        lost_s = np.where(np.isin(fates.stage, _AFTER_REPORT), report_s, fates.lost_s)
        return replace(fates, trained_s=sends_s, report_s=report_s, lost_s=lost_s)
