"""Which engine does the work: by what the model is; and what cannot be stacked goes another way, not a slow one."""

import logging
import re
from contextlib import closing

import pytest
import torch

from tests.sim.engines.cohorts import all_changes, recipe, start_of, work_of
from umbel.sim.engines.choose import AutoEngine, named_engine
from umbel.sim.engines.training import SequentialEngine
from umbel.sim.engines.work import EngineError


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("mlp", "engine batched: a step of 0.0066"),
        ("with_dropout", "engine sequential: .*random"),
        ("with_batch_norm", "engine sequential: .*batch normalization"),
        ("tied", "engine sequential: .*cannot be stacked"),
        ("convolutions", "engine (sequential|threads): convolutions"),
        ("convolutions_with_dropout", "engine (sequential|processes): convolutions"),
    ],
)
def test_auto_says_which_engine_it_takes_and_why(model: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    made_by, work = recipe(model), work_of([3, 7, 12], [2, 5, 4])
    engine = AutoEngine(made_by, n_workers=2)
    try:
        with caplog.at_level(logging.INFO, "umbel.sim"):
            values, _ = all_changes(engine, start_of(made_by), work)
    finally:
        engine.close()
    records = [record for record in caplog.records if record.name == "umbel.sim"]
    told = " | ".join(record.getMessage() for record in records)
    is_warned = any(record.levelno == logging.WARNING for record in records)
    assert is_warned is ("cannot be stacked" in engine.why), "where stacking is not what would be slower"
    assert engine.why in told
    assert pytest.approx(0, abs=1e-5) == float((values - all_changes_of(model)).abs().max())
    assert re.search(words, told), told


def all_changes_of(model: str) -> torch.Tensor:
    made_by = recipe(model)
    return all_changes(SequentialEngine(made_by), start_of(made_by), work_of([3, 7, 12], [2, 5, 4]))[0]


def test_an_engine_that_is_named_does_not_give_way() -> None:
    made_by = recipe("with_dropout")
    with pytest.raises(EngineError, match="random"):
        all_changes(named_engine("batched", made_by), start_of(made_by), work_of([3, 7], [2, 2]))


@pytest.mark.parametrize("optimizer", ["lars", "lamb", "muon"])
def test_an_optimizer_that_looks_at_whole_layers_is_not_stacked(optimizer: str) -> None:
    made_by, work = recipe("mlp"), work_of([3, 7, 12], [2, 5, 4], optimizer={"optimizer": optimizer})
    with pytest.raises(EngineError, match=f'optimizer = "{optimizer}" looks at each layer of each client'):
        all_changes(named_engine("batched", made_by), start_of(made_by), work)
    with closing(AutoEngine(made_by, n_workers=1)) as engine:
        values, _ = all_changes(engine, start_of(made_by), work)
        assert engine.name == "sequential"
    assert torch.equal(values, all_changes(SequentialEngine(made_by), start_of(made_by), work)[0])


@pytest.mark.parametrize("name", ["sequential", "threads", "batched"])
def test_a_resumed_run_keeps_its_engine(name: str) -> None:
    made_by, work = recipe("mlp"), work_of([3, 7, 12], [2, 5, 4])
    with closing(AutoEngine(made_by, n_workers=2)) as engine, closing(named_engine(name, made_by, 2)) as named:
        engine.keep(name)
        assert engine.name == name
        assert torch.equal(
            all_changes(engine, start_of(made_by), work)[0], all_changes(named, start_of(made_by), work)[0]
        )


def test_an_engine_of_an_older_version_is_not_kept() -> None:
    engine = AutoEngine(recipe("mlp"))
    engine.keep("auto")
    assert engine.name == "auto"


def test_there_is_no_other_engine() -> None:
    with pytest.raises(EngineError, match="no engine 'warp'"):
        named_engine("warp", recipe("linear"))
