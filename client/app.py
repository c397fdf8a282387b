"""The interface of a site's own code: a `Client` trains by a `LocalPlan` and returns a `TrainResult`.

Nothing here knows of HTTP, rounds or files; `loop.py` calls a `Client` and does the rest.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from umbel.aggregation.plans.tensors import TensorKind
from umbel.client.local.batches import WHOLE, BatchPart
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import Evaluation, TrainResult


class Client(ABC):
    """A site's own code. Set `model` and `sample_count`, and write `train`."""

    model: nn.Module  # has the tensors of the run's model; the weights that travel are overwritten each round
    sample_count: int  # the samples the site trains on, at least 1
    # In a silo of several ranks: which part of each batch this rank takes. By default all ranks take the same batches,
    # as the stages of a pipeline do. `plan.part` has it too.
    part: BatchPart = WHOLE
    # Whether `train` is one call of foreign code, into which nobody sees: no gradient is adjusted. When it must stop,
    # it raises `TooLittleDone`, and its work is lost.
    trains_in_one_call: ClassVar[bool] = False

    @abstractmethod
    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        """Train `model`, which holds the global weights, in place, for at least one step."""

    def prepare(self, plan: LocalPlan) -> None:  # noqa: B027 - a client may leave it out
        """Called in each round before `evaluate` and `train`, for an `evaluate` that needs the round's number, the
        run's options or `plan.state`. A round that only measures keeps no change to the state.
        """

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        """Measure `model`, which holds the global weights, on held-out data; None if there are none."""
        return None

    def training_loss(self, model: nn.Module) -> float | None:
        """The mean loss of `model`, which holds the global weights, over the training data; None if it is not measured.

        Called before `train`, and only in runs with the algorithm q-FedAvg, which need it.
        """
        return None

    def shares(self, name: str) -> TensorKind | None:
        """What of the tensor with this name in the state dict travels; None: as the run file's [tensors] says.

        `"mean"`: its weighted mean (the default). `"global"`: it comes from the coordinator, and changes to it are not
        sent. `"count"`: integers whose changes are added up. `"private"`: it stays here, as for FedBN and personal
        heads. `"base"`: every site has it already, such as the frozen base of adapters; the run file's `base_sha256`
        binds its values.
        """
        return None
