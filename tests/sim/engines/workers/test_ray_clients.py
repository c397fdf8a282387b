"""Real clients on a Ray cluster of this machine, where Ray is installed."""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch

from tests.sim.engines.clients.sites import app_of, model_of, work_of
from tests.sim.engines.clients.test_trainer import results, without_times
from tests.sim.experiment.test_own_clients import DEALT, KEEPING, rows_of, table
from umbel.sim.engines.clients.app import ClientApp
from umbel.sim.engines.clients.sequential import SequentialClients
from umbel.sim.engines.work import EngineError
from umbel.sim.engines.workers.ray_clients import RayClients

Maker = Callable[[ClientApp], RayClients]


@pytest.fixture
def make(ray: Any) -> Generator[Maker]:
    made = list[RayClients]()

    def make(app: ClientApp) -> RayClients:
        made.append(RayClients(app, n_workers=2))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["make_client", "make_careless"])
def test_actors_give_the_bits_and_the_reports_of_the_sequential_engine(make: Maker, name: str) -> None:
    """Also where a client's code draws from generators that it never seeds."""
    app = app_of(name)
    model, actors, alone = model_of(app), make(app), SequentialClients(app)
    for _ in range(2):  # the second model is a new one
        work = work_of([4, 0, 2, 5], model, [0, 2, 0, 1], evaluate=True)
        expected, reports = results(alone, model, work)
        values, found = results(actors, model, work)
        assert torch.equal(values, expected)
        assert without_times(found) == without_times(reports)
        assert without_times(actors.measure(model, work)) == without_times(alone.measure(model, work))
        assert np.array_equal(actors.sizes(work.group), alone.sizes(work.group))
        for tensor in model.owned.values():
            tensor.add_(0.5)


@pytest.mark.slow
def test_code_that_fails_is_named_with_its_place(make: Maker) -> None:
    app = app_of("make_failing")
    model = model_of(app)
    with pytest.raises(EngineError, match=r"^client 2 failed: OSError: no such ward \(.*sites.py, line \d+\)"):
        results(make(app), model, work_of([2], model))


@pytest.mark.slow
def test_clients_keep_their_states_though_actors_may_be_on_other_machines(ray: Any) -> None:
    alone = rows_of(table("make_remembering", rounds=KEEPING))
    actors = rows_of(table("make_remembering", rounds=KEEPING, engine={"name": "ray", "workers": 2}))
    assert [row.model_sha256 for row in actors] == [row.model_sha256 for row in alone]
    assert [row.train_metrics for row in actors] == [row.train_metrics for row in alone]


@pytest.mark.slow
def test_clients_get_the_share_that_the_partition_deals(ray: Any) -> None:
    alone, actors = (rows_of(table(section=None, **DEALT, engine={"name": name})) for name in ("sequential", "ray"))
    assert [row.model_sha256 for row in actors] == [row.model_sha256 for row in alone]
    assert [row.test_metrics for row in actors] == [row.test_metrics for row in alone]
