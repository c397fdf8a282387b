"""The last models of an experiment's runs, as state dicts."""

from collections.abc import Sequence
from typing import overload

from torch import Tensor

from umbel.sim.experiment.trials import TrialResult


class Models(Sequence[dict[str, Tensor]]):
    """The last model of each run, in the order of the runs: `net.load_state_dict(results.models[0])`.

    Each access makes a new state dict on the CPU. If the experiment has a folder, the model is read from it then;
    else one model a run is in memory. Raises `ValueError` and `OSError` as `LastModel.state` does.
    """

    def __init__(self, trials: Sequence[TrialResult]) -> None:
        self._trials = trials

    def __len__(self) -> int:
        return len(self._trials)

    @overload
    def __getitem__(self, index: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> "Models": ...
    def __getitem__(self, index: int | slice) -> "dict[str, Tensor] | Models":
        return Models(self._trials[index]) if isinstance(index, slice) else self._trials[index].model.state()

    def __repr__(self) -> str:
        return f"<the last models of {len(self)} runs: models[0] is the state dict of the first>"
