"""The model of a simulated run, version after version, in memory; and what clients keep of it from round to round."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.downlink.change import ChangeWriter
from umbel.aggregation.downlink.publishing import Spread
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.optimizer import HasMean, next_master
from umbel.aggregation.model.state import InMemory, master_dtype, master_of, pieces, published_state, torch_dtype
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.secagg.numbers.totals import Totals
from umbel.aggregation.types import CHANGES_MAX, ClientId
from umbel.sim.data.partition.partition import Indices


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What was made: its SHA-256 in hex, and its length. In a simulation nobody downloads it."""

    sha256: str
    size_bytes: int

    @classmethod
    def of(cls, data: bytes) -> "FileDigest":
        return cls(hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True, slots=True)
class ModelState:
    """A version. `master`: in full precision; `published`: what clients start from; `file`: of its safetensors.

    `change`: what makes it of the version before, where the run sends changes.
    """

    layout: Layout
    master: Mapping[str, Tensor] = field(repr=False)
    published: Mapping[str, Tensor] = field(repr=False)
    file: FileDigest
    change: FileDigest | None = None

    @classmethod
    def first(cls, state: Mapping[str, Tensor]) -> "ModelState":
        """Version 0."""
        layout = Layout.of_state(state)
        owned = {spec.name: state[spec.name].detach().clone() for spec in layout.owners()}
        return cls(layout, master_of(layout, owned), owned, FileDigest.of(encode_model(layout.full_state(owned))))

    def after(self, mean: HasMean, learning_rate: float, change_step: float | None) -> "ModelState":
        """The next version, as a coordinator makes it (`server/sums/model_files.py`): the same bits.

        `change_step`: where clients are sent changes, their step in root mean squares. Raises `ModelOverflow`.
        """
        master = next_master(self.layout, self.master, mean, learning_rate)
        if change_step is None:
            published = published_state(self.layout, master)
            return ModelState(self.layout, master, published, self._file_of(published))
        spread, public = Spread(), {name: values.clone() for name, values in self.published.items()}
        for piece in pieces(self.layout):
            before = piece.of(InMemory(public), torch_dtype(piece.spec))
            spread.add(piece.spec, piece.of(InMemory(master), master_dtype(piece.spec)), before)
        writer = ChangeWriter(self.layout, spread.step(change_step), InMemory(master), InMemory(public))
        body = b"".join(writer.body())
        return ModelState(self.layout, master, public, self._file_of(public), FileDigest.of(writer.head() + body))

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
    """`left`: of error feedback, by client. `has`: the version that a client has, of those who were ever asked.
    `changes`: bytes of what leads to the newest version from those before it, oldest first; see `note`.
    """

    left: dict[ClientId, Residual] = field(default_factory=dict[ClientId, Residual])
    has: dict[ClientId, int] = field(default_factory=dict[ClientId, int])
    changes: tuple[int, ...] = ()

    def down_bytes(self, clients: Sequence[ClientId], version: int, model: ModelState) -> Indices:
        """What each has to fetch to have the newest version: nothing, the changes since its own, or the whole."""
        behind = (version - self.has.get(client, -1) for client in clients)
        whole = model.file.size_bytes
        n_known = len(self.changes)
        return np.array([sum(self.changes[n_known - n :]) if n <= n_known else whole for n in behind], dtype=np.int64)

    def fetched(self, clients: Iterable[ClientId], version: int) -> None:
        """These have it now."""
        self.has.update(dict.fromkeys(clients, version))

    def note(self, model: ModelState) -> None:
        """There is a new version. As a coordinator offers changes (`server/store/versions.py`): as far as they were
        made, eight at most, and together smaller than the model.
        """
        made = () if model.change is None else (*self.changes, model.change.size_bytes)[-CHANGES_MAX:]
        while made and sum(made) >= model.file.size_bytes:
            made = made[1:]
        self.changes = made
