"""A worker's side of clients that train themselves, for the engine "processes".

It receives the *app* that makes clients, the *samples*, its *block* for changes and the *model*, and then one *clients*
message after another: their sizes, their training, or their measuring. `worker_process.py` has the form of messages.
"""

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.model.artifact import decode_model
from umbel.sim.data.data_set import SampleSet
from umbel.sim.engines.clients.alive import LiveClients
from umbel.sim.engines.clients.app import ClientApp
from umbel.sim.engines.clients.messages import packed_reports, unpacked_group, unpacked_work
from umbel.sim.engines.clients.trainer import ClientTrainer
from umbel.sim.engines.clients.work import ClientReport, ClientsWork, GlobalModel
from umbel.sim.engines.work import EngineError

Answer = tuple[str, dict[str, Any], list[NDArray[Any]]]


class ClientWorker:
    """The clients of one worker process."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        app = ClientApp.from_json(fields["app"])
        self._trainer = ClientTrainer(LiveClients(app, fields["n_alive"], fields["n_processes"]))
        self._samples: SampleSet | None = None
        self._block: Tensor | None = None

    def take(self, kind: str, tensors: Sequence[Tensor]) -> None:
        """Take shared memory: "samples", "block" or "model"."""
        match kind:
            case "samples":
                self._samples = SampleSet(*tensors)
            case "block":
                (self._block,) = tensors
            case _:
                self._trainer.begin(GlobalModel(*decode_model(tensors[0].numpy().tobytes())))

    def answer(self, fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]]) -> Answer:
        """Do a job; the kind, the fields and the arrays of the answer."""
        try:
            return self._done(fields, arrays)
        except EngineError as error:
            reason = "".join(traceback.format_exception(error))
            return "failed", {"sentence": str(error), "traceback": reason}, []

    def _done(self, fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]]) -> Answer:
        if fields["job"] == "sizes":
            group, _ = unpacked_group(fields, arrays, self._samples)
            return "done", {}, [np.array(self._trainer.sizes(group), dtype=np.int64)]
        work = unpacked_work(fields, arrays, self._samples)
        if fields["job"] == "measure":
            reports = [self._trainer.measure(work, position) for position in range(len(work))]
        else:
            reports = self._trained(work, fields["half"])
        return "done", {"reports": packed_reports(fields["job"], reports)}, []

    def _trained(self, work: ClientsWork, half: int) -> list[ClientReport]:
        assert self._block is not None, "the block is sent before the first work"
        return [self._trainer.train(work, position, self._block[half][position]) for position in range(len(work))]
