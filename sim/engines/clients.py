"""The engine of real clients: each runs its own `train`, from a model file to a weight change, as in the SDK.

A `Client` decides how it trains, its simulated device for how long: after a number of steps the client is told to stop,
as by a coordinator. No HTTP and no state on disk take part.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from umbel.aggregation.codec.vector_update import projections
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import master_dtype, published
from umbel.aggregation.plans.tensors import TensorRules
from umbel.client.app import Client
from umbel.client.errors import TrainingFailed
from umbel.client.local.results import TrainResult
from umbel.client.rounds.work import asked_of_site, train, weight_changes
from umbel.client.training.shared_state import SharedState
from umbel.sim.engines.device import one_thread
from umbel.sim.engines.work import Changes, CohortWork, EngineError


class ClientsEngine:
    """`clients`: by number, each with its own model. Their data and optimizer replace those of the work.

    `rules`: of the run, of what travels.
    """

    name = "clients"

    def __init__(self, clients: Sequence[Client], rules: TensorRules | None = None) -> None:
        self._clients, self._rules = clients, rules

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        """As `Engine.train`, one client after another. The work must have `clients`."""
        if len(work.clients) != len(work.data):
            raise EngineError(
                'the engine "clients" needs the clients\' numbers, but the work does not have them (`clients`)'
            )
        with tempfile.TemporaryDirectory(prefix="umbel-clients-") as folder:
            path = Path(folder) / "model.safetensors"
            for position, number in enumerate(work.clients.tolist()):
                app = self._clients[number]
                shared = SharedState(app, self._rules)
                if position == 0:
                    path.write_bytes(_model_file(shared.layout, start))
                with one_thread():
                    done = _trained(app, shared, path, work, position)
                    values = torch.cat(list(weight_changes(shared, path)))
                yield _changes(position, values, done)

    def close(self) -> None:
        """Nothing is held: the clients are the caller's."""


def _model_file(layout: Layout, start: Tensor) -> bytes:
    """The model that clients fetch. `start`: float32 in layout order."""
    owned = {s.name: published(s, start[s.place].to(master_dtype(s))).view(s.shape) for s in layout.owners()}
    return encode_model(layout.full_state(owned), layout)


def _trained(app: Client, shared: SharedState, start: Path, work: CohortWork, position: int) -> TrainResult:
    """Raises `EngineError` if the client's code fails or does not stop when told to."""
    n_steps, number = int(work.steps[position]), int(work.clients[position])
    plan = replace(
        asked_of_site(work.plan, int(work.seeds[position])),
        evaluate=False,  # a federation measures models by itself
        within=projections(work.codec, shared.layout),
        told_to_stop=stop_after(n_steps),
    )
    try:
        done = train(app, shared, start, plan).result
    except TrainingFailed as error:
        raise EngineError(f"client {number} failed: {error.__cause__!r}") from error
    if done.steps_done != n_steps:
        raise EngineError(
            f"client {number} did {done.steps_done} steps, but its simulated device has time for {n_steps}: train "
            "must do the steps of its plan, call plan.should_stop() after each, and stop when that gives a reason"
        )
    return done


def stop_after(n_steps: int) -> Callable[[], str | None]:
    """A check that tells a training to stop once it was called `n_steps` times, after each step."""
    asked = itertools.count(1)
    return lambda: "its time is up" if next(asked) >= n_steps else None


def _changes(position: int, values: Tensor, done: TrainResult) -> Changes:
    mean = done.metrics.get("loss", np.nan)
    told = (mean, done.first_loss, done.last_loss)
    losses = (np.array([mean if loss is None else loss], dtype=np.float64) for loss in told)
    return Changes(np.array([position]), values.unsqueeze(0), *losses)
