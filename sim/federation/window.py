"""The window of one attempt at a round in virtual time: reports in the order of their arrival, for the state machine.

Acceptance depends only on arrival time, so the window is played before the training, and only accepted clients train.

The window of a secure attempt has the exchange of keys as well, and the phases until its sum is unmasked
(`sim/secure/exchange.py`). Clients mask only if they are asked to: neither the sum nor its members depend on it.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from umbel.aggregation.plans.masks import ONE_STEP
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.reports import Work
from umbel.aggregation.round.machine import advance, advance_to_end
from umbel.aggregation.round.states import (
    Abandoned,
    Closing,
    Declined,
    Event,
    Reported,
    Silent,
    Spoiled,
    Tick,
    Training,
)
from umbel.aggregation.run.ledger import Book, MemberFacts
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import Contribution, TooLittleWork, require_enough
from umbel.aggregation.secagg.turns import MODEL_SHARE, Phase
from umbel.aggregation.types import ClientId
from umbel.sim.federation.site_policies import NO_POLICIES, SitesInAttempt
from umbel.sim.federation.site_sums import PlayedSum
from umbel.sim.fleet.fates import NEVER, DeviceStage, Fates
from umbel.sim.secure.devices import DeviceFate, SecureDevice, VirtualTime
from umbel.sim.secure.exchange import ExchangeParties, exchange
from umbel.sim.secure.voices import BlankMasking, RealMasking


@dataclass(frozen=True, slots=True)
class Cohort:
    """The clients of a cohort by rank, their fates, the work that each would report, and what their sites decline."""

    names: Sequence[ClientId]
    fates: Fates
    works: Sequence[Work]
    sites: SitesInAttempt = NO_POLICIES


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Seconds that the devices of an attempt were at work, transfers included."""

    busy_s: float = 0.0  # of all devices
    accepted_s: float = 0.0  # of those whose reports were accepted


@dataclass(frozen=True, slots=True)
class Played:
    """An attempt that has ended at `at`."""

    ended: Closing | Abandoned
    at: float
    cohort: Cohort
    sums: tuple[Tensor, Tensor] | None = field(default=None, repr=False, kw_only=True)  # of levels and words, unmasked

    def declined(self, declines: Mapping[ClientId, str]) -> dict[ClientId, str]:
        """Why clients have declined, or would have if the attempt had lasted. `declines`: as the window was played."""
        return {client: why for client, why in declines.items() if client not in self.ended.accepted}

    def spoiled(self, reason: str) -> "Played":
        """The same attempt, abandoned because no model can be made of the sum."""
        ended, _ = advance(self.ended, Spoiled(self.at, reason))
        assert isinstance(ended, Abandoned)
        return replace(self, ended=ended)

    def book(self, sizes: Mapping[ClientId, int], declines: Mapping[ClientId, str]) -> Book:
        """What the coordinator knows of its clients. `sizes`: of the written updates."""
        return _book_of(self.ended, self.cohort, sizes, declines)

    @property
    def device_time(self) -> DeviceTime:
        """Counted until a device reported or was told to stop."""
        ended = self.ended
        busy_s = self.cohort.fates.spent(ended.closed_at - ended.opened_at).busy_s
        is_accepted = np.array([name in ended.accepted for name in self.cohort.names], dtype=np.bool_)
        return DeviceTime(float(busy_s.sum()), float(busy_s[is_accepted].sum()))


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a plain attempt. `play` can be called repeatedly; equal arguments give equal results."""

    opened: Training
    cohort: Cohort

    def play(self, declines: Mapping[ClientId, str]) -> Played:
        """From the opening to the end. `declines`: clients that decline when their report would have come, and why."""
        state = advance_to_end(self.opened, _events(self.opened, self.cohort, declines))
        assert isinstance(state, Closing | Abandoned), "a window ends"
        return Played(state, state.closed_at, self.cohort)


def _book_of(
    ended: Closing | Abandoned, cohort: Cohort, sizes: Mapping[ClientId, int], declines: Mapping[ClientId, str]
) -> Book:
    open_s = ended.closed_at - ended.opened_at
    fates, members, heard = cohort.fates, dict[ClientId, MemberFacts](), dict[ClientId, float]()
    spent = fates.spent(open_s)
    facts = zip(
        cohort.names,
        fates.report_s.tolist(),
        fates.lost_s.tolist(),
        fates.back_s.tolist(),
        spent.bytes_down.tolist(),
        spent.bytes_up.tolist(),
        strict=True,
    )
    for client, report_s, lost_s, back_s, bytes_down, bytes_up in facts:
        has_reported = client in ended.accepted
        members[client] = MemberFacts(
            ended.cohort[client].sample_count,
            client in declines and not has_reported,
            ended.opened_at + report_s if has_reported else None,
            sizes.get(client, bytes_up) if has_reported else bytes_up,
            bytes_down,
        )
        is_silent = lost_s < min(open_s, report_s) and not back_s < open_s
        heard[client] = ended.opened_at + lost_s if is_silent else ended.closed_at
    return Book(members, ended.opened_at, heard.__getitem__)


def _events(opened: Training, cohort: Cohort, declines: Mapping[ClientId, str]) -> Iterable[Event]:
    """In the order of time; at the same moment, the lower rank first. The last one is the end of the window."""
    moments, silences = opened.opened_at + cohort.fates.report_s, deque(_silences(opened, cohort))
    order = np.argsort(cohort.fates.report_s, kind="stable")
    for rank, at in zip(order.tolist(), moments[order].tolist(), strict=True):
        client = cohort.names[rank]
        if at >= opened.closes_at:
            break
        while silences and silences[0].now < at:
            yield silences.popleft()
        if (why := declines.get(client)) is not None:
            yield Declined(at, client, why)
        else:
            yield Reported(at, client, cohort.works[rank])
    yield from silences
    yield Tick(opened.closes_at)


def _silences(opened: Training, cohort: Cohort) -> Iterable[Silent]:
    """The moments of the window from which every device has reported or is silent, and which are silent then."""
    fates = cohort.fates
    silent_s, ends_s = fates.silent_s, np.minimum(fates.back_s, fates.report_s)
    if np.isinf(silent_s).all():
        return
    ends_s = np.sort(np.where(np.isinf(silent_s), NEVER, ends_s))
    reported_s, began_s = np.sort(fates.report_s), np.sort(silent_s)
    moments = np.union1d(reported_s, began_s)
    moments = moments[opened.opened_at + moments < opened.closes_at]
    n_done, n_silent, n_ended = (np.searchsorted(at, moments, side="right") for at in (reported_s, began_s, ends_s))
    for at in moments[n_done + n_silent - n_ended == len(cohort.names)].tolist():
        is_silent = (silent_s <= at) & (at < fates.back_s) & (at < fates.report_s)
        who = frozenset(cohort.names[rank] for rank in np.flatnonzero(is_silent).tolist())
        if who:
            yield Silent(opened.opened_at + at, who)


_IN_WORK = (DeviceStage.DOWNLOAD, DeviceStage.TRAINING, DeviceStage.UPLOAD)
_AFTER_REPORT = (DeviceStage.CONSISTENCY_CHECK, DeviceStage.UNMASKING)


@dataclass(frozen=True, slots=True)
class SecurePlayed(Played):
    """`ended` is `Closing` if the sum can be unmasked, at the time `at`. `cohort` has the actual fates."""

    up: Mapping[ClientId, int]  # bytes of each client's messages, without model, update and report
    down: Mapping[ClientId, int]
    refused: Mapping[ClientId, str]  # clients that left the round by their policy, and why
    said: Mapping[Phase, frozenset[ClientId]]  # the clients that sent a message in each phase

    @property
    def remembered(self) -> list[PlayedSum]:
        """What its sites remember of it, if any has a policy."""
        if (invitation := self.cohort.sites.invitation) is None:
            return []
        said = (Phase.MASKED_INPUT, Phase.CONSISTENCY_CHECK, Phase.UNMASKING)
        return [PlayedSum.of(invitation, sorted(self.ended.accepted), *(self.said[phase] for phase in said))]

    def declined(self, declines: Mapping[ClientId, str]) -> dict[ClientId, str]:
        """As `Played.declined`, with the clients that left in the middle of the round, or did not sign the sum."""
        return {**Played.declined(self, declines), **self.refused}

    def book(self, sizes: Mapping[ClientId, int], declines: Mapping[ClientId, str]) -> Book:
        """As `Played.book`, with the bytes of messages."""
        book = Played.book(self, sizes, {**declines, **self.refused})
        for client, member in book.members.items():
            member.bytes_up += self.up[client]
            member.bytes_down += self.down[client]
        return book


def seed_of(plan: RoundPlan) -> str:
    """The seed of all random draws of one attempt; no two attempts have the same."""
    return f"{plan.seed}/{plan.number}/{plan.task.mark}{plan.attempt}"


def without_enough_work(plan: RoundPlan, cohort: Cohort) -> dict[ClientId, str]:
    """The clients that send nothing because they did less of their work than a masked update needs, and the reasons.

    A site without a policy has the run's floor (`client/rounds/secure.py`).
    """
    assert plan.secure is not None, "only secure rounds have such a floor"
    found, fates, sites = dict[ClientId, str](), cohort.fates, cohort.sites
    facts = zip(cohort.names, cohort.works, fates.fetched_s.tolist(), fates.report_s.tolist(), strict=True)
    for name, work, fetched_s, report_s in facts:
        if math.isinf(report_s) or name in sites.refused:
            continue  # it is lost and reports nothing, or has declined before
        floor = sites.policies.work_floor(name, plan.secure)
        late_s = (1 - MODEL_SHARE) * plan.window_s if floor > ONE_STEP else math.inf
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
        stage = VirtualTime(self.opened.opened_at)
        masking = BlankMasking(self.composition) if masked is None else RealMasking(self.composition, masked)
        luck = {name: self._luck(rank) for rank, name in enumerate(self.cohort.names)}
        refusal = self.cohort.sites.refusal
        cast = ExchangeParties(luck, masking, seed_of(self.opened.plan), declines, refusal, self._silent_at())
        done = exchange(stage, self.opened, self.composition.layout, cast)
        return SecurePlayed(
            done.state,
            stage.now,
            replace(self.cohort, fates=self._as_it_went(done.devices)),
            {name: stage.up[name] - device.input_bytes for name, device in done.devices.items()},
            {name: stage.down[name] for name in done.devices},
            {name: device.declined for name, device in done.devices.items() if device.declined},
            {phase: frozenset(name for name, one in done.devices.items() if phase in one.said) for phase in Phase},
            sums=masking.unmasked(done.party) if isinstance(done.state, Closing) else None,
        )

    def _silent_at(self) -> dict[ClientId, float]:
        """When the coordinator no longer waits for each client that is lost at work."""
        fates = self.cohort.fates
        times = zip(self.cohort.names, fates.stage.tolist(), fates.silent_s.tolist(), strict=True)
        at_work = ((name, silent_s) for name, stage, silent_s in times if stage in _IN_WORK)
        return {name: self.opened.opened_at + silent_s for name, silent_s in at_work if math.isfinite(silent_s)}

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
