"""Experiments of objects: `simulate(model=..., loss=..., data=..., clients=...)`."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.repository import ROOT
from umbel.client import TorchClient
from umbel.client.app import Client
from umbel.sim import Watcher, simulate
from umbel.sim.data.data_set import DataError
from umbel.sim.engines import choose
from umbel.sim.engines.work import EngineError
from umbel.sim.experiment.checkpoint import CheckpointError
from umbel.sim.experiment.file import TrialSpec
from umbel.sim.experiment.objects import code_digest, objects_of
from umbel.sim.federation.rows import Row
from umbel.sim.models import ModelError

SHAPE: dict[str, Any] = {
    "rounds": {"count": 3, "target": 3},
    "training": {"local_epochs": 1, "batch_size": 10, "learning_rate": 0.3},
    "engine": {"name": "sequential"},
}
DEALT: dict[str, Any] = {**SHAPE, "partition": {"scheme": "iid", "clients": 4}}


def samples(n: int = 160, seed: int = 0) -> TensorDataset:
    """Points of the plane, whose class is on which side of a line they are."""
    inputs = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


def seeded_net(seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return net()


def mean_error(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)


def sha256s(**objects: Any) -> list[str]:
    described = objects.pop("described", DEALT)
    return [one.model_sha256 for one in simulate(described, **objects).trials]


@pytest.mark.slow
def test_a_module_begins_every_run_with_its_weights_and_is_left_as_it_was() -> None:
    given = seeded_net()
    before = {name: value.clone() for name, value in given.state_dict().items()}
    results = simulate({**DEALT, "seeds": [0, 1]}, model=given, data=samples())
    assert all(torch.equal(before[name], value) for name, value in given.state_dict().items())
    assert results.trials[0].model_sha256 != results.trials[1].model_sha256
    assert results.points[0].accuracy is not None
    given.load_state_dict(results.models[0])
    assert not torch.equal(before["0.weight"], given.state_dict()["0.weight"])
    assert sha256s(model=seeded_net(), data=samples()) == [results.trials[0].model_sha256]


def test_a_function_makes_the_model_that_its_name_makes() -> None:
    """The same bits as a name in the file, whose first weights the run's seed draws too."""
    named = simulate({**DEALT, "model": {"name": f"{__name__}:net"}}, data=samples())
    assert sha256s(model=net, data=samples()) == [named.trials[0].model_sha256]


@pytest.mark.parametrize("engine", ["batched", "threads", "auto"])
def test_objects_are_trained_by_the_engines_of_this_process(engine: str) -> None:
    described = {**DEALT, "engine": {"name": engine}}
    results = simulate(described, model=net, data=samples())
    assert results.trials[0].rows[-1].accuracy is not None
    if engine == "threads":
        assert results.trials[0].model_sha256 == sha256s(model=net, data=samples())[0]


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        (
            {"model": net},
            'net is an object of this program, .* as my_code.py, and name it "my_code:net"; or set name =',
        ),
        ({"model": lambda: net()}, 'name it "my_code:make"; or set name = "sequential" or "threads"'),
        ({"model": f"{__name__}:net", "loss": mean_error}, "mean_error is an object of this program"),
    ],
)
def test_worker_processes_cannot_import_an_object_and_say_what_to_do(objects: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        simulate({**DEALT, "engine": {"name": "processes"}}, data=samples(), **objects)


@pytest.mark.slow
def test_data_alone_may_be_an_object_for_worker_processes_too() -> None:
    described = {**DEALT, "rounds": {"count": 1, "target": 2}, "engine": {"name": "processes", "workers": 2}}
    named = f"{__name__}:net"
    one = {**DEALT, "rounds": {"count": 1, "target": 2}}
    found = sha256s(described=described, model=named, data=samples())
    assert found == sha256s(described=one, model=named, data=samples())


@pytest.mark.parametrize(
    "data",
    [
        (samples().tensors[0].numpy(), samples().tensors[1].numpy()),
        samples().tensors,
        (samples(), samples(40, seed=9)),
        (samples().tensors, samples(40, seed=9).tensors),
    ],
    ids=["arrays", "tensors", "data sets", "pairs"],
)
def test_data_come_in_many_forms(data: Any) -> None:
    (trial,) = simulate(DEALT, model=net, data=data).trials
    assert trial.n_clients == 4
    assert trial.rows[-1].accuracy is not None
    assert trial.rows[-1].accuracy > 0.6


def test_a_list_of_data_is_one_client_each_with_its_own_samples() -> None:
    sizes = [15, 30, 45]
    parts = [samples(n, seed=n) for n in sizes]
    described = {**SHAPE, "measure": {"clients": True}}
    results = simulate(described, model=net, data=(parts, samples(50, seed=1)))
    assert results.trials[0].n_clients == 3
    counts = {row["client"]: row["sample_count"] for row in results.client_rows}
    assert sorted(counts.values()) == sizes
    with pytest.raises(
        ValueError, match=r'partition\.scheme is "iid", but `data` is a list of the data of each client'
    ):
        simulate(DEALT, model=net, data=parts)
    with pytest.raises(DataError, match=r"would have no sample to train on, .* give the test set yourself"):
        simulate(SHAPE, model=net, data=[samples(200), *(samples(1, seed=n) for n in range(9))])


def test_a_loss_of_one_s_own_is_trained_with_and_measured() -> None:
    own = simulate(DEALT, model=net, data=samples(), loss=mean_error)
    plain = simulate(DEALT, model=net, data=samples())
    assert own.trials[0].model_sha256 != plain.trials[0].model_sha256
    net_of = net()
    net_of.load_state_dict(own.models[0])
    data = samples()
    named = simulate(DEALT, model=net, data=(data, data), loss=mean_error)
    net_of.load_state_dict(named.models[0])
    inputs, targets = data.tensors
    row = named.trials[0].rows[-1]
    assert row.loss == pytest.approx(mean_error(net_of(inputs), targets).item(), rel=1e-5)
    assert row.accuracy == pytest.approx((net_of(inputs).argmax(1) == targets).double().mean().item())


def test_a_module_is_a_loss_and_the_same_one_as_its_function() -> None:
    smooth = sha256s(model=net, data=samples(), loss=nn.CrossEntropyLoss(label_smoothing=0.1))
    assert smooth == sha256s(model=net, data=samples(), loss=mean_error)
    assert sha256s(model=net, data=samples(), loss="classes") == sha256s(model=net, data=samples())


def test_a_loss_by_name_needs_no_output_for_each_class() -> None:
    results = simulate(DEALT, model=lambda: nn.Linear(2, 1), data=samples(), loss="one-logit")
    row = results.trials[0].rows[-1]
    assert row.accuracy is not None
    assert row.accuracy > 0.6


def test_targets_may_be_what_the_loss_takes() -> None:
    """Regression: the loss falls, and no accuracy is made up."""
    inputs = samples().tensors[0]
    heights = inputs @ torch.tensor([[2.0], [-1.0]])
    for loss in ("regression", lambda output, target: (output - target).square().mean()):
        results = simulate(DEALT, model=lambda: nn.Linear(2, 1), data=(inputs, heights), loss=loss)
        rows = results.trials[0].rows
        assert [row.accuracy for row in rows] == [None] * 3
        assert rows[0].loss is not None
        assert rows[-1].loss is not None
        assert rows[-1].loss < 0.1 * rows[0].loss
        (point,) = results.points
        assert (point.accuracy, point.best_accuracy, point.late_accuracy) == (None, None, None)
        assert point.loss is not None
        assert point.loss.mean == rows[-1].loss
        assert "-" in repr(results)


def test_targets_that_are_no_classes_need_a_loss_and_a_partition_without_classes() -> None:
    inputs = samples().tensors[0]
    with pytest.raises(DataError, match="targets must be one class"):
        simulate(DEALT, model=lambda: nn.Linear(2, 1), data=(inputs, inputs))
    skewed = {**DEALT, "partition": {"scheme": "dirichlet", "clients": 4, "alpha": 0.5}}
    with pytest.raises(ValueError, match="looks at the class of each sample, but these targets have shape"):
        simulate(skewed, model=lambda: nn.Linear(2, 2), data=(inputs, inputs), loss="regression")
    with pytest.raises(ModelError, match="are no classes, so mlp does not fit: give a model of your own"):
        simulate(DEALT, data=(inputs, inputs), loss="regression")
    flipping = {**DEALT, "fleet": {"malicious": {"share": 0.5, "kinds": ["label-flip"]}}}
    with pytest.raises(ModelError, match=r'"label-flip" need classes, and the targets of own data are none'):
        simulate(flipping, model=lambda: nn.Linear(2, 2), data=(inputs, inputs), loss="regression")


@pytest.mark.parametrize(
    ("objects", "described", "error", "words"),
    [
        ({"model": nn.Linear(2, 2), "loss": lambda output, target: output}, DEALT, ModelError, "a tensor of shape"),
        ({"model": nn.Linear(2, 2), "loss": lambda output: output}, DEALT, ModelError, "cannot be computed of"),
        ({"model": nn.Linear(2, 2), "loss": "mse"}, DEALT, ValueError, "loss must be one of classes, tokens"),
        ({"model": nn.Linear(3, 2)}, DEALT, ModelError, "cannot take the inputs"),
        ({"model": 3}, DEALT, ValueError, "model is a int; give an nn.Module"),
        ({"model": lambda: 3}, DEALT, ModelError, "it must give a torch.nn.Module"),
        ({"model": net, "clients": [1]}, DEALT, ValueError, "clients bring their own model and loss"),
        ({"clients": []}, SHAPE, ValueError, "the list of clients is empty"),
        ({"clients": [net()]}, SHAPE, ValueError, "the list of clients has a Sequential"),
        (
            {"model": net, "loss": mean_error},
            {**DEALT, "engine": {"name": "batched"}},
            EngineError,
            "cannot be stacked, because stacking needs the loss of each sample",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_the_first_round(
    objects: dict[str, Any], described: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        simulate(described, data=None if "clients" in objects else samples(), **objects)


@pytest.mark.parametrize("data", [[1, 2], (1,), [(1, 2, 3)], {"x": 1}])
def test_other_data_are_refused_with_the_forms_that_there_are(data: Any) -> None:
    with pytest.raises(DataError, match="give a data set, a pair"):
        simulate(DEALT, model=net, data=data)


def test_without_anything_to_simulate_a_sentence_says_so() -> None:
    with pytest.raises(ValueError, match="there is nothing to simulate"):
        simulate()


def test_the_page_s_example_is_simulated() -> None:
    page = (ROOT / "docs" / "how-to" / "simulate-your-own-data-and-model.md").read_text()
    section = page.split("\n### Objects instead of names\n")[1].split("\n### ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    inputs = np.random.default_rng(0).normal(size=(400, 8))
    names: dict[str, Any] = {"inputs": inputs, "targets": (inputs[:, 0] > 0).astype(np.int64)}
    exec(block, names)
    assert names["results"].points[0].accuracy.mean > 0.65


# --- clients ----------------------------------------------------------------------------------------------------------


def client_of(data: TensorDataset, seed: int = 1) -> Client:
    return TorchClient(seeded_net(seed), nn.CrossEntropyLoss(), data, data, device="cpu")


def made_client(number: int, of: int) -> Client:
    return client_of(samples(20 + number, seed=number))


@pytest.mark.slow
def test_a_list_of_clients_gives_the_models_of_a_function_that_makes_them() -> None:
    listed = [made_client(number, 4) for number in range(4)]
    before = {name: value.clone() for name, value in listed[0].model.state_dict().items()}
    found = sha256s(described={**SHAPE, "seeds": [0, 1]}, clients=listed)
    assert found == sha256s(described={**SHAPE, "seeds": [0, 1], "clients": {"count": 4}}, clients=made_client)
    assert all(torch.equal(before[name], value) for name, value in listed[0].model.state_dict().items())


def test_clients_get_their_share_of_given_data() -> None:
    def make(number: int, of: int, data: Any) -> Client:
        assert of == 4
        return client_of(data.train)

    results = simulate(DEALT, data=samples(), clients=make)
    assert results.trials[0].rows[-1].sample_count == 3 * 32


def test_worker_processes_cannot_import_clients_that_are_objects() -> None:
    described = {**SHAPE, "clients": {"count": 4}, "engine": {"name": "processes"}}
    with pytest.raises(EngineError, match=r'made_client is an object of this program.*or set name = "sequential"'):
        simulate(described, clients=made_client)


@pytest.mark.slow
def test_auto_keeps_clients_that_are_objects_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where workers would be worth their start."""
    monkeypatch.setattr(choose, "WORTH_WORKERS_S", 0.0)
    described = {**SHAPE, "engine": {"name": "auto", "workers": 2}}
    (trial,) = simulate(described, clients=[made_client(number, 4) for number in range(4)]).trials
    assert trial.engine == "sequential"
    assert "worker processes cannot import what makes them" in trial.engine_why


# --- identity ---------------------------------------------------------------------------------------------------------


class NoRow(Watcher):
    """Is told of no row, because nothing is simulated again."""

    def row(self, trial: TrialSpec, row: Row) -> None:
        raise AssertionError(row)


@pytest.mark.slow
def test_a_folder_is_resumed_with_equal_objects_and_refuses_others(tmp_path: Path) -> None:
    first = simulate(DEALT, tmp_path, samples(), model=seeded_net())
    again = simulate(DEALT, tmp_path, samples(), model=seeded_net(), watcher=NoRow())
    assert again.trials[0].model_sha256 == first.trials[0].model_sha256
    with pytest.raises(ValueError, match=r"holds another experiment: model.name is .*Sequential-\w{16}. there, and"):
        simulate(DEALT, tmp_path, samples(), model=seeded_net(2))
    with pytest.raises(ValueError, match=r"holds another experiment: data.name is .*data-\w{16}. there, and"):
        simulate(DEALT, tmp_path, samples(seed=3), model=seeded_net())
    with pytest.raises(ValueError, match=r"model.loss is not set there, and .*mean_error-"):
        simulate(DEALT, tmp_path, samples(), model=seeded_net(), loss=mean_error)


@pytest.mark.slow
def test_a_function_whose_first_weights_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the function calls is not part of its name, so the weights count."""
    simulate({**DEALT, "rounds": {"count": 1, "target": 2}}, tmp_path, samples(), model=calling)
    monkeypatch.setitem(globals(), "WIDTH", 5)
    with pytest.raises(CheckpointError, match="first weights of the model changed since the run"):
        simulate({**DEALT, "rounds": {"count": 2, "target": 2}}, tmp_path, samples(), model=calling)


WIDTH = 4


def calling() -> nn.Module:
    return nn.Sequential(nn.Linear(2, WIDTH), nn.Linear(WIDTH, 2))


def enclosing(value: object) -> Callable[[], object]:
    return lambda: value


ALIKE: list[Callable[[], object]] = [
    lambda: net,
    lambda: seeded_net(3),
    lambda: partial(seeded_net, seed=4),
    lambda: enclosing({1: 2}),
    lambda: enclosing((1, "a")),
    lambda: nn.CrossEntropyLoss(weight=torch.ones(2)),
    lambda: made_client,
]


class Scaled(nn.Module):
    """Its scale is in no tensor, and is not printed."""

    depth = 1

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def deep(depth: int) -> type:
    return type("Deep", (Scaled,), {"depth": depth, "__module__": __name__})


OTHERS: list[Callable[[], object]] = [
    lambda: seeded_net(5),
    lambda: partial(seeded_net, seed=5),
    lambda: enclosing((1, "b")),
    lambda: enclosing(2),
    lambda: nn.CrossEntropyLoss(weight=torch.full((2,), 2.0)),
    lambda: nn.CrossEntropyLoss(),
    lambda: nn.Linear,
    lambda: nn.Conv2d,
    lambda: Scaled(1.0),
    lambda: nn.Sequential(Scaled(1.0)),
    lambda: nn.Sequential(Scaled(2.0)),
    lambda: deep(1),
    lambda: deep(2),
    lambda: enclosing(np.zeros(3)),
    lambda: enclosing(np.ones(3)),
    lambda: enclosing({"a": [1, 2]}),
    lambda: enclosing({"a": [1, 3]}),
]


def test_equal_objects_have_equal_digests_and_different_ones_have_others() -> None:
    for make in (*ALIKE, *OTHERS):
        assert code_digest(make()) == code_digest(make())
    found = [code_digest(make()) for make in (*ALIKE, *OTHERS)]
    assert len(set(found)) == len(found)


def test_clients_of_other_data_or_settings_are_other_clients() -> None:
    def clients(seed: int = 1, n: int = 20, temper: str = "mild") -> list[Client]:
        made = client_of(samples(n, seed=2), seed)
        vars(made)["temper"] = temper
        return [made]

    def key(made: list[Client]) -> object:
        return objects_of(None, None, None, made).keys["clients.app"]

    assert key(clients()) == key(clients())
    assert len({key(one) for one in (clients(), clients(seed=2), clients(n=21), clients(temper="wild"))}) == 4


@pytest.mark.slow
def test_a_digest_of_code_is_that_of_another_process(tmp_path: Path) -> None:
    """Sets of texts in code are in no order, so their order must not count."""
    (tmp_path / "own.py").write_text(
        "def f(x):\n    return x in {'a', 'b', 'c', 'd'}\n"
        "if __name__ == '__main__':\n"
        "    from umbel.sim.experiment.objects import code_digest\n    import own\n    print(code_digest(own.f))\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "own.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_data_of_other_values_have_other_names() -> None:
    inputs = np.zeros((20, 2), dtype=np.float32)
    targets = np.arange(20) % 2
    a = simulate(DEALT, model=net, data=(inputs, targets))
    inputs[0, 0] = 1.0
    b = simulate(DEALT, model=net, data=(inputs, targets))
    assert a.trials[0].trial.data != b.trials[0].trial.data
