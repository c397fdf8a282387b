"""A client for any framework: it takes and returns named numpy arrays."""

from abc import abstractmethod
from collections.abc import Mapping

from torch import nn

from umbel.client.app import Client
from umbel.client.errors import TrainingFailed
from umbel.client.local.arrays import Array, ArrayModel, NamedArrays
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import Evaluation, TrainResult


class ArrayClient(Client):
    """A site's own code in scikit-learn, JAX, TensorFlow or numpy. Write `train_arrays`:

    ```
    def train_arrays(self, arrays, plan):
        steps = plan.drive(self.data, keep={"arrays": arrays})  # an `ArrayData`, for batches of numpy arrays
        for features, labels in steps:
            loss, gradients = self.loss_and_gradients(arrays, features, labels)
            for name, gradient in plan.adjust_arrays(gradients, arrays).items():
                arrays[name] -= plan.learning_rate * gradient
            steps.note(loss=loss)
        return arrays, steps.result(self.sample_count)
    ```

    Args:
        arrays: the first values by name; they fix names, shapes and dtypes.
        sample_count: the samples that the site trains on, at least 1.

    Raises `TypeError` for a name that is no text, `ValueError` for a dtype that no model can have.
    """

    def __init__(self, arrays: NamedArrays, sample_count: int) -> None:
        self.model, self.sample_count = ArrayModel(arrays), sample_count

    @abstractmethod
    def train_arrays(self, arrays: dict[str, Array], plan: LocalPlan) -> tuple[NamedArrays, TrainResult]:
        """Train from `arrays`, which hold the global values, for at least one step. Returns the new arrays.

        `arrays` are copies: change them or keep them. Names, shapes and dtypes must stay.
        """

    def evaluate_arrays(self, arrays: dict[str, Array]) -> Evaluation | None:
        """Measure `arrays`, which hold the global values, on held-out data; None if there are none."""
        return None

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        """Call `train_arrays`. Raises `TrainingFailed` for arrays that are not the model's, or are not finite."""
        own = _array_model(model)
        returned: object = self.train_arrays(own.arrays(), plan)
        match returned:
            case (Mapping() as arrays, TrainResult() as result):
                _take_over(own, arrays)
                return result
            case _:
                kinds = [type(one).__name__ for one in (returned if isinstance(returned, tuple) else [returned])]
                raise TypeError(
                    f"train_arrays must return the arrays by name and a TrainResult, not {' and '.join(kinds)}"
                )

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        """Call `evaluate_arrays`."""
        return self.evaluate_arrays(_array_model(model).arrays())


def _array_model(model: nn.Module) -> ArrayModel:
    if not isinstance(model, ArrayModel):
        raise TypeError(f"an ArrayClient trains an ArrayModel, not a {type(model).__name__}")
    return model


def _take_over(model: ArrayModel, arrays: NamedArrays) -> None:
    try:
        model.set_arrays(arrays)
    except ValueError as error:
        # Its sentence has names, shapes and dtypes, but no value of the arrays. So the coordinator may see it.
        # No traceback: the sentence says all, and none of the site's own lines has raised the error.
        raise TrainingFailed(f"train_arrays returned arrays that the model cannot take: {error}") from None
