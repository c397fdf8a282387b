"""Divides real clients among the actors of a Ray cluster: the engine "ray" of an experiment with an app.

An actor makes clients from the app's name when they are first needed, with the code of a worker process
(`client_worker.py`). Samples go into Ray's object store once, the model once for each call. What clients keep across
rounds stays with the caller: an actor borrows the states of the clients that it trains, and gives back what they leave.
So the machines need no folder in common.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from umbel.aggregation.model.artifact import encode_model
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.clients.app import ClientApp
from umbel.sim.engines.clients.messages import Arrays, packed_group, packed_work, unpacked_reports
from umbel.sim.engines.clients.states import ClientStates
from umbel.sim.engines.clients.work import ClientGroup, ClientReport, ClientsWork, GlobalModel, TrainedClients
from umbel.sim.engines.device import chunks, one_thread, rows_of_block
from umbel.sim.engines.workers.client_worker import Answer, ClientWorker
from umbel.sim.engines.workers.pool import failure_of
from umbel.sim.engines.workers.ray_cluster import RayCluster, dtypes_of, unpacked_samples, use_paths

_Bytes = NDArray[np.uint8]
_States = dict[int, bytes]  # the files of clients' states, by number


class RayClientWorker:
    """`paths`: of the caller's modules. `n_actors`: that may share the memory of one machine. `app`: what a worker
    process is told of the app.
    """

    def __init__(self, paths: Sequence[str], n_actors: int, app: Mapping[str, Any]) -> None:
        use_paths(paths)
        self._worker = ClientWorker({**app, "n_processes": n_actors})
        self._model: int | None = None

    def answer(
        self,
        fields: Mapping[str, Any],
        arrays: Arrays,
        inputs: _Bytes | None,
        targets: _Bytes | None,
        model: _Bytes | None,
        lent: _States,
    ) -> tuple[Answer, NDArray[np.float32], _States]:
        """Do a job. `inputs`, `targets` and `model` come from the object store.

        Returns the answer, the changes (k, n_values) of clients that train, and what these clients leave.
        """
        if inputs is not None and targets is not None:
            found = unpacked_samples(inputs, targets, fields["dtypes"])
            self._worker.take("samples", [found.inputs, found.targets])
        if model is not None and fields["model"] != self._model:
            self._worker.take("model", [torch.from_numpy(model.copy())])
            self._model = fields["model"]
        block = torch.empty(1, fields["n_clients"], fields["n_values"])
        self._worker.take("block", [block])
        with closing(ClientStates()) as states, one_thread():
            for number, file in lent.items():
                states.borrow(number, file)
            answer = self._worker.answer({**fields, "half": 0, "states": str(states.folder)}, arrays)
            left = {number: states.left(number) for number in arrays[0].tolist()}
        return answer, block[0].numpy(), {number: file for number, file in left.items() if file is not None}


class RayClients:
    """`n_alive`: clients in the memory of each actor; None: as many as fit. `device`: "cuda" gives each actor a GPU, or
    a part of one. `n_workers`, `address` and errors: as of `RayCluster`.
    """

    name = "ray"
    why = ""

    def __init__(
        self,
        app: ClientApp,
        n_alive: int | None = None,
        n_workers: int | None = None,
        device: str = "cpu",
        address: str | None = None,
    ) -> None:
        made_by = {"app": app.to_json(), "n_alive": n_alive}
        self._cluster = RayCluster(RayClientWorker, [made_by], n_workers, device, address)
        self._n_models = 0

    def sizes(self, group: ClientGroup) -> Indices:
        found = np.zeros(len(group), dtype=np.int64)
        for positions, (answer, *_) in self._run("sizes", group, lambda at: packed_group(group.part(at))):
            (found[positions],) = answer[2]
        return found

    def train(self, model: GlobalModel, work: ClientsWork) -> Iterator[TrainedClients]:
        for positions, (answer, values, left) in self._work("train", model, work):
            if work.offer.task.makes_model:
                for number in work.group.numbers[positions].tolist():
                    work.states.wait_for(number, left.get(number))
            reports = unpacked_reports("train", answer[1]["reports"])
            yield TrainedClients(positions, torch.from_numpy(values.copy()), reports)

    def measure(self, model: GlobalModel, work: ClientsWork) -> list[ClientReport]:
        found = dict[int, ClientReport]()
        for positions, (answer, *_) in self._work("measure", model, work):
            found |= dict(zip(positions.tolist(), unpacked_reports("measure", answer[1]["reports"]), strict=True))
        return [found[position] for position in range(len(work))]

    def close(self) -> None:
        """End the actors, and Ray if this engine has started it."""
        self._cluster.close()

    def _work(self, job: str, model: GlobalModel, work: ClientsWork) -> Iterator[tuple[Indices, Any]]:
        self._n_models += 1
        body = encode_model(model.layout.full_state(model.owned), model.layout)
        told, version = (self._n_models, model.n_sent, np.frombuffer(body, np.uint8)), work.offer.model.version

        def lent(positions: Indices) -> _States:
            files = {number: work.states.lend(number, version) for number in work.group.numbers[positions].tolist()}
            return {number: file for number, file in files.items() if file is not None}

        return self._run(job, work.group, lambda at: packed_work(work.part(at)), told, lent)

    def _run(
        self,
        job: str,
        group: ClientGroup,
        packed: Callable[[Indices], tuple[dict[str, Any], Arrays]],
        told: tuple[int, int, _Bytes | None] = (0, 0, None),
        lent: Callable[[Indices], _States] = lambda _: {},
    ) -> Iterator[tuple[Indices, Any]]:
        """`told`: the number of the model, how many values a client sends, and the model. `lent`: the states of clients
        at these positions.
        """
        number, n_values, model = told
        common: dict[str, Any] = {"job": job, "model": number, "n_values": n_values if job == "train" else 0}
        body = None if model is None else self._cluster.put(model)
        inputs, targets = None, None
        if group.train is not None:
            inputs, targets = self._cluster.samples(group.train.samples)
            common["dtypes"] = dtypes_of(group.train.samples)

        def begin(actor: Any, positions: Indices) -> Any:
            fields, arrays = packed(positions)
            job_fields = {**fields, **common, "n_clients": len(positions)}
            return actor.answer.remote(job_fields, arrays, inputs, targets, body, lent(positions))

        waiting = chunks(group.effort, len(self._cluster), rows_of_block(n_values))
        for positions, found in self._cluster.run(waiting, begin):
            kind, fields, _ = found[0]
            if kind == "failed":
                raise failure_of(fields, "a Ray actor")
            yield positions, found
