"""One object of the client under check: its trainings and evaluations, each from chosen weights, without HTTP."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from umbel.aggregation.plans.tensors import TensorRules
from umbel.client.app import Client
from umbel.client.check.observed import Evaluating, ObservedClient, ObservedTraining, as_asked
from umbel.client.errors import TrainingFailed
from umbel.client.local.plan import LocalPlan
from umbel.client.rounds.site_code import evaluated, train_from
from umbel.client.state.model_files import load_model, write_model
from umbel.client.training.shared_state import SharedState


class Trainee:
    """`private`: the private tensors of every training; by default those that the client was made with.

    Raises `LayoutError` or `WorkRefused` for rules that do not fit the client's model.
    """

    def __init__(self, app: Client, rules: TensorRules | None, private: Mapping[str, Tensor] | None = None) -> None:
        self.client = ObservedClient(app)
        self.shared = SharedState(self.client).under(rules)
        self.private = self.shared.private() if private is None else private

    def save(self, path: Path) -> Path:
        """Write the model's weights that travel."""
        write_model(path, self.shared.shared(), self.shared.layout)
        return path

    def reset(self) -> ObservedClient:
        """The client with its first private tensors and as it was asked, for rounds."""
        self.shared.set_private(self.private)
        self.client.alter = as_asked
        return self.client

    def train(self, start: Path, plan: LocalPlan) -> ObservedTraining:
        """Train from the weights in this file."""
        self.shared.set_private(self.private)
        before = len(self.client.trainings)
        refusal = ""
        try:
            train_from(self.client, self.shared, load_model(start, self.shared.layout), plan)
        except TrainingFailed as error:
            if len(self.client.trainings) == before:
                raise
            refusal = str(error)
        seen = self.client.trainings.pop()
        seen.refusal = refusal
        return seen

    def evaluate(self, weights: Path, private: Mapping[str, Tensor] | None = None) -> Evaluating:
        """Evaluate these weights. `private`: beside them; by default those of every training."""
        self.shared.set_private(self.private if private is None else private)
        self.shared.load(load_model(weights, self.shared.layout))
        try:
            evaluated(self.client)
        except (Exception, SystemExit) as error:
            self.client.evaluations[-1].error = error
        return self.client.evaluations.pop()
