"""The cohorts of an experiment whose clients are real `Client` objects (`[clients]` in its file).

A client says only after its training how many steps it had planned, how many it did, and with how many samples. But a
simulated device's time depends on the steps, and which reports count depends on the times. So an attempt is played with
an estimate, the accepted clients train, and it is played again with their real numbers, until all agree. A client
trains again only if its device turns out to have time for another number of steps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from umbel.aggregation.counts import sum_of_counts
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.plans.tensors import TensorRules
from umbel.aggregation.reports import EvaluationDone, WorkDone
from umbel.aggregation.round.states import Abandoned, Training
from umbel.aggregation.round.weighting import weight_of
from umbel.aggregation.run.derived_metrics import with_derived
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import ClientId, client_number
from umbel.client.app import Client
from umbel.client.local.devices import seeded
from umbel.client.local.results import Evaluation
from umbel.client.rounds.site_code import evaluated
from umbel.client.rounds.work import finite
from umbel.client.state.site_state import SiteState
from umbel.client.training.kept import Kept
from umbel.client.training.shared_state import SharedState
from umbel.client.user_code import where_raised
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData, Population
from umbel.sim.engines.clients.states import ClientStates
from umbel.sim.engines.clients.work import ClientGroup, ClientReport, ClientsEngine, ClientsWork, GlobalModel
from umbel.sim.engines.device import CPU, one_thread
from umbel.sim.engines.work import EngineError
from umbel.sim.federation.local_work import Reports, client_seeds
from umbel.sim.federation.possible import SimulationError
from umbel.sim.federation.uplink import Uplink
from umbel.sim.federation.window import Cohort, Played, SecureWindow, Window, without_enough_work
from umbel.sim.fleet.faults import Fault
from umbel.sim.fleet.fleet import Devices

_NO_ROW = torch.empty(0)
_ROWS_AT_ONCE = 64  # updates that are added together
_NOTHING = SampleSet(torch.empty(0), torch.empty(0, dtype=torch.int64))
_TRAININGS_MAX = 2  # of one client in one attempt: with the estimate, and with the time that its device really has


class OwnClients:
    """The clients of an experiment: a `Population` whose sizes are what the clients say of themselves.

    `data`: what is dealt out to them; None: they bring their own. `tester`: measures new models; None: the clients
    `test_numbers` do.
    """

    def __init__(
        self,
        engine: ClientsEngine,
        n_clients: int,
        data: Population | None,
        test_numbers: Indices,
        tester: Client | None = None,
    ) -> None:
        self.engine, self.states = engine, ClientStates()
        self._n_clients, self._data, self._tester, self._test_numbers = n_clients, data, tester, test_numbers
        self._sizes = np.zeros(n_clients, dtype=np.int64)  # 0: not yet asked

    @property
    def n_clients(self) -> int:
        return self._n_clients

    @property
    def test(self) -> SampleSet:
        return _NOTHING if self._data is None else self._data.test

    def sizes(self, clients: Indices) -> Indices:
        """Each client's `sample_count`. A client is made when it is first asked."""
        if len(new := clients[self._sizes[clients] == 0]):
            self._sizes[new] = self.engine.sizes(self.group(new))
        return self._sizes[clients]

    def data_of(self, clients: Indices) -> CohortData:
        """What the experiment deals out to these clients. Raises `SimulationError` if they bring their own data."""
        if self._data is None:
            raise SimulationError("the clients of this experiment bring their own data, which the simulator cannot see")
        return self._data.data_of(clients)

    def holdout_of(self, clients: Indices) -> CohortData | None:
        return None if self._data is None else self._data.holdout_of(clients)

    def group(self, clients: Indices) -> ClientGroup:
        """These clients with their shares of the data."""
        return ClientGroup.dealt(clients, self._data)

    def evaluations(self, model: GlobalModel, offer: Assignment, clients: Indices) -> list[ClientReport]:
        """What these clients say of the model, in their order."""
        seeds = np.array([derive_seed(offer.seed, f"evaluation by {number}") for number in clients.tolist()], np.uint64)
        never = np.zeros(len(clients), dtype=np.int64)
        work = ClientsWork(self.group(clients), offer, seeds, never, self.states)
        return self.engine.measure(model, work)

    def keep_states_in(self, folder: Path, version: int) -> None:
        """Keep the clients' states in this folder. `version`: of the model with which the run begins or resumes."""
        self.states.close()
        self.states = ClientStates(folder)
        self.states.forget_from(version)
        self.states.oldest_start = version

    def keep(
        self, accepted: Iterable[ClientId], version: int, control_as_read: Mapping[ClientId, Callable[[Kept], Kept]]
    ) -> None:
        """Keep what these clients have left of their training from this version.

        `control_as_read`: by client, from the control variate before to the next one as the coordinator has read it.
        """
        if self.states.is_temporary:
            self.states.oldest_start = version + 1
        for name in accepted:
            number = client_number(name)
            if (as_read := control_as_read.get(name)) is not None:
                self.states.amend(number, version, partial(_with_control, as_read))
            self.states.keep(number, version)

    def scores_of_each(self, model: GlobalModel, offer: Assignment) -> list[dict[str, float]]:
        """The metrics of a model on each client's own held-out data, by number; empty for a client that has none."""
        works = [one.work for one in self.evaluations(model, offer, np.arange(self._n_clients))]
        return [dict(one.evaluation) if isinstance(one, EvaluationDone) else {} for one in works]

    def close(self) -> None:
        """End the clients' processes, and remove temporary files."""
        self.engine.close()
        self.states.close()

    def scores(self, model: GlobalModel, offer: Assignment) -> dict[str, float]:
        """The metrics of a new model, and figures that follow from counts: by the tester, or else over clients.

        Over clients they are means weighted by held-out samples, and figures of all counts together.
        """
        if self._tester is not None:
            return _tested(self._tester, model, offer.tensors, offer.seed)
        reports = self.evaluations(model, offer, self._test_numbers)
        works = [one.work for one in reports if isinstance(one.work, EvaluationDone)]
        return with_derived(weighted_means(works), sum_of_counts(one.evaluation_counts for one in works))


def weighted_means(evaluations: Sequence[EvaluationDone]) -> dict[str, float]:
    """The mean of each metric over the clients that have it, weighted by their samples, or by its own weights."""
    sums, counts = dict[str, float](), dict[str, int]()
    for one in evaluations:
        for name, value in one.evaluation.items():
            weight = one.evaluation_weights.get(name, one.sample_count)
            sums[name] = sums.get(name, 0.0) + weight * value
            counts[name] = counts.get(name, 0) + weight
    return {name: total / counts[name] for name, total in sums.items()}


def _tested(tester: Client, model: GlobalModel, rules: TensorRules | None, seed: int) -> dict[str, float]:
    """Raises `EngineError` if the tester's code fails, or measures nothing."""
    try:
        with seeded(seed, CPU), one_thread():
            SharedState(tester).under(rules).load(model.layout.full_state(model.owned))
            found: Evaluation | None = evaluated(tester)
    except Exception as error:
        raise EngineError(f"the client of clients.test failed: {where_raised(error.__cause__ or error)}") from error
    if found is None:
        raise EngineError(
            "evaluate of the client of clients.test returned None; it must return the Evaluation of the new model"
        )
    return with_derived(finite(found.metrics, "evaluate of the client of clients.test"), found.counts)


def _with_control(as_read: Callable[[Kept], Kept], before: SiteState, left: SiteState) -> SiteState:
    return replace(left, kept=as_read(before.kept))


@dataclass(slots=True)
class _Done:
    """A client's accepted training. `limit`: steps after which it was told to stop; infinite if it never was."""

    work: WorkDone
    row: Tensor  # float32 (n_values,)
    limit: float
    n_trainings: int

    @property
    def was_cut(self) -> bool:
        return self.work.steps_done < self.work.steps_planned and self.work.steps_done >= self.limit

    def holds_for(self, limit: float) -> bool:
        """Whether it would have done the same with this limit."""
        return self.work.steps_done <= limit and (not self.was_cut or limit == self.limit)


class OwnAttempt:
    """One attempt at a round, played by real clients. After `play`, `uplink`, `works` and `declines` say what came of
    it.

    `new_uplink` and `new_window` make a fresh one for each time that the attempt is played. `unreadable`: clients whose
    bytes are no update, with the reason. `holds_updates`: whether updates stay in memory until it is known which count.
    It is needed unless every report of the cohort counts, whatever the clients say of their work.
    """

    def __init__(
        self,
        clients: OwnClients,
        fleet: Devices,
        opened: Training,
        offer: Assignment,
        model: GlobalModel,
        cohort: Cohort,
        new_uplink: Callable[[], Uplink],
        new_window: Callable[[Cohort], Window | SecureWindow],
        unreadable: Mapping[ClientId, str],
        *,
        holds_updates: bool,
    ) -> None:
        self._clients, self._fleet, self._opened, self._offer, self._model = clients, fleet, opened, offer, model
        self._new_uplink, self._new_window, self._unreadable = new_uplink, new_window, unreadable
        self._cohort, self._window = cohort, new_window(cohort)
        self._seeds = client_seeds(opened.plan, cohort.names)
        self._sizes = clients.sizes(cohort.fates.devices)
        self._done, self._refused = dict[int, _Done](), dict[ClientId, str]()
        self._holds_updates = holds_updates
        self.uplink = new_uplink()

    @property
    def works(self) -> list[WorkDone]:
        """By rank: the real reports, and estimates for clients that have not trained."""
        return [work for work in self._cohort.works if isinstance(work, WorkDone)]

    @property
    def declines(self) -> dict[ClientId, str]:
        """The clients that decline, and why."""
        plan = self._opened.plan
        too_little = {} if plan.secure is None else without_enough_work(plan, self._cohort)
        return {**self._unreadable, **too_little, **self._refused, **self._cohort.sites.refused}

    @property
    def window(self) -> Window | SecureWindow:
        """As it was played last."""
        return self._window

    def play(self) -> Played:
        """Play the attempt until every accepted client has trained as its device lets it, and its update is read.

        No client of an abandoned plain attempt trains any more.
        """
        while True:
            played = self._settled()
            if self._is_lost(played):
                return played
            if self._holds_updates:
                self.uplink = self._new_uplink()
                for some in self.updates(played):
                    self.uplink.add(*some)
            if not self.uplink.refused.keys() - self._refused.keys():
                return played
            self._refused |= self.uplink.refused

    def _is_lost(self, played: Played) -> bool:
        return isinstance(played.ended, Abandoned) and isinstance(self._window, Window)

    def _settled(self) -> Played:
        while True:
            played = self._window.play(self.declines)
            due = [rank for rank, name in enumerate(self._cohort.names) if name in played.ended.accepted]
            due = [rank for rank in due if self._must_train(rank)]
            if not due or self._is_lost(played):
                return played
            self._train(np.array(due))
            self._plan_anew()

    def _limit(self, rank: int) -> float:
        """After how many steps the client must stop; infinite if its device has time for all of them."""
        fates = self._cohort.fates
        n_steps = int(fates.steps_done[rank])
        return n_steps if n_steps < int(fates.ask.steps[rank]) else np.inf

    def _must_train(self, rank: int) -> bool:
        done = self._done.get(rank)
        return done is None or (done.n_trainings < _TRAININGS_MAX and not done.holds_for(self._limit(rank)))

    def _train(self, ranks: Indices) -> None:
        limits = np.array([self._limit(rank) for rank in ranks.tolist()])
        steps_max = np.where(np.isinf(limits), 0, limits).astype(np.int64)
        numbers = self._cohort.fates.devices[ranks]
        work = ClientsWork(
            self._clients.group(numbers), self._offer, self._seeds[ranks], steps_max, self._clients.states
        )
        for found in self._clients.engine.train(self._model, work):
            self._spoil(ranks[found.positions], found.values)
            for position, row, report in zip(found.positions.tolist(), found.values, found.reports, strict=True):
                rank = int(ranks[position])
                if self._holds_updates:
                    self._note(rank, report, row.clone(), float(limits[position]))
                    continue
                self._note(rank, report, _NO_ROW, float(limits[position]))
                if isinstance(done := report.work, WorkDone):
                    self.uplink.add([self._cohort.names[rank]], row.unsqueeze(0), [done], [self._weight(rank, done)])

    def _weight(self, rank: int, work: WorkDone) -> int:
        """The weight of a report in a plain round, as the machine gives it."""
        draws = self._opened.cohort[self._cohort.names[rank]].draws
        return weight_of(self._opened.plan.weighting, draws, work.sample_count)

    def _spoil(self, ranks: Indices, values: Tensor) -> None:
        fates, plan = self._cohort.fates, self._opened.plan
        kinds = fates.fault[ranks]
        if (kinds != Fault.NONE).any():
            self._fleet.faults.spoil(values, kinds, fates.devices[ranks], plan.number, plan.attempt)

    def _note(self, rank: int, report: ClientReport, row: Tensor, limit: float) -> None:
        if isinstance(report.work, WorkDone):
            before = self._done.get(rank)
            n_trainings = 1 if before is None else before.n_trainings + 1
            self._done[rank] = _Done(report.work, row, limit, n_trainings)
        else:
            self._refused[self._cohort.names[rank]] = report.refusal

    def _plan_anew(self) -> None:
        """Let the devices do the steps that the clients really planned, and write the real reports."""
        fates, plan = self._cohort.fates, self._opened.plan
        steps = fates.ask.steps.copy()
        for rank, done in self._done.items():
            steps[rank] = done.work.steps_planned if done.was_cut else done.work.steps_done
        if not np.array_equal(steps, fates.ask.steps):
            ask = replace(fates.ask, steps=steps)
            drawn = self._fleet.fates(fates.devices, plan.number, plan.attempt, self._opened.opened_at, ask)
            fates = self._cohort.sites.fates_of(self._cohort.names, drawn)
        works = Reports.before(self._sizes, steps, fates).works
        for rank, done in self._done.items():
            works[rank] = _in_virtual_time(done.work, works[rank], float(fates.step_s[rank]), fates.lines.down[rank])
        self._cohort = replace(self._cohort, fates=fates, works=works)
        self._window = self._new_window(self._cohort)

    def updates(self, played: Played) -> Iterator[tuple[list[ClientId], Tensor, list[WorkDone], list[int]]]:
        """The accepted updates, some at a time: names, weight changes float32 (k, n), reports and weights."""
        accepted, names, by_rank = played.ended.accepted, self._cohort.names, self.works
        ranks = [rank for rank, name in enumerate(names) if name in accepted]
        for first in range(0, len(ranks), _ROWS_AT_ONCE):
            some = ranks[first : first + _ROWS_AT_ONCE]
            values = torch.stack([self._done[rank].row for rank in some])
            works, weights = [by_rank[rank] for rank in some], [accepted[names[rank]].weight for rank in some]
            yield [names[rank] for rank in some], values, works, weights


def _in_virtual_time(work: WorkDone, estimate: WorkDone, step_s: float, down_bytes_per_s: float) -> WorkDone:
    """The client's own report with the times of its simulated device, which has enough memory."""
    probe = work.probe and replace(
        work.probe,
        step_s=step_s,
        download_bytes_per_s=float(down_bytes_per_s),
        memory_bytes=None,
        memory_free_bytes=None,
        device_memory_bytes=None,
        device_memory_total_bytes=None,
    )
    train_s, rate = work.steps_done * step_s, estimate.upload_bytes_per_s
    return replace(work, train_s=train_s, upload_bytes_per_s=rate, probe=probe)


def drawn_to_test(n_clients: int, n_wanted: int | None, seed: int) -> Indices:
    """The clients that measure new models: all, or this many drawn from the seed, ascending."""
    if n_wanted is None or n_wanted >= n_clients:
        return np.arange(n_clients)
    draw = np.random.default_rng(derive_seed(seed, "clients that measure"))
    return np.sort(draw.choice(n_clients, n_wanted, replace=False))
