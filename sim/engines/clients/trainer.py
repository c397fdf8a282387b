"""Runs the clients of one process, by the very functions with which the SDK does an assignment's work.

No HTTP, no files and no clock take part: the weights come from memory, and a simulated device says after how many steps
its client is told to stop.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from umbel.aggregation.codec.vector_update import GradientProjections
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.types import client_name
from umbel.client.errors import TrainingFailed, WorkRefused
from umbel.client.local.devices import seed_generators
from umbel.client.local.gradients import Projection
from umbel.client.local.plan import LocalPlan
from umbel.client.rounds.inexactness import MissingGamma
from umbel.client.rounds.site_code import Trained, asked_of_site, keep_state, train_from, with_kept
from umbel.client.rounds.work import (
    NO_HASH,
    NOTHING_HELD_OUT,
    changes_from,
    measure_from,
    unfit_refused,
    with_fair_metrics,
    work_done,
)
from umbel.client.user_code import where_raised
from umbel.client.wire.timing import Bandwidth
from umbel.sim.engines.clients.alive import LiveClient, LiveClients
from umbel.sim.engines.clients.work import ClientGroup, ClientReport, ClientsWork, GlobalModel
from umbel.sim.engines.work import EngineError


class ClientTrainer:
    """Call `begin` with the model that the clients fetch before `train` and `measure`.

    Before each call of a client's code the process's generators are seeded, so that code which draws from them gives
    the same result in every process. The caller restores them.
    """

    def __init__(self, clients: LiveClients) -> None:
        self._clients = clients
        self._layout: Layout | None = None
        self._weights: Mapping[str, Tensor] = {}
        self._missing = MissingGamma()  # of all clients of this process
        self._within: tuple[CodecPlan, Mapping[str, Projection]] | None = None

    def begin(self, model: GlobalModel) -> None:
        """Take the model. Its tensors must not change until the next call."""
        if model.layout != self._layout:
            self._layout, self._within = model.layout, None
        self._weights = model.layout.full_state(model.owned)

    def sizes(self, group: ClientGroup) -> list[int]:
        """The number of samples of each client."""
        return [self._client(group, position).app.sample_count for position in range(len(group))]

    def train(self, work: ClientsWork, position: int, row: Tensor) -> ClientReport:
        """Have a client train, and write its weight change into `row`: float32 (values that it sends,).

        Raises `EngineError` if the client's code fails, or does not stop when it is told to.
        """
        client, offer = self._checked(work, position), work.offer_of(position)
        seed_generators(offer.seed)
        try:
            client.shared.require_base()
            plan = self._plan(work, position, client, offer)
            done = train_from(client.app, client.shared, self._weights, plan, self._missing)
            _require_stopped(client, done, int(work.steps_max[position]))
            client.shared.require_base()
            with unfit_refused(offer):
                done = with_fair_metrics(client.shared, lambda: self._weights, offer, done)
                _write(changes_from(client.shared, self._weights, offer.training, done), row)
            report = work_done(client.app, done, NO_HASH, offer, Bandwidth())
            if offer.task.makes_model:
                wait = partial(work.states.wait, client.number, offer.run, offer.model.version)
                keep_state(client.shared, plan, done, wait)
            return ClientReport(report)
        except TrainingFailed as error:
            raise _failed(client, error) from error
        except WorkRefused as error:
            return ClientReport(None, error.public_reason)

    def measure(self, work: ClientsWork, position: int) -> ClientReport:
        """Have a client measure the model. Raises `EngineError` if its code fails."""
        client, offer = self._checked(work, position), work.offer_of(position)
        seed_generators(offer.seed)
        try:
            client.app.prepare(_asked(work, client, offer))
            found = measure_from(client.app, client.shared, self._weights, offer)
        except TrainingFailed as error:
            raise _failed(client, error) from error
        except WorkRefused as error:
            return ClientReport(None, error.public_reason)
        return ClientReport(found, "" if found else NOTHING_HELD_OUT)

    def _client(self, group: ClientGroup, position: int) -> LiveClient:
        return self._clients.of(int(group.numbers[position]), partial(group.share, position))

    def _checked(self, work: ClientsWork, position: int) -> LiveClient:
        assert self._layout is not None, "begin with a model first"
        return self._clients.under(work.offer.tensors, self._layout.model, self._client(work.group, position))

    def _plan(self, work: ClientsWork, position: int, client: LiveClient, offer: Assignment) -> LocalPlan:
        steps_max, plan = int(work.steps_max[position]), _asked(work, client, offer)
        return replace(
            plan,
            within=self._projections(offer.codec),
            told_to_stop=stop_after(steps_max) if steps_max else plan.told_to_stop,
        )

    def _projections(self, codec: CodecPlan) -> Mapping[str, Projection]:
        assert self._layout is not None, "begin with a model first"
        if self._within is None or self._within[0] != codec:
            self._within = codec, GradientProjections(codec, self._layout)
        return self._within[1]


def _write(pieces: Iterator[Tensor], row: Tensor) -> None:
    first = 0
    for piece in pieces:
        row[first : first + len(piece)] = piece
        first += len(piece)


def _asked(work: ClientsWork, client: LiveClient, offer: Assignment) -> LocalPlan:
    """What the run asks. The model gets its private tensors from before this version, and the plan the state."""
    name, before = client_name(client.number), work.states.before(client.number, offer.model.version)
    plan = asked_of_site(offer.training, offer.seed, offer.share, run=offer.run, number=offer.round, client=name)
    return with_kept(plan, client.shared, before, client.first_private)


def stop_after(n_steps: int) -> Callable[[], str | None]:
    """A check that tells a training to stop once it was called `n_steps` times, after each step."""
    asked = itertools.count(1)
    return lambda: "its time is up" if next(asked) >= n_steps else None


def _failed(client: LiveClient, error: TrainingFailed) -> EngineError:
    said = f": {error}" if error.__cause__ is None else f" failed: {where_raised(error.__cause__)}"
    return EngineError(f"client {client.number}{said}")


def _require_stopped(client: LiveClient, done: Trained, steps_max: int) -> None:
    if steps_max and done.result.steps_done > steps_max:
        raise EngineError(
            f"client {client.number} did {done.result.steps_done} steps, but its simulated device has time for "
            f"{steps_max}: train must call plan.should_stop() after each step, and stop when that gives a reason"
        )
