"""`python driver.py JOB.json`: one run of a Flower app in one engine, which notes the end of each round.

A copy of this file lies in the folder of the run. The interpreter of a peer has no umbel, so nothing of umbel is
imported at the top. The app is not changed: its strategy is Flower's `FedAvg`, and that notes its rounds here, in the
same way under both engines.
"""

import importlib
import json
import logging
import random
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

JOB_FILE, NOTES_FILE = "job.json", "notes.jsonl"
_BATCH_SIZE, _LEARNING_RATE, _LOCAL_EPOCHS = "batch-size", "learning-rate", "local-epochs"

Job = dict[str, Any]


def note(number: int, n_trained: int, n_evaluated: int, accuracy: float, norm: float) -> None:
    """Append the end of a round to the notes. `norm`: of the model's values, as one vector."""
    words = {"round": number, "ended_at": time.time(), "n_trained": n_trained, "n_evaluated": n_evaluated}
    with Path(NOTES_FILE).open("a") as file:
        file.write(json.dumps({**words, "accuracy": accuracy, "norm": norm}) + "\n")


def note_rounds(n_rounds: int) -> None:
    """Let `FedAvg` note its rounds. The norm is taken after the last one only, so that no timed round pays for it."""
    import numpy as np
    from flwr.serverapp.strategy import FedAvg

    aggregate_train, aggregate_evaluate = FedAvg.aggregate_train, FedAvg.aggregate_evaluate
    last: dict[str, Any] = {}

    def trained(self: Any, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        arrays, metrics = aggregate_train(self, server_round, replies)
        last.update(arrays=arrays, n_trained=_n_good(replies))
        return arrays, metrics

    def evaluated(self: Any, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        metrics = aggregate_evaluate(self, server_round, replies)
        norm = 0.0
        if server_round == n_rounds:
            norm = float(np.sqrt(sum(np.sum(np.square(one)) for one in last["arrays"].to_numpy_ndarrays())))
        accuracy = 0.0 if metrics is None else float(metrics["eval_acc"])
        note(server_round, last["n_trained"], _n_good(replies), accuracy, norm)
        return metrics

    FedAvg.aggregate_train, FedAvg.aggregate_evaluate = trained, evaluated


def _n_good(replies: Sequence[Any]) -> int:
    return sum(not reply.has_error() for reply in replies)


def in_umbel(job: Job) -> None:
    """As a user does: `umbel simulate --flower-app FOLDER`."""
    note_rounds(job["n_rounds"])
    sys.argv = ["umbel", "simulate", "--flower-app", job["app"], "--out", "out"]
    sys.argv += ["--set", f"flower.clients={job['n_nodes']}", "--run-config", f"num-server-rounds={job['n_rounds']}"]
    runpy.run_module("umbel", run_name="__main__", alter_sys=True)


def in_flower(job: Job) -> None:
    """As `flwr run` does after its SuperLink has started a simulation. The public `run_simulation` has no `run_config`.

    Every core has an actor, and an actor takes one core.
    """
    from flwr.app import Context, RecordDict
    from flwr.common.config import get_fused_config_from_dir, get_project_config
    from flwr.simulation.run_simulation import _run_simulation  # pyright: ignore[reportPrivateUsage]
    from flwr.supercore.constant import NOOP_FEDERATION_ID
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supercore.telemetry import EventType

    note_rounds(job["n_rounds"])
    logging.getLogger("flwr").setLevel(logging.WARNING)
    folder, run = Path(job["app"]), Run.create_empty(run_id=1)
    run.primary_task_id, run.federation_id = 1, NOOP_FEDERATION_ID
    run.override_config = {"num-server-rounds": job["n_rounds"]}
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    config = get_fused_config_from_dir(folder, run.override_config)
    components = get_project_config(folder)["tool"]["flwr"]["app"]["components"]
    _run_simulation(
        num_supernodes=job["n_nodes"],
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        client_app_attr=components["clientapp"],
        server_app_attr=components["serverapp"],
        server_app_context=Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config),
        app_dir=str(folder),
        run=run,
        is_app=True,
        backend_config={
            "init_args": {"num_cpus": job["n_cores"]},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


def in_plain_loop(job: Job) -> None:
    """The app's own functions, one node after another, and nothing else; half of the nodes evaluate."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, job["app"])
    task, n_nodes, config = importlib.import_module(job["task"]), job["n_nodes"], job["config"]
    device, state = torch.device("cpu"), task.Net().state_dict()

    def net_of(state: Any) -> Any:
        net = task.Net()
        net.load_state_dict(state)
        return net

    for number in range(1, job["n_rounds"] + 1):
        total, n_samples = {name: torch.zeros_like(value) for name, value in state.items()}, 0
        for node in range(n_nodes):
            net, (loader, _) = net_of(state), task.load_data(node, n_nodes, config[_BATCH_SIZE])
            task.train(net, loader, config[_LOCAL_EPOCHS], config[_LEARNING_RATE], device)
            n_samples += (own := len(loader.dataset))
            for name, value in net.state_dict().items():
                total[name].add_(value, alpha=own)
        state = {name: value / n_samples for name, value in total.items()}
        correct, n_tested, asked = 0.0, 0, random.sample(range(n_nodes), n_nodes // 2)
        for node in asked:
            net, (_, loader) = net_of(state), task.load_data(node, n_nodes, config[_BATCH_SIZE])
            _, accuracy = task.test(net, loader, device)
            correct, n_tested = correct + accuracy * len(loader.dataset), n_tested + len(loader.dataset)
        norm = 0.0
        if number == job["n_rounds"]:
            norm = float(torch.cat([value.reshape(-1) for value in state.values()]).norm())
        note(number, n_nodes, len(asked), correct / n_tested, norm)


ENGINES: dict[str, Callable[[Job], None]] = {"umbel": in_umbel, "flower": in_flower, "plain": in_plain_loop}

if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    ENGINES[given["engine"]](given)
