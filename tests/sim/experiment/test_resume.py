"""An experiment that is killed, or interrupted, is gone on with, and ends in the models of one that was left alone."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.servers.interrupts import heed_interrupts
from tests.servers.waits import LIMIT_S, wait_until
from umbel.sim.experiment.checkpoint import CHECKPOINT_FILE
from umbel.sim.results.results import ROUNDS_FILE, SUMMARY_FILE
from umbel.sim.simulation import EXPERIMENT_FILE, RUNS_FOLDER, simulate

pytestmark = pytest.mark.slow  # all want the whole experiment, which takes seconds
EXPERIMENT = """
name = "small"
seeds = [3, 4]
[data]
name = "digits"
[partition]
scheme = "dirichlet"
clients = 30
alpha = 0.5
holdout = 0.2
[model]
hidden = [8]
[fleet.dropouts]
per_round = 0.1
[rounds]
count = 100
target = 6
self_tuning = true
[training]
batch_size = 10
learning_rate = 0.1
evaluate = true
algorithm = "feddyn"     # with what each client keeps of it
proximal_mu = 0.1
total_samples = 1437
[codec]
name = "topk"
share = 0.1
error_feedback = true
[stop]
metric = "evaluation.loss"
patience = 1000
"""


# `umbel` that never gets beyond the middle of the first run, so that no signal comes too late to disturb it.
HELD = """
import runpy, sys, time
from umbel.sim.federation.federation import Federation

attempts = Federation.attempts

def until_the_middle(federation):
    for n, attempt in enumerate(attempts(federation)):
        yield attempt
        if n == 60:
            time.sleep(3600)

Federation.attempts = until_the_middle
sys.argv[0] = "umbel"
runpy.run_module("umbel", run_name="__main__")
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The experiment's file, and what it gives if nobody disturbs it."""
    folder = tmp_path_factory.mktemp("experiment")
    file = folder / "small.toml"
    file.write_text(EXPERIMENT)
    simulate(file, folder / "out")
    return file, folder / "out"


def rounds_of(out: Path) -> list[dict[str, object]]:
    """All rows but for how long they have taken here."""
    rows = [json.loads(line) for line in (out / ROUNDS_FILE).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "wall_s"} for row in rows]


def models_of(out: Path) -> list[str]:
    return [run["model_sha256"] for run in json.loads((out / SUMMARY_FILE).read_text())["runs"]]


def wait_for_rows(process: "subprocess.Popen[bytes]", out: Path, n_bytes: int) -> None:
    def is_there() -> bool:
        assert process.poll() is None, "it ended too early to be disturbed"
        return sum(path.stat().st_size for path in out.glob(f"{RUNS_FOLDER}/*/{CHECKPOINT_FILE}")) >= n_bytes

    wait_until("a checkpoint", is_there)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_after_a_signal_in_the_middle_the_same_command_ends_in_the_same_models(
    undisturbed: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    file, expected = undisturbed
    out = tmp_path / "out"
    words = ["simulate", str(file), "--out", str(out), "--json"]
    held, command = [sys.executable, "-c", HELD, *words], [sys.executable, "-m", "umbel", *words]
    process = subprocess.Popen(held, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_interrupts)
    wait_for_rows(process, out, 1)
    time.sleep(0.2)
    process.send_signal(number)
    _, told = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert not (out / SUMMARY_FILE).exists()
    if number is not signal.SIGKILL:
        assert b"run the same command again" in told
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert models_of(out) == models_of(expected)
    assert rounds_of(out) == rounds_of(expected)


def test_an_experiment_that_is_done_is_only_told_again(undisturbed: tuple[Path, Path]) -> None:
    file, out = undisturbed
    before = models_of(out), rounds_of(out)
    results = simulate(file, out)
    assert (models_of(out), rounds_of(out)) == before
    assert [one.model_sha256 for one in results.trials] == before[0]


def test_a_folder_of_another_experiment_is_left_alone(undisturbed: tuple[Path, Path]) -> None:
    file, out = undisturbed
    with pytest.raises(ValueError, match="another experiment"):
        simulate(file, out, changes={"rounds.target": 5})
    assert (out / EXPERIMENT_FILE).exists()


def test_a_folder_with_other_files_is_left_alone(undisturbed: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="other files"):
        simulate(undisturbed[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
