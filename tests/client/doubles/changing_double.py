"""A coordinator in memory whose run makes changes: beside each model, it has the change from the one before."""

import hashlib
import re
from typing import Any

import httpx
import torch
from torch import nn

from tests.client.doubles.double import Double, Refused, stream
from tests.federations.whole_states import next_master
from umbel.aggregation.downlink.change import ChangeWriter
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.model.state import InMemory, master_of
from umbel.aggregation.update.grid import GridAccumulator
from umbel.aggregation.update.wire import HEADER_BYTES

STEP = 1 / 64


class ChangingDouble(Double):
    """`files`: models and changes by hash; `chain`: the changes so far, oldest first. `sent`: which
    of them were asked for, and from which byte on.
    """

    def __init__(self, model: nn.Module, rounds: int = 1) -> None:
        super().__init__(model, rounds)
        self.master = master_of(self.layout, decode_model(self.model_bytes)[1])
        self.files = {_sha256(self.model_bytes): self.model_bytes}
        self.chain: list[dict[str, Any]] = []
        self.n_offered = 8
        self.sent: list[tuple[str, int]] = []

    def advance(self, values: torch.Tensor) -> None:
        """A round whose mean is `values`."""
        total = GridAccumulator(self.layout.n_values, self.run_file.round_plan(1, 1).grid)
        total.fold_vector(values, 1)
        self.master = next_master(self.layout, self.master, total)
        before, (_, state) = _sha256(self.model_bytes), decode_model(self.model_bytes)
        public = {spec.name: state[spec.name].clone() for spec in self.layout.owners()}
        writer = ChangeWriter(self.layout, STEP, InMemory(self.master), InMemory(public))
        body = b"".join(writer.body())
        self.model_bytes = encode_model(self.layout.full_state(public))
        self.files[_sha256(self.model_bytes)] = self.model_bytes
        self.offer(before, writer.head() + body)
        self.round, self.attempt = self.round + 1, 1

    def offer(self, before: str, change: bytes) -> None:
        """Have this as the newest change."""
        self.files[_sha256(change)] = change
        self.chain.append({"from_sha256": before, "sha256": _sha256(change), "size_bytes": len(change)})

    def _commit(self, update: bytes) -> None:
        values = torch.frombuffer(bytearray(update), dtype=torch.float32, offset=HEADER_BYTES)
        self.updates.append(values)
        self.advance(values)

    def _assignment(self, client: str) -> dict[str, Any]:
        return {**super()._assignment(client), "changes": self.chain[-self.n_offered :]}

    def _model(self, request: httpx.Request) -> httpx.Response:
        sha256 = request.url.path.rpartition("/")[2]
        if sha256 not in self.files:
            raise Refused(404, "unknown-model")
        first = re.fullmatch(r"bytes=(\d+)-", request.headers.get("range", ""))
        start = int(first[1]) if first else 0
        self.sent.append((sha256, start))
        return stream(206 if first else 200, self.files[sha256][start:])


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
