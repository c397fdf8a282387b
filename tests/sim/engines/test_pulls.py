"""Pulls: each engine adds to the gradients of a client what FedDyn or SCAFFOLD adds there, as the SDK does."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.federations.whole_states import state_change
from tests.sim.engines.cohorts import all_changes, recipe, start_of, work_of
from umbel.aggregation.model.layout import Layout
from umbel.client.rounds.site_code import asked_of_site
from umbel.client.training.trainer import TorchClient
from umbel.sim.engines.device import one_thread
from umbel.sim.engines.stacked.stacked import StackedEngine
from umbel.sim.engines.training import SequentialEngine
from umbel.sim.engines.work import CohortWork, Engine
from umbel.sim.engines.workers.processes import ProcessesEngine
from umbel.sim.engines.workers.threads import ThreadsEngine

MADE_BY = recipe("mlp")
SIZES, STEPS = [9, 1, 4, 13], [7, 3, 1, 4]
ENGINES: dict[str, Callable[[], Engine]] = {
    "sequential": lambda: SequentialEngine(MADE_BY, arithmetic="sdk"),
    "threads": lambda: ThreadsEngine(MADE_BY, 2, arithmetic="sdk"),
    "processes": lambda: ProcessesEngine(MADE_BY, 2, arithmetic="sdk"),
    "batched, by hand": lambda: StackedEngine(MADE_BY.make()),
    "batched, any module": lambda: StackedEngine(MADE_BY.make(), by_hand=False),
}


def work(*, pulls: Tensor | None, algorithm: str) -> CohortWork:
    mu = 0.2 if algorithm == "feddyn" else 0.0
    plain = work_of(SIZES, STEPS, proximal_mu=mu, optimizer={"algorithm": algorithm, "total_samples": 9})
    return replace(plain, pulls=pulls)


def drawn_pulls() -> Tensor:
    """Other ones for each client."""
    n_values = len(start_of(MADE_BY))
    return torch.randn(len(SIZES), n_values, generator=torch.Generator().manual_seed(3)) * 0.1


def by_the_sdk(pulls: Tensor, algorithm: str) -> Tensor:
    found, given = list[Tensor](), work(pulls=pulls, algorithm=algorithm)
    for i in range(len(SIZES)):
        own, model = given.data.of(i), MADE_BY.make()
        layout = Layout.of_state(model.state_dict())
        start = {name: value.clone() for name, value in model.state_dict().items()}
        client = TorchClient(model, MADE_BY.mean_loss(), TensorDataset(own.inputs, own.targets), device="cpu")
        plan = asked_of_site(replace(given.plan, local_steps=STEPS[i], local_epochs=None), int(given.seeds[i]))
        mine = {spec.name: pulls[i][spec.place].view(spec.shape) for spec in layout.owners()}
        with one_thread():
            client.train(model, replace(plan, pulls=mine))
        found.append(state_change(layout, model.state_dict(), start))
    return torch.stack(found)


@pytest.mark.parametrize("algorithm", ["feddyn", "scaffold"])
@pytest.mark.parametrize("name", ENGINES)
def test_each_engine_pulls_each_client_as_the_sdk_does(name: str, algorithm: str) -> None:
    engine, pulls = ENGINES[name](), drawn_pulls()
    try:
        changes, _ = all_changes(engine, start_of(MADE_BY), work(pulls=pulls, algorithm=algorithm))
        zeros = work(pulls=torch.zeros_like(pulls), algorithm=algorithm)
        without, _ = all_changes(engine, start_of(MADE_BY), zeros)
        again, _ = all_changes(engine, start_of(MADE_BY), work(pulls=pulls, algorithm=algorithm))
    finally:
        engine.close()
    wanted = by_the_sdk(pulls, algorithm)
    if name.startswith("batched"):
        torch.testing.assert_close(changes, wanted, rtol=0, atol=2e-6)
    else:
        assert torch.equal(changes, wanted)
    assert torch.equal(changes, again), "the pulls of a cohort are forgotten with it"
    assert np.all((changes - without).abs().amax(1).numpy() > 1e-4)
