"""The model of a simulated run, version after version, in memory; and what clients keep of it from round to round."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.downlink.change import ChangeWriter
from umbel.aggregation.downlink.publishing import write_next_master
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.optimizer import HasMean, write_next
from umbel.aggregation.model.state import InMemory, empty_state, master_dtype, master_of, torch_dtype
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.secagg.numbers.totals import Totals
from umbel.aggregation.types import CHANGES_MAX, ClientId
from umbel.sim.data.partition.partition import Indices


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The SHA-256 (hex) and the length of a file, which a simulation does not keep."""

    sha256: str
    size_bytes: int

    @classmethod
    def of(cls, data: bytes) -> "FileDigest":
        return cls(hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True, slots=True)
class ModelState:
    """A version of the model."""

    layout: Layout
    master: Mapping[str, Tensor] = field(repr=False)  # in full precision
    published: Mapping[str, Tensor] = field(repr=False)  # what clients start from
    file: FileDigest  # safetensors
    change: FileDigest | None = None  # from the version before, where the run sends changes

    @classmethod
    def first(cls, state: Mapping[str, Tensor]) -> "ModelState":
        """Version 0."""
        layout = Layout.of_state(state)
        owned = {spec.name: state[spec.name].detach().clone() for spec in layout.owners()}
        return cls(layout, master_of(layout, owned), owned, FileDigest.of(encode_model(layout.full_state(owned))))

    def after(self, mean: HasMean, learning_rate: float, change_step: float | None) -> "ModelState":
        """The next version, with the bits of a coordinator's (`server/sums/model_files.py`).

        `change_step`: where clients are sent changes, their step in root mean squares. Raises `ModelOverflow`.
        """
        layout, master, before = self.layout, empty_state(self.layout, master_dtype), InMemory(self.master)
        if change_step is None:
            public = empty_state(layout, torch_dtype)
            write_next(layout, before, mean, learning_rate, InMemory(public), InMemory(master))
            return ModelState(layout, master, public, self._file_of(public))
        public = {name: values.clone() for name, values in self.published.items()}
        files = InMemory(master), InMemory(public)
        writer = ChangeWriter(
            layout, write_next_master(layout, before, mean, learning_rate, *files, change_step), *files
        )
        body = b"".join(writer.body())
        return ModelState(layout, master, public, self._file_of(public), FileDigest.of(writer.head() + body))

    def _file_of(self, published: Mapping[str, Tensor]) -> FileDigest:
        return FileDigest.of(encode_model(self.layout.full_state(published)))

    def ref(self, version: int) -> ModelRef:
        return ModelRef(version, self.file.sha256, self.file.size_bytes, self.layout.digest)


@dataclass(frozen=True, slots=True)
class SummedModel:
    """The next model and what the sum that it was made of has shown (`aggregation.run_end.ModelMade`)."""

    state: ModelState
    sum_sha256: str
    update_rms: float | None = None
    totals: Totals | None = None

    @property
    def published(self) -> FileDigest:
        return self.state.file

    @property
    def master_sha256(self) -> str:
        """A simulation keeps no files of master copies."""
        return self.state.file.sha256

    @property
    def n_values(self) -> int:
        return self.state.layout.n_values

    @property
    def change(self) -> FileDigest | None:
        return self.state.change

    @property
    def shown(self) -> SumShown | None:
        return None if self.totals is None else self.totals.shown


@dataclass(slots=True)
class Memory:
    """What clients keep from round to round."""

    left: dict[ClientId, Residual] = field(default_factory=dict[ClientId, Residual])  # of error feedback
    has: dict[ClientId, int] = field(default_factory=dict[ClientId, int])  # the version of each client asked so far
    changes: tuple[int, ...] = ()  # bytes of each change that leads to the newest version, the oldest first

    def down_bytes(self, clients: Sequence[ClientId], version: int, model: ModelState) -> Indices:
        """What each fetches to have the newest version: nothing, the changes since its own, or the model."""
        behind = (version - self.has.get(client, -1) for client in clients)
        whole = model.file.size_bytes
        n_known = len(self.changes)
        return np.array([sum(self.changes[n_known - n :]) if n <= n_known else whole for n in behind], dtype=np.int64)

    def fetched(self, clients: Iterable[ClientId], version: int) -> None:
        self.has.update(dict.fromkeys(clients, version))

    def note(self, model: ModelState) -> None:
        """Take a new version. As a coordinator does (`server/store/versions.py`), offer at most eight changes in a row
        that together are smaller than the model.
        """
        made = () if model.change is None else (*self.changes, model.change.size_bytes)[-CHANGES_MAX:]
        while made and sum(made) >= model.file.size_bytes:
            made = made[1:]
        self.changes = made
