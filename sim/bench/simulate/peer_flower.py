"""How Flower does the work of `umbel bench simulate`: its message API, its FedAvg, one core a client, on Ray.

That is its best configuration here (an actor for each core; by default it takes two cores a client). The program runs
in the interpreter that has `flwr` and `ray`, beside `peer_work.py`. It imports itself, so that Ray finds the client's
function by its name and does not carry it in each message. Written for flwr 1.41.
"""

from collections.abc import Mapping, Sequence

from umbel.sim.bench.simulate.peer_run import Setup
from umbel.sim.engines.schedule import n_cores

_FILE_NAME = "flower_driver.py"
_PROGRAM = '''
import functools
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer_work import Work, write_report

FOLDER = Path(__file__).parent
client_app, server_app = ClientApp(), ServerApp()


@functools.cache
def resident():
    """Once in each actor: data are not sent with messages."""
    torch.set_num_threads(1)
    return Work(FOLDER)


@client_app.train()
def train(message, context):
    work, turn = resident(), message.content["config"]["turn"]
    start = torch.from_numpy(message.content["arrays"].to_numpy_ndarrays()[0].copy())
    arrays = ArrayRecord([work.trained(start, turn).numpy()])
    metrics = MetricRecord({"num-examples": int(work.sizes[turn])})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class SameClients(FedAvg):
    """FedAvg that asks whom it is told to ask, and notes the time after each round."""

    def __init__(self, work):
        super().__init__(fraction_evaluate=0.0)
        self.work, self.times = work, []

    def configure_train(self, server_round, arrays, config, grid):
        while len(nodes := sorted(grid.get_node_ids())) < self.work.words["n_clients"]:
            time.sleep(0.1)  # they register one after another, which may last into the first round
        self.times = self.times or [time.time()]
        first = (server_round - 1) * self.work.n_asked
        return [
            Message(
                content=RecordDict({"arrays": arrays, "config": ConfigRecord({"turn": first + position})}),
                message_type=MessageType.TRAIN,
                dst_node_id=nodes[client],
            )
            for position, client in enumerate(self.work.clients[server_round - 1].tolist())
        ]

    def aggregate_evaluate(self, server_round, replies):
        """The last that is called in a round."""
        self.times.append(time.time())


@server_app.main()
def serve(grid, context):
    work = Work(FOLDER)
    strategy = SameClients(work)
    found = strategy.start(grid=grid, initial_arrays=ArrayRecord([work.start.numpy()]), num_rounds=work.n_rounds)
    write_report(FOLDER, strategy.times, torch.from_numpy(found.arrays.to_numpy_ndarrays()[0].copy()))


def main():
    work = Work(FOLDER)
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=work.words["n_clients"],
        backend_config={
            "init_args": {"num_cpus": work.words["n_processes"]},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    import flower_driver

    flower_driver.main()
'''


def flower_setups(versions: Mapping[str, str]) -> Sequence[Setup]:
    """The one; none where the packages are missing."""
    if not {"flwr", "ray"} <= versions.keys():
        return ()
    title = f"Flower {versions['flwr']} on Ray {versions['ray']}, {n_cores()} actors"
    return (Setup(title, _FILE_NAME, _PROGRAM, {"n_processes": n_cores()}),)
