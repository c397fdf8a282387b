"""One's own functions get the arguments of the file, and a sweep may vary them; and code of a notebook or script."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.sim.federation.worlds import table
from tests.suite.nights import at_night
from umbel.sim import simulate
from umbel.sim.data.arguments import ARGUMENTS_MAX, BYTES_MAX, DEPTH_MAX, require_arguments
from umbel.sim.data.data_set import DataError, DataSet
from umbel.sim.data.sets.arrays import dataset
from umbel.sim.experiment.file import experiment_of
from umbel.sim.models import ModelError

HERE = __name__
FIXED = nn.Linear(4, 3)


def net(width: int, layers: list[int] | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), *(nn.Linear(width, width) for _ in layers or []), nn.Linear(width, 3))


def load(n: int = 90) -> DataSet:
    torch.manual_seed(3)
    return dataset(torch.randn(n, 4), torch.arange(n) % 3)


def described(**changes: Any) -> dict[str, Any]:
    base = table(partition=None, fleet=None, rounds={"count": 1, "target": 2}, engine={"name": "sequential"})
    base |= {"data": {"name": f"{HERE}:load"}, "partition": {"clients": 3}, "model": {"name": f"{HERE}:net"}}
    return {**base, **changes}


def test_a_sweep_varies_the_arguments_of_a_model_and_of_a_loader() -> None:
    file = described(sweep={"model.arguments.width": [2, 5], "data.arguments.n": [60, 120]})
    results = simulate(file)
    assert [point.label for point in results.points] == [
        *("width=2, n=60", "width=2, n=120", "width=5, n=60", "width=5, n=120")
    ]
    sizes = [one.rows[0].bytes_up for one in results.trials]
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3]
    counted = [one.rows[0].sample_count for one in results.trials]
    assert counted[0] == counted[2] < counted[1] == counted[3]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "batched", "threads", "processes"])
def test_every_engine_makes_the_model_of_the_arguments(engine: str) -> None:
    model = {"name": f"{HERE}:net", "arguments": {"width": 6, "layers": [1, 2]}}
    (run,) = simulate(described(model=model, engine={"name": engine, "workers": 2})).trials
    assert run.rows[0].committed
    assert run.rows[0].bytes_up > 4 * (4 * 6 + 6 + 2 * (36 + 6) + 6 * 3 + 3)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": {"name": "mlp", "arguments": {"width": 3}}}, ValueError, "arguments are for your own function"),
        ({"data": {"name": "digits", "arguments": {"n": 3}}}, ValueError, "arguments are for your own function"),
        ({"model": {"name": f"{HERE}:net", "arguments": {"a b": 3}}}, ValueError, "'a b' must be a Python name"),
        ({"model": {"name": f"{HERE}:net"}}, ModelError, "cannot be called without arguments: .*'width'"),
        (
            {"model": {"name": f"{HERE}:net", "arguments": {"depth": 3}}},
            ModelError,
            "cannot be called with the arguments depth: .*unexpected keyword argument 'depth'",
        ),
        (
            {"data": {"name": f"{HERE}:load", "arguments": {"m": 3}}},
            DataError,
            "cannot be called with the arguments m: .*'m'",
        ),
        (
            {"model": {"name": f"{HERE}:FIXED", "arguments": {"a": 3}}},
            ModelError,
            "takes no arguments; name a function",
        ),
    ],
)
def test_arguments_that_nothing_takes_are_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        simulate(described(**changes))


@given(
    st.dictionaries(
        st.from_regex("[a-z]{1,8}", fullmatch=True),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5),
        max_size=3,
    )
)
def test_what_json_carries_reaches_the_section(arguments: dict[str, Any]) -> None:
    try:
        require_arguments(arguments, "a:b", is_own=True)
    except ValueError:
        return
    (trial,) = experiment_of(described(model={"name": f"{HERE}:net", "arguments": arguments})).trials
    assert trial.model is not None
    assert trial.model.arguments == arguments
    assert hash(trial.model) == hash(trial.model)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({f"a{i}": i for i in range(ARGUMENTS_MAX + 1)}, "at most 64, not 65"),
        ({"a": "x" * BYTES_MAX}, "at most 65,536 bytes as JSON"),
        ({"a": nested(DEPTH_MAX)}, "at most 8 tables and lists within each other"),
        ({"a": nested(10_000)}, "at most 8 tables and lists within each other"),
    ],
)
def test_arguments_are_bounded(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        require_arguments(arguments, "a:b", is_own=True)
    require_arguments({"a": nested(DEPTH_MAX - 1)}, "a:b", is_own=True)


SCRIPT = """
import sys
from torch import nn
from umbel.sim import simulate

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
    def forward(self, x):
        return self.layer(x.flatten(1))

print(simulate({
    "name": "mine", "data": {"name": "digits"}, "partition": {"clients": 4}, "model": {"name": "__main__:Net"},
    "rounds": {"count": 1, "target": 2}, "engine": {"name": sys.argv[1], "workers": 2},
}).trials[0].model_sha256)
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", *at_night("batched", "threads"), "auto"])
def test_a_class_of_a_script_is_trained(tmp_path: Path, engine: str) -> None:
    done = ran(tmp_path, engine)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 64


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_a_class_of_a_script_is_refused_where_others_must_import_it(tmp_path: Path, engine: str) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    done = ran(tmp_path, engine)
    assert "EngineError: __main__:Net is defined in this notebook or script" in done.stderr
    assert 'save it in a file beside it, such as my_code.py, and name it "my_code:Net"' in done.stderr


def ran(folder: Path, engine: str) -> "subprocess.CompletedProcess[str]":
    (folder / "mine.py").write_text(SCRIPT)
    command = [sys.executable, "mine.py", engine]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
