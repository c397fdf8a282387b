"""A version of a run's model in memory, with its master copy, and the next version that a round's mean makes of it.

The bits are those of the files that a coordinator writes (`server/sums/model_files.py`).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from umbel.aggregation.downlink.change import ChangeWriter
from umbel.aggregation.downlink.publishing import write_next_master
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import HasMean, ServerStep, empty_master, first_master_copy, write_next
from umbel.aggregation.model.state import InMemory, empty_state, torch_dtype, with_first_control
from umbel.aggregation.optimizers.server_optimizer import ServerOptimizer
from umbel.aggregation.optimizers.sgd import sgd
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.secagg.numbers.totals import Totals


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The SHA-256 (hex) and the length of a file, which nobody keeps."""

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
    def first(
        cls, state: Mapping[str, Tensor], layout: Layout | None = None, optimizer: ServerOptimizer | None = None
    ) -> "ModelState":
        """Version 0. `layout`: of the run; by default all of the state travels. `optimizer`: of the server."""
        layout = Layout.of_state(state) if layout is None else layout
        whole = with_first_control(state, layout)
        owned = {spec.name: whole[spec.name].detach().clone() for spec in layout.owners()}
        body = encode_model(layout.full_state(owned), layout)
        return cls(layout, first_master_copy(layout, optimizer or sgd(), owned), owned, FileDigest.of(body))

    def after(self, mean: HasMean, step: ServerStep, change_step: float | None) -> "ModelState":
        """The next version, with the bits of a coordinator's (`server/sums/model_files.py`).

        `change_step`: where clients are sent changes, their step in root mean squares. Raises `ModelOverflow`.
        """
        layout, before = self.layout, InMemory(self.master)
        master = empty_master(layout, step.optimizer)
        if change_step is None:
            public = empty_state(layout, torch_dtype)
            write_next(layout, before, mean, step, InMemory(public), InMemory(master))
            return ModelState(layout, master, public, self._file_of(public))
        public = {name: values.clone() for name, values in self.published.items()}
        files = InMemory(master), InMemory(public)
        writer = ChangeWriter(layout, write_next_master(layout, before, mean, step, *files, change_step), *files)
        body = b"".join(writer.body())
        return ModelState(layout, master, public, self._file_of(public), FileDigest.of(writer.head() + body))

    def _file_of(self, published: Mapping[str, Tensor]) -> FileDigest:
        return FileDigest.of(encode_model(self.layout.full_state(published), self.layout))

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
        """The published file's, because nobody keeps a file of the master copy."""
        return self.state.file.sha256

    @property
    def n_values(self) -> int:
        return self.state.layout.update.n_values

    @property
    def change(self) -> FileDigest | None:
        return self.state.change

    @property
    def shown(self) -> SumShown | None:
        return None if self.totals is None else self.totals.shown
