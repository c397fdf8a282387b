"""Real clients do their work as in production, and the same on every engine."""

from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.sim.engines.clients.sites import Scripted, app_of, careless_training, model_of, net, work_of
from tests.suite.nights import at_night
from umbel.aggregation.reports import EvaluationDone, WorkDone
from umbel.aggregation.run.model_state import ModelState
from umbel.client import Client, Evaluation, LocalPlan, TrainResult
from umbel.client.rounds.site_code import asked_of_site
from umbel.client.rounds.work import NOTHING_HELD_OUT
from umbel.sim.engines.clients.alive import LiveClients
from umbel.sim.engines.clients.app import ClientApp, ClientShare
from umbel.sim.engines.clients.sequential import SequentialClients
from umbel.sim.engines.clients.trainer import ClientTrainer
from umbel.sim.engines.clients.work import ClientReport, ClientsEngine, ClientsWork, GlobalModel
from umbel.sim.engines.work import EngineError
from umbel.sim.engines.workers.client_processes import ClientProcesses


def results(engine: ClientsEngine, model: GlobalModel, work: ClientsWork) -> tuple[Tensor, list[ClientReport]]:
    """By position."""
    values, reports = torch.full((len(work), model.layout.n_values), torch.nan), dict[int, ClientReport]()
    for found in engine.train(model, work):
        values[torch.from_numpy(found.positions)] = found.values
        reports |= dict(zip(found.positions.tolist(), found.reports, strict=True))
    return values, [reports[position] for position in range(len(work))]


def without_times(reports: list[ClientReport]) -> list[object]:
    return [(one.refusal, one.work and {**_fields(one.work), "train_s": 0, "evaluate_s": 0}) for one in reports]


def _fields(work: WorkDone | EvaluationDone) -> dict[str, object]:
    return {name: getattr(work, name) for name in work.__slots__ if hasattr(work, name)}


@contextmanager
def on_each_engine(app: ClientApp) -> Generator[list[ClientsEngine]]:
    with closing(ClientProcesses(app, n_workers=2)) as two:
        yield [SequentialClients(app), SequentialClients(app, n_alive=1), two]


@pytest.mark.parametrize("name", ["make_client", "make_careless"])
def test_it_does_not_matter_how_many_clients_live(name: str) -> None:
    app = app_of(name)
    model = model_of(app)
    found = [results(SequentialClients(app, n), model, work_of([4, 0, 2], model, [0, 2, 0])) for n in (None, 1)]
    again = results(SequentialClients(app), model, work_of([2, 4, 0], model, [0, 0, 2]))[0][[1, 2, 0]]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][0], again), "nor in which order they train"
    assert without_times(found[0][1]) == without_times(found[1][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*at_night("make_client"), "make_careless"])
def test_every_engine_gives_the_same_bits_and_the_same_reports_however_few_clients_live(name: str) -> None:
    """Also where a client's code draws from generators that it never seeds."""
    app = app_of(name)
    model = model_of(app)
    work = work_of([4, 0, 2, 5], model, [0, 2, 0, 1], evaluate=True)
    with on_each_engine(app) as engines:
        first, *others = [
            (results(one, model, work), one.measure(model, work), one.sizes(work.group)) for one in engines
        ]
    (values, reports), measured, sizes = first
    assert values.isfinite().all()
    assert values.abs().sum(1).all()
    for (other_values, other_reports), other_measured, other_sizes in others:
        assert torch.equal(other_values, values)
        assert without_times(other_reports) == without_times(reports)
        assert without_times(other_measured) == without_times(measured)
        assert np.array_equal(other_sizes, sizes)


def test_a_client_trains_as_it_does_by_itself() -> None:
    """A plain loop over the same objects is the oracle."""
    app = app_of("make_client")
    model = model_of(app)
    work = work_of([3, 1], model, proximal_mu=0.1)
    values, reports = results(SequentialClients(app), model, work)
    for position, number in enumerate([3, 1]):
        client, offer = app.make(number, None), work.offer_of(position)
        client.model.load_state_dict(model.layout.full_state(model.owned))
        done = client.train(client.model, asked_of_site(offer.training, offer.seed, offer.share))
        after = client.model.state_dict()
        change = torch.cat([(after[one.name] - model.owned[one.name]).reshape(-1) for one in model.layout.owners()])
        assert torch.equal(values[position], change)
        report = reports[position].work
        assert isinstance(report, WorkDone)
        assert (report.sample_count, report.steps_done, report.metrics) == (
            done.sample_count,
            done.steps_done,
            done.metrics,
        )


class OneClient(ClientApp):
    """An app whose only client is given."""

    def __init__(self, client: Client) -> None:
        object.__setattr__(self, "client", client)
        object.__setattr__(self, "name", "tests:one")

    def make(self, number: int, share: ClientShare | None) -> Client:
        client: Client = self.client  # type: ignore[attr-defined]  # set above
        return client


def report_of(client: Client, steps_max: int = 0, **plan: Any) -> ClientReport:
    trainer, model = ClientTrainer(LiveClients(OneClient(client), 1)), model_of(app_of("make_client"))
    trainer.begin(model)
    return trainer.train(work_of([0], model, [steps_max], **plan), 0, torch.empty(model.layout.n_values))


def says(sample_count: int = 9, done: int = 3, planned: int = 3, loss: float = 1.0) -> Callable[..., TrainResult]:
    return lambda model, plan: TrainResult(sample_count, done, planned, {"loss": loss, "other": 2.0})


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (Scripted(says(sample_count=10)), "returned a sample_count of 10, but this client has 9 samples"),
        (Scripted(says(sample_count=2000), sample_count=5000), "accepts at most 1000"),
        (Scripted(says(done=4)), "returned an inconsistent result: steps_done must lie between 1 and steps_planned"),
    ],
)
def test_a_result_that_production_refuses_is_refused_in_the_same_words(client: Client, words: str) -> None:
    report = report_of(client)
    assert report.work is None
    assert words in report.refusal


def test_an_update_that_is_not_finite_is_refused_in_the_words_of_the_codec_later() -> None:
    """The client's own report is fine; the update is refused where it is written."""
    report = report_of(Scripted(says(loss=float("nan"))))
    assert isinstance(report.work, WorkDone)
    assert report.work.metrics == {"other": 2.0}


def test_a_client_that_changes_its_tensors_declines() -> None:
    def train(model: nn.Module, plan: LocalPlan) -> TrainResult:
        model.register_buffer("seen", torch.zeros(2))
        return TrainResult(9, 3, 3)

    assert "the trained model" in report_of(Scripted(train)).refusal


@pytest.mark.parametrize("wrong", [lambda model, plan: None, lambda model, plan: {"loss": 1.0}])
def test_a_result_of_a_wrong_type_names_the_client(wrong: Callable[..., TrainResult]) -> None:
    with pytest.raises(EngineError, match="client 0 failed: TypeError: train must return TrainResult"):
        report_of(Scripted(wrong))


@pytest.mark.slow
def test_code_that_fails_is_named_with_its_place_on_every_engine() -> None:
    app = app_of("make_failing")
    model = model_of(app)
    with on_each_engine(app) as engines:
        for engine in engines:
            with pytest.raises(EngineError, match=r"^client 2 failed: OSError: no such ward \(.*sites.py, line \d+\)"):
                results(engine, model, work_of([2], model))


def test_a_client_that_is_told_to_stop_stops_and_one_that_is_not_never_hears_of_it() -> None:
    told = report_of(Scripted(careless_training), 3, local_epochs=2).work
    free = report_of(Scripted(careless_training), 0, local_epochs=2).work
    assert isinstance(told, WorkDone)
    assert isinstance(free, WorkDone)
    assert (told.steps_done, told.steps_planned, told.is_partial) == (3, 8, True)
    assert (free.steps_done, free.is_partial) == (8, False)


def test_a_client_that_does_not_stop_is_named_with_what_to_do() -> None:
    with pytest.raises(EngineError, match=r"client 0 did 5 steps, but .* has time for 3: .*should_stop"):
        report_of(Scripted(says(done=5, planned=5)), 3)


def test_the_plan_asks_for_an_evaluation_before_the_training() -> None:
    seen = list[Tensor]()

    def evaluate(model: nn.Module) -> Evaluation:
        seen.append(model.state_dict()["1.weight"].clone())
        return Evaluation(4, {"auc": 0.75, "bad": float("inf")})

    report = report_of(Scripted(careless_training, evaluate), evaluate=True).work
    assert isinstance(report, WorkDone)
    assert (report.evaluation, report.evaluation_sample_count) == ({"auc": 0.75}, 4)
    assert torch.equal(seen[0], model_of(app_of("make_client")).owned["1.weight"])


def test_a_client_without_held_out_data_declines_to_measure() -> None:
    app = app_of("make_failing")
    model = model_of(app)
    (report,) = SequentialClients(app).measure(model, work_of([1], model))
    assert report == ClientReport(None, NOTHING_HELD_OUT)


def test_models_that_differ_are_refused_with_the_tensor() -> None:
    app = app_of("make_unequal")
    model = model_of(app)
    with pytest.raises(
        EngineError, match=r"of client 5 is not the model of client 0: tensor '1\.bias' is float32\[6\]"
    ):
        results(SequentialClients(app), model, work_of([5], model))


def test_an_exact_counter_arrives_as_in_production() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            self.register_buffer("n", torch.tensor(1 << 40, dtype=torch.int64))

    def train(model: nn.Module, plan: LocalPlan) -> TrainResult:
        model.get_buffer("n").add_(3)
        return TrainResult(9, 1, 1)

    client = Scripted(train)
    client.model = Counting()
    state = client.model.state_dict()
    first = ModelState.first(state)
    model = GlobalModel(first.layout, first.published)
    trainer, row = ClientTrainer(LiveClients(OneClient(client), 1)), torch.empty(first.layout.n_values)
    trainer.begin(model)
    trainer.train(work_of([0], model), 0, row)
    (place,) = (one.place for one in first.layout.owners() if one.name == "n")
    assert row[place].tolist() == [3 * 2**-16]
