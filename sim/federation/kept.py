"""What the run's algorithm adds to the gradients of simulated clients, and has them keep: as `client/training/kept.py`.

Here each client's is a vector of the whole model in layout order, with zeros where the server's step moves nothing. So
one call serves all clients of a group.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from umbel.aggregation.algorithms import scaffold
from umbel.aggregation.algorithms.feddyn import next_pull
from umbel.aggregation.algorithms.scaffold import control_after, gradient_of, scaled
from umbel.aggregation.model.layout import CONTROL_PREFIX, Layout
from umbel.aggregation.model.state import State
from umbel.aggregation.plans.training import TrainingPlan
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.work import Changes, CohortWork
from umbel.sim.federation.uplink import Read


def one_step_over_all(work: CohortWork) -> CohortWork:
    """Of the same clients: one step of plain gradient descent, each over all of its samples."""
    n_most = int(work.data.sizes.max(initial=1))
    plan = replace(
        work.plan,
        algorithm="fedavg",
        total_samples=None,
        control_variate="change",
        local_epochs=None,
        local_steps=1,
        batch_size=n_most,
    )
    return replace(work, plan=plan, steps=np.ones_like(work.steps), pulls=None)


@dataclass(slots=True)
class Keeping:
    """What some clients keep. All tensors: float32 (clients, values of the model).

    `before`: what each has kept. `pulls`: what is added to each client's gradients. `gradients`: each client's, of all
    its samples, at the round's model; None before they are noted.
    """

    layout: Layout  # of the run
    training: TrainingPlan
    before: Tensor
    pulls: Tensor
    gradients: Tensor | None = None
    _after: Tensor = field(default_factory=lambda: torch.empty(0))  # FedDyn's, of the changes that came last

    @classmethod
    def of(
        cls, training: TrainingPlan, layout: Layout, published: State, kept: Sequence[Tensor | None]
    ) -> "Keeping | None":
        """None if the algorithm has clients keep nothing. `kept`: by client; None before its first training."""
        if not (training.remembers_drift or training.has_control):
            return None
        none = torch.zeros(layout.model.n_values)
        before = torch.stack([none if one is None else one for one in kept])
        if training.remembers_drift:
            return cls(layout, training, before, before)
        of_all = none.clone()
        for spec in layout.model.owners():
            if spec.is_stepped:
                of_all[spec.place] = published[CONTROL_PREFIX + spec.name].reshape(-1)
        return cls(layout, training, before, of_all - before)

    @property
    def needs_gradients(self) -> bool:
        """Whether each client must first say its gradient of all its samples (`note_gradients`)."""
        return self.training.control_variate == "gradient"

    def note_gradients(self, found: Iterable[Changes]) -> None:
        """Note them. `found`: the changes of `one_step_over_all`."""
        self.gradients = torch.zeros_like(self.before)
        for changes in found:
            self.gradients[torch.from_numpy(changes.positions)] = self._stepped(
                gradient_of(changes.values, self.training.learning_rate)
            )

    def sent(self, changes: Changes, steps: Indices) -> Tensor | None:
        """What these clients send of their control variates; None if they have none. In the order of the changes.

        `steps`: how many each of the cohort has done.
        """
        at, training = torch.from_numpy(changes.positions), self.training
        if not training.has_control:
            self._after = self._stepped(next_pull(self.pulls[at], changes.values, training.proximal_mu))
            return None
        if self.gradients is None:
            walked = torch.from_numpy(steps[changes.positions] * training.learning_rate).to(torch.float32)
            after = self._stepped(control_after(self.pulls[at], changes.values, walked.unsqueeze(1)))
        else:
            after = self.gradients[at]
        return scaled(after, self.before[at], training.control_scale)

    def kept(self, changes: Changes, read: Sequence[Read | None]) -> list[Tensor | None]:
        """What these clients keep if their updates are taken. Call `sent` with these changes first.

        `read`: each one's update, as the coordinator reads it; None for one that it refuses.
        """
        at = torch.from_numpy(changes.positions)
        if not self.training.has_control:
            return list(self._after)
        return [None if one is None else self._read(self.before[i], one) for i, one in zip(at, read, strict=True)]

    def _read(self, before: Tensor, read: Read) -> Tensor:
        places = {spec.name: spec.place for spec in self.layout.model.owners()}
        found = before.clone()
        for spec in self.layout.update.owners():
            if spec.controls is not None:
                here = places[spec.controls]
                sent = read(spec.place.start, spec.place.stop)
                found[here] = scaffold.kept(before[here], sent, self.training.control_scale)
        return found

    def _stepped(self, values: Tensor) -> Tensor:
        """These values where the server's step moves the model, and zeros elsewhere."""
        found = torch.zeros_like(values)
        for spec in self.layout.model.owners():
            if spec.is_stepped:
                found[:, spec.place] = values[:, spec.place]
        return found
