"""The last model of a simulated run, in memory or in the run's folder."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from umbel.aggregation.model.artifact import decode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import State


@dataclass(frozen=True, slots=True, eq=False)
class LastModel:
    """The last model of a run. `held`: its tensors; None: they are in `file`, and are read when they are asked for."""

    sha256: str
    held: State | None = None
    file: Path | None = None

    @classmethod
    def of(cls, sha256: str, published: State, layout: Layout, file: Path | None) -> "LastModel":
        """`published`: the owners' tensors, which are copied if there is no file."""
        if file is not None:
            return cls(sha256, file=file.absolute())
        return cls(sha256, layout.model.full_state({name: value.detach().clone() for name, value in published.items()}))

    def state(self) -> dict[str, Tensor]:
        """A new state dict, on the CPU, for `load_state_dict`.

        Raises `ValueError` if the file is no longer that of this run, and `OSError` if it cannot be read.
        """
        if self.held is not None:
            return {name: value.clone() for name, value in self.held.items()}
        assert self.file is not None, "a model that is not held is in a file"
        body = self.file.read_bytes()
        if hashlib.sha256(body).hexdigest() != self.sha256:
            raise ValueError(
                f"{self.file} is another model than the last one of this run, because the run was extended or the file "
                "was changed; simulate the experiment again to have its results"
            )
        layout, state = decode_model(body)
        return {spec.name: state[spec.name] for spec in layout.model.tensors}
