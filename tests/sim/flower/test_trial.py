"""Whole Flower apps, simulated: ClientApp, ServerApp and strategy, with not one line changed."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from tests.client.flower.projects import NUMPY_CLIENT, NUMPY_SERVER, OWN_STRATEGY, SERVES, TRAINS, WITH_STATE, project
from tests.repository import ROOT
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.round import Task
from umbel.sim.experiment.checkpoint import CheckpointError
from umbel.sim.federation.rows import Row
from umbel.sim.results.results import Results
from umbel.sim.simulation import simulate

pytestmark = pytest.mark.slow
QUICKSTART = ROOT / "examples" / "flower_quickstart"
ONE_ROUND = """
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid, context):
    arrays = ArrayRecord({"w": Array(np.zeros(3, dtype=np.float32))})
    FedAvg(fraction_evaluate=0.0, min_available_nodes=1, min_train_nodes=1).start(
        grid=grid, initial_arrays=arrays, num_rounds=1
    )
"""
MEASURES = ONE_ROUND.replace("num_rounds=1", "num_rounds=3, evaluate_fn=measured").replace(
    "@app.main()",
    """
def measured(server_round, arrays):
    value = float(arrays["w"].numpy().mean())
    return MetricRecord({"accuracy": value / 10, "loss": 10 - value})

@app.main()
""",
)
OWN_LOOP = """
import time
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    '''A user's own loop and own rule: the median, of all who answer; and a question before it.'''
    value = np.zeros(3, dtype=np.float32)
    for number in (1, 2):
        config = ConfigRecord({"server-round": number})
        content = RecordDict({"arrays": ArrayRecord({"w": Array(value)}), "config": config})
        messages = [grid.create_message(content, MessageType.TRAIN, node, "") for node in grid.get_node_ids()]
        waiting, replies = set(grid.push_messages(messages)), []
        while waiting:
            found = list(grid.pull_messages(waiting))
            replies += found
            waiting -= {one.metadata.reply_to_message_id for one in found}
        good = [one.content["arrays"]["w"].numpy() for one in replies if one.has_content()]
        assert len(replies) == len(messages)
        value = np.median(good, axis=0)
    grid.send_and_receive([
        grid.create_message(RecordDict({"arrays": ArrayRecord({"w": Array(value)})}), MessageType.EVALUATE, node, "2")
        for node in list(grid.get_node_ids())[:2]
    ])
"""
FAILS_AT_ODD_ONES = TRAINS.replace(
    "    arrays =", "    assert context.node_config['partition-id'] % 2 == 0, 'an odd one'\n    arrays =", 1
)
EVALUATES = """
@app.evaluate()
def evaluate(message, context):
    value = float(message.content["arrays"]["w"].numpy().mean())
    return Message(RecordDict({"m": MetricRecord({"eval_acc": value / 10, "num-examples": 2})}), reply_to=message)
"""


def simulated(app: Path, out: Path | None = None, clients: int = 4, **sections: Any) -> Results:
    section = {"app": str(app), "clients": clients, **sections.pop("flower", {})}
    return simulate({"name": "flowers", "flower": section, **sections}, out)


def training(results: Results) -> list[Row]:
    (run,) = results.trials
    return [row for row in run.rows if row.task == Task.TRAINING]


def test_the_quickstart_learns_with_the_same_bits_in_every_engine(tmp_path: Path) -> None:
    flower = {"run_config": {"num-server-rounds": 6, "learning-rate": 0.2, "batch-size": 16}}
    one, two = (
        simulated(QUICKSTART, tmp_path / name, 3, flower=flower, engine={"name": name, "workers": 2})
        for name in ("sequential", "processes")
    )
    hashes = [[row.model_sha256 for row in training(results)] for results in (one, two)]
    assert hashes[0] == hashes[1]
    assert len({*hashes[0]}) == 6
    assert training(one)[-1].accuracy > 0.6, "ten digits, so 0.1 without training"  # type: ignore[operator]
    assert one.trials[0].status is RunStatus.FINISHED
    assert (tmp_path / "sequential" / "curves.png").exists()
    assert one.trials[0].model.sha256 == hashes[0][-1]


def test_a_numpy_client_of_an_older_app_learns_the_mean(tmp_path: Path) -> None:
    rows = training(simulated(project(tmp_path / "app", NUMPY_CLIENT, NUMPY_SERVER), clients=5))
    means = [9.0, 9.0 + 0.1 * (2.0 - 9.0), 9.0 + 0.19 * (2.0 - 9.0), 9.0 + 0.271 * (2.0 - 9.0)]
    assert [row.test_metrics["value"] for row in rows] == pytest.approx(means[1:])
    assert [row.loss for row in rows] == pytest.approx([mean - 1 for mean in means[1:]])
    assert [(row.round, row.selected, row.reported, row.sample_count) for row in rows] == [
        (number, 5, 5, 40) for number in (1, 2, 3)
    ]


@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_mods_and_the_state_of_each_context_last_over_rounds(tmp_path: Path, engine: str) -> None:
    server = ONE_ROUND.replace("num_rounds=1", "num_rounds=3")
    rows = training(simulated(project(tmp_path / "app", WITH_STATE, server), engine={"name": engine}))
    assert [row.train_metrics["calls"] for row in rows] == [1.0, 2.0, 3.0]


def test_a_last_model_that_is_no_number_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = TRAINS.replace("one.numpy() + 1", "one.numpy() + np.nan")
    simulated(project(tmp_path / "app", client, ONE_ROUND))
    assert "the model after round 1 holds a NaN or an infinity" in caplog.text


def test_nothing_is_said_of_samples_of_nodes_that_were_never_in_time(tmp_path: Path) -> None:
    app = project(tmp_path / "app", TRAINS, ONE_ROUND.replace("num_rounds=1", "num_rounds=3"))
    results = simulated(app, clients=13, fleet={}, rounds={"over_selection": 1.3})
    (point,) = results.points
    assert point.left_out_share is not None
    assert point.left_out_share.mean > 0
    assert point.samples_share is None
    assert "left out" in point.lean.words
    assert "sample" not in point.lean.words


def test_an_app_that_changes_the_current_directory_finds_no_other_place_for_the_results(tmp_path: Path) -> None:
    project(Path("app"), TRAINS.replace("    arrays =", "    import os; os.chdir('/')\n    arrays =", 1), MEASURES)
    here = Path.cwd()
    results = simulated(Path("app"), Path("out"), seeds=[0, 1], engine={"name": "sequential"})
    assert [run.status for run in results.trials] == [RunStatus.FINISHED] * 2
    assert Path.cwd() != here
    assert {"curves.png", "rounds.jsonl", "runs"} <= {path.name for path in (here / "out").iterdir()}


def test_what_the_server_app_measures_are_the_scores(tmp_path: Path) -> None:
    rows = training(simulated(project(tmp_path / "app", TRAINS, MEASURES)))
    assert [row.round for row in rows] == [1, 2, 3]
    assert [row.loss for row in rows] == pytest.approx([9.0, 8.0, 7.0])
    assert [row.accuracy for row in rows] == pytest.approx([0.1, 0.2, 0.3])


def test_a_user_s_own_loop_gets_an_answer_to_each_message(tmp_path: Path) -> None:
    app = project(tmp_path / "app", FAILS_AT_ODD_ONES + EVALUATES, OWN_LOOP)
    results = simulated(app, clients=5)
    rows = training(results)
    assert [(row.round, row.selected, row.reported, row.declined) for row in rows] == [(1, 5, 3, 2), (2, 5, 3, 2)]
    assert list(rows[0].declined_for) == ["its own code failed with AssertionError: an odd one"]
    assert rows[-1].accuracy == pytest.approx(0.2), "each round adds one"
    evaluation = results.trials[0].rows[-1]
    assert (evaluation.task, evaluation.reported, [*evaluation.evaluation]) == ("evaluation", 2, ["eval_acc"])
    assert {name: value.tolist() for name, value in results.trials[0].model.state().items()} == {"w": [2.0] * 3}


def test_a_strategy_of_the_user_s_own_makes_the_model(tmp_path: Path) -> None:
    client = TRAINS.replace("+ 1", "+ (100 if context.node_config['partition-id'] == 0 else 1)")
    results = simulated(project(tmp_path / "app", client, OWN_STRATEGY), clients=5)
    assert [row.reported for row in training(results)] == [5, 5]
    assert results.trials[0].model.state()["w"].tolist() == [[5.0] * 4] * 2, "the median of each round adds one"


def test_late_devices_do_not_answer_and_over_selection_leaves_the_slowest_out(tmp_path: Path) -> None:
    app = project(
        tmp_path / "app", FAILS_AT_ODD_ONES.replace("% 2 == 0", ">= 0"), OWN_LOOP.replace("EVALUATE", "QUERY")
    )
    (app / "small" / "client_app.py").write_text(
        (app / "small" / "client_app.py").read_text()
        + "\n@app.query()\ndef query(message, context):\n    return Message(RecordDict(), reply_to=message)\n"
    )
    rows = training(simulated(app, clients=13, fleet={}, rounds={"over_selection": 1.3}))
    assert [(row.selected, row.reported, row.target) for row in rows] == [(13, 10, 10)] * 2
    assert all(row.virtual_s > 0 and row.wasted_s > 0 for row in rows)
    few = training(simulated(app, clients=13, fleet={}, rounds={"window_s": rows[0].virtual_s}))
    assert 0 < few[0].reported < 13


def test_an_app_whose_every_node_fails_ends_with_a_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = project(tmp_path / "app", TRAINS.replace("metrics = {", "metrics = {1 / 0: 1, "), ONE_ROUND)
    assert "in round 1 training failed at all 4 nodes that were asked: its own code failed" in failure(simulated(app))
    assert "ZeroDivisionError" in caplog.text


def failure(results: Results) -> str:
    """Why the experiment's one run has failed."""
    (run,) = results.trials
    assert run.status is RunStatus.FAILED
    return run.reason


def test_a_server_app_that_fails_or_waits_for_ever_is_a_run_that_failed(tmp_path: Path) -> None:
    broken = project(tmp_path / "broken", TRAINS, ONE_ROUND.replace("    arrays =", "    1 / 0\n    arrays =", 1))
    assert "small.server_app:app failed with ZeroDivisionError" in failure(simulated(broken))
    waits = simulated(project(tmp_path / "waits", TRAINS, SERVES.replace("=500", "=2")), clients=1)
    assert "waits for more than 1 node, and there are no others: set flower.clients" in failure(waits)
    idle = simulated(project(tmp_path / "idle", TRAINS, ONE_ROUND.replace("num_rounds=1", "num_rounds=0")))
    assert "asked no node to train" in failure(idle)


def test_what_is_no_app_is_said_before_anything_is_simulated_or_written(tmp_path: Path) -> None:
    app, out = project(tmp_path / "app", TRAINS, MEASURES), tmp_path / "out"
    with pytest.raises(ValueError, match=r"sets 'widht', but the keys .* are: .* \(with widht=3\)"):
        simulated(app, out, sweep={"flower.run_config.widht": [3]})
    assert not [*out.glob("runs/*")]
    with pytest.raises(
        ValueError, match=r"experiment is a TOML file; a Flower app is simulated by --flower-app .*app$"
    ):
        simulate(app)
    command = [sys.executable, "-m", "umbel", "simulate", "--out", str(tmp_path / "none"), "--flower-app"]
    done = subprocess.run([*command, "nothere"], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 1
    assert "nothere: name the folder of a Flower app, which holds its pyproject.toml" in done.stderr
    assert not (tmp_path / "none").exists()


def test_a_plot_does_not_say_that_umbel_has_measured_the_models(tmp_path: Path) -> None:
    results = simulated(project(tmp_path / "app", TRAINS, MEASURES))
    assert results.plot().axes[0].get_title("left") == "accuracy, over rounds"


def test_bars_of_attempts_are_those_at_training(tmp_path: Path) -> None:
    server = ONE_ROUND.replace("fraction_evaluate=0.0, ", "min_evaluate_nodes=1, ").replace(
        "num_rounds=1", "num_rounds=3"
    )
    results = simulated(project(tmp_path / "app", TRAINS + EVALUATES, server))
    assert len(results.trials[0].rows) == 6, "each round trains and evaluates"
    (axes,) = [
        one for one in results.plot().axes if one.get_title("left") == "clients asked to train, and their outcome"
    ]
    assert [(bars.get_label(), len(bars)) for bars in axes.containers] == [
        (name, 3) for name in ("counted", "partial work", "left out")
    ]


def test_after_a_run_that_fails_the_next_one_goes_on(tmp_path: Path) -> None:
    fails = "    assert server_round < context_width, 'too wide'\n    value ="
    server = MEASURES.replace("    value =", fails, 1).replace("def measured", "context_width = 0\n\ndef measured")
    server = server.replace(
        "    arrays =",
        "    global context_width\n    context_width = context.run_config['model.width']\n    arrays =",
        1,
    )
    app = project(tmp_path / "app", TRAINS, server)
    results = simulated(app, tmp_path / "out", sweep={"flower.run_config.model.width": [2, 9]})
    assert [run.status for run in results.trials] == [RunStatus.FAILED, RunStatus.FINISHED]
    assert "failed with AssertionError: too wide" in results.trials[0].reason
    assert [row.accuracy for row in results.trials[0].rows] == pytest.approx([0.1, None])
    assert len(results.trials[1].rows) == 3
    assert (tmp_path / "out" / "curves.png").exists()


def test_a_second_strategy_goes_on_counting_rounds(tmp_path: Path) -> None:
    again = MEASURES.replace("num_rounds=3", "num_rounds=2")
    start = again[again.index("    FedAvg(") :]
    rows = training(simulated(project(tmp_path / "app", TRAINS, again + start)))
    assert [row.round for row in rows] == [1, 2, 3, 4]
    assert [row.accuracy for row in rows] == pytest.approx([0.1, 0.2, 0.1, 0.2])


def test_a_window_without_replies_makes_no_model_and_says_so(tmp_path: Path) -> None:
    results = simulated(project(tmp_path / "app", TRAINS, ONE_ROUND), fleet={}, rounds={"window_s": 0.1})
    assert "no node replied in time in any round" in failure(results)


def test_a_run_that_has_ended_is_read_again_and_one_of_other_code_is_refused(tmp_path: Path) -> None:
    app, out = project(tmp_path / "app", TRAINS, MEASURES), tmp_path / "out"
    first = simulated(app, out)
    rows = (out / "runs" / "seed-0" / "rounds.jsonl").read_text()
    again = simulated(app, out)
    assert again.trials[0].rows == first.trials[0].rows
    assert again.trials[0].model.state()["w"].tolist() == pytest.approx([3.0] * 3)
    (out / "runs" / "seed-0" / "finished.json").unlink()  # as if it had been interrupted
    assert [row.model_sha256 for row in training(simulated(app, out))] == [row.model_sha256 for row in training(first)]
    assert len((out / "runs" / "seed-0" / "rounds.jsonl").read_text().splitlines()) == len(rows.splitlines())
    (app / "small" / "client_app.py").write_text(TRAINS + "# other code\n")
    with pytest.raises(CheckpointError, match="the app's code changed since its run"):
        simulated(app, out)


def test_the_command_needs_no_file_and_takes_the_configuration_as_flower_does(tmp_path: Path) -> None:
    app = project(tmp_path / "my_app", TRAINS.replace("+ 1", "+ context.run_config['model.width']"), MEASURES)
    command = [sys.executable, "-m", "umbel", "simulate", "--flower-app", str(app), "--json"]
    done = subprocess.run(
        [*command, "--run-config", "model.width=2", "--set", "flower.clients=3", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"][0]["status"] == "finished"
    assert json.loads((tmp_path / "out" / "experiment.json").read_text())["name"] == "small"
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()][-1:]
    assert (row["round"], row["accuracy"], row["reported"]) == (3, pytest.approx(0.6), 3)


def test_time_passes_for_a_strategy_that_waits_until_enough_devices_are_there(tmp_path: Path) -> None:
    app = project(tmp_path / "app", TRAINS, ONE_ROUND.replace("min_train_nodes=1", "min_train_nodes=9"))
    fleet = {"hours": {"by_hour": [0.0] * 6 + [1.0] * 18}}
    (row,) = training(simulated(app, clients=9, fleet=fleet))
    assert row.selected == 9
    assert 5 * 3600 <= row.now_s < 7 * 3600, "nobody is there in the first six hours"


def test_an_older_strategy_that_waits_for_ever_ends_with_a_sentence(tmp_path: Path) -> None:
    app = project(tmp_path / "app", NUMPY_CLIENT, NUMPY_SERVER)
    assert "the ServerApp waits for more than 1 node, and there are no others" in failure(simulated(app, clients=1))


def test_virtual_time_passes_while_an_older_strategy_waits(tmp_path: Path) -> None:
    app = project(tmp_path / "app", NUMPY_CLIENT, NUMPY_SERVER)
    fleet = {"hours": {"by_hour": [0.0] * 6 + [1.0] * 18}}
    first = training(simulated(app, clients=4, fleet=fleet))[0]
    assert 5 * 3600 <= first.now_s < 7 * 3600, "nobody is there in the first six hours"


def test_a_thread_of_the_older_server_that_only_looks_ends_no_run(tmp_path: Path) -> None:
    """As it does every five seconds, also while the ServerApp measures a model for minutes."""
    looks = """    import threading
    looker = threading.Thread(target=lambda: [grid.get_node_ids() for _ in range(20)])
    looker.start()
    looker.join()
"""
    server = ONE_ROUND.replace("    FedAvg(", looks + "    FedAvg(", 1)
    assert len(training(simulated(project(tmp_path / "app", TRAINS, server)))) == 1


THREADS = """
import pathlib
import threading
import time
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    def asked():
        content = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(3, dtype=np.float32))})})
        return len(list(grid.send_and_receive([Message(content, node, "train") for node in grid.get_node_ids()])))

    def late():
        while not pathlib.Path("go").exists():
            time.sleep(0.01)
        try:
            asked()
        except RuntimeError as error:
            pathlib.Path("late").write_text(str(error))

    found = []
    threads = [threading.Thread(target=lambda: found.append(asked())) for _ in range(4)]
    [one.start() for one in threads]
    [one.join() for one in threads]
    assert found == [4] * 4, found
    threading.Thread(target=late, name="late").start()
"""


@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_threads_of_a_server_app_are_answered_in_turn_and_not_after_its_end(tmp_path: Path, engine: str) -> None:
    app = project(tmp_path / "app", TRAINS, THREADS)
    results = simulated(app, engine={"name": engine, "workers": 2})
    assert [(row.selected, row.reported) for row in training(results)] == [(4, 4)] * 4
    (late,) = [one for one in threading.enumerate() if one.name == "late"]
    Path("go").touch()
    late.join()
    assert "the run is over, so its nodes answer no more" in Path("late").read_text()
