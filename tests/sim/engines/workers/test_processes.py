"""Worker processes die, fail and are interrupted; changes stay the same, and nothing is left behind."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.repository import ROOT
from tests.servers.interrupts import heed_interrupts
from tests.servers.waits import LIMIT_S, wait_until
from tests.sim.engines.cohorts import all_changes, recipe, start_of, work_of
from umbel.sim.engines.model import ModelRecipe
from umbel.sim.engines.training import SequentialEngine
from umbel.sim.engines.work import EngineError
from umbel.sim.engines.workers.processes import ProcessesEngine

pytestmark = pytest.mark.slow

WORK = work_of([4 + i % 5 for i in range(20)], [3 + i % 4 for i in range(20)])


@contextmanager
def engine_of(made_by: ModelRecipe, n_workers: int = 2) -> Generator[ProcessesEngine]:
    engine = ProcessesEngine(made_by, n_workers)
    try:
        yield engine
    finally:
        engine.close()


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.parametrize("after", [1, 9])
def test_a_worker_that_is_killed_in_mid_round_is_replaced_and_the_changes_are_the_same_to_the_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, after: int
) -> None:
    made_by = recipe("deadly", path=str(tmp_path / "now"), after=after)
    expected, expected_losses = all_changes(SequentialEngine(made_by), start_of(made_by), WORK)
    (tmp_path / "now").touch()
    with engine_of(made_by) as engine, caplog.at_level(logging.WARNING, "umbel.sim"):
        values, losses = all_changes(engine, start_of(made_by), WORK)
    assert not (tmp_path / "now").exists(), "one has died"
    assert "died (killed by SIGKILL)" in caplog.text
    assert torch.equal(values, expected)
    assert (losses == expected_losses).all()


def test_a_worker_that_is_killed_between_two_rounds_is_replaced() -> None:
    made_by = recipe("mlp")
    with engine_of(made_by) as engine:
        expected, _ = all_changes(engine, start_of(made_by), WORK)
        for pid in engine.pids:
            os.kill(pid, signal.SIGKILL)
            wait_until("a worker's end", lambda pid=pid: not is_running(pid))  # type: ignore[misc]  # mypy takes the default for a parameter
        assert torch.equal(all_changes(engine, start_of(made_by), WORK)[0], expected)


def test_workers_stay_for_the_next_round_and_take_other_samples() -> None:
    made_by = recipe("mlp")
    other = work_of([5, 6, 7], [3, 3, 3], seed=2)
    with engine_of(made_by) as engine:
        all_changes(engine, start_of(made_by), WORK)
        pids = engine.pids
        values, _ = all_changes(engine, start_of(made_by), other)
        assert engine.pids == pids
    assert torch.equal(values, all_changes(SequentialEngine(made_by), start_of(made_by), other)[0])


def test_no_more_workers_are_begun_than_there_are_clients() -> None:
    made_by = recipe("mlp")
    with engine_of(made_by, n_workers=8) as engine:
        all_changes(engine, start_of(made_by), work_of([5, 7], [2, 3]))
        assert 1 <= len(engine.pids) <= 2


def test_clients_that_kill_every_worker_end_the_round_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "now").touch()
    made_by = recipe("deadly", path=str(tmp_path / "now"), always=True)
    with engine_of(made_by) as engine:
        with pytest.raises(
            EngineError,
            match=r"died 3 times while they worked for the same (1 client|\d+ clients) \(.*SIGKILL.*fewer workers",
        ):
            all_changes(engine, start_of(made_by), WORK)
        assert engine.pids == []


def test_what_the_model_raises_is_told_with_its_traceback() -> None:
    with (
        engine_of(recipe("broken"), 1) as engine,
        pytest.raises(EngineError, match="ValueError: no such thing as 4 samples") as caught,
    ):
        all_changes(engine, start_of(recipe("broken")), WORK)
    assert "in forward" in caught.value.__notes__[0]


@pytest.mark.nightly
def test_more_clients_than_a_block_holds_and_any_number_of_workers_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_by = recipe("mlp")
    expected, _ = all_changes(SequentialEngine(made_by), start_of(made_by), WORK)
    monkeypatch.setattr("umbel.sim.engines.device._ROWS_MAX", 3)
    for n_workers in (1, 3):
        with engine_of(made_by, n_workers) as engine:
            assert torch.equal(all_changes(engine, start_of(made_by), WORK)[0], expected)
    assert torch.equal(all_changes(SequentialEngine(made_by), start_of(made_by), WORK)[0], expected)


# No `if __name__ == "__main__"`: workers do not import the program's main module.
PROGRAM = """
import sys
from tests.sim.engines.cohorts import recipe, start_of, work_of
from tests.servers.waits import LIMIT_S, wait_until
from umbel.sim.engines.workers.processes import ProcessesEngine

engine = ProcessesEngine(recipe("slow"), 2)
work = work_of([8] * 3, [1, 1 << 20, 1])  # one of them would take a day
for changes in engine.train(start_of(recipe("slow")), work):
    print(*engine.pids, flush=True)
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly),
        signal.SIGKILL,  # by day the one that no handler can clean up after
    ],
)
def test_no_worker_and_no_shared_memory_outlives_the_program_however_it_ends(how: signal.Signals) -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set[str]()
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2, program.stderr.read() if program.stderr else ""
    os.killpg(program.pid, how)
    _, errors = program.communicate(timeout=LIMIT_S)
    wait_until("the workers' end", lambda: not any(map(is_running, pids)))
    assert program.returncode == -how
    assert "ResourceWarning" not in errors
    assert "leaked" not in errors
    if os.path.isdir("/dev/shm"):
        # Not each new name: tests beside this one make PostgreSQL clusters there.
        assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("torch_", "psm_"))}


def test_a_worker_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with engine_of(recipe("mlp"), 1) as engine, pytest.raises(EngineError, match="3 times before it was ready"):
        all_changes(engine, start_of(recipe("mlp")), WORK)


def test_what_cannot_be_shared_out_is_refused_at_once() -> None:
    with pytest.raises(EngineError, match="cannot be sent to another process"):
        ProcessesEngine(recipe("with_dropout", rate=np.float32(0.5)), 1)
    with pytest.raises(EngineError, match="at least one worker"):
        ProcessesEngine(recipe("mlp"), 0)
