"""The local steps of one round: batches until the plan is done or there is no more time, and what was measured."""

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from umbel.client.errors import WorkRefused
from umbel.client.local.batches import BatchPart, Collate, Data, EndlessBatches, is_map_style, n_batches, samples_in
from umbel.client.local.checkpoint import Checkpoint
from umbel.client.local.devices import Pace, seeded
from umbel.client.local.progress import CountSums, Keepable, Means, TrainingProgress, note_measured
from umbel.client.local.results import TrainResult, WeightedMean

_TELL_S = 30.0  # between two log lines about the progress
log = logging.getLogger("umbel.client")


class StepPlan(Protocol):
    """What the steps follow: a `LocalPlan`."""

    @property
    def steps(self) -> int | None: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def is_whole(self) -> bool: ...
    @property
    def seed(self) -> int: ...
    @property
    def part(self) -> BatchPart: ...
    @property
    def seconds_left(self) -> float: ...
    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def state(self) -> dict[str, Any]: ...
    def steps_for(self, n_batches: int) -> int: ...
    def full_steps_for(self, n_batches: int) -> int: ...
    def should_stop(self) -> str | None: ...
    def terms(self, n_steps: int) -> dict[str, object]: ...
    def begin(self, *models: nn.Module) -> None: ...


class LocalSteps:
    """An iterator over batches; make it with `plan.drive`, which says how it is used.

    `steps_done`: steps that are complete, those of an earlier process included. `steps_planned`: the plan's.
    """

    def __init__(
        self,
        plan: StepPlan,
        data: Data,
        keep: Mapping[str, Keepable],
        collate: Collate | None,
        accumulate: int,
        device: torch.device,
        terms: Mapping[str, object],
    ) -> None:
        """As for `plan.drive`. Raises `ValueError` for data that cannot be driven, `WorkRefused` for data that have
        batches of their own, if the run asks for one step over all samples.
        """
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, not {accumulate}")
        self._plan, self._keep, self._device = plan, keep, device
        in_pass = _steps_in_pass(plan, data, accumulate)
        if plan.is_whole and (in_pass != 1 or n_batches(data, plan.batch_size) is None):
            raise WorkRefused(
                "the run asks for the gradient of all samples (control_variate or inexactness), which needs them in "
                "one batch, and this client's data come in batches of their own, or have no length: give a data set "
                'with random access, or ask the operator for control_variate = "change", and no inexactness'
            )
        self.steps_done, self.steps_planned = 0, plan.steps_for(in_pass)
        self._steps_full = plan.full_steps_for(in_pass)
        self._means, self._counts = Means(), CountSums()
        self._batches = EndlessBatches(data, plan.batch_size, plan.seed, device, collate, accumulate, plan.part)
        asked = {**plan.terms(self.steps_planned), **terms}
        if accumulate > 1:
            asked["accumulate"] = accumulate
        self._training = TrainingProgress(keep, self._means, self._counts, self._batches, device, asked, plan.state)
        self._n_samples, self._told_at = 1, time.monotonic()

    @property
    def share(self) -> float:
        """By what a rank of a silo multiplies the loss of its part of a batch, so that the mean of all ranks' gradients
        is that of the whole batch; 1 where each client takes whole batches. With 0 the part has a sample that does not
        count, and nothing is noted.
        """
        return self._batches.share

    def __iter__(self) -> Iterator[Any]:
        """Each item is a batch or, where batches are accumulated, a list of them. A killed training resumes."""
        plan, pace, step_s = self._plan, Pace(self._device), 0.0
        plan.begin(*(one for one in self._keep.values() if isinstance(one, nn.Module)))
        with seeded(plan.seed, self._device):
            self.steps_done = self._training.resume(plan.checkpoint)
            started = time.perf_counter()
            for item in self._batches:
                self._n_samples = samples_in(item)
                yield item
                pace.step_queued()
                self.steps_done += 1
                now = time.perf_counter()
                started, step_s = now, now - started
                if self.steps_done >= self.steps_planned or plan.should_stop() or plan.seconds_left < step_s:
                    break
                if plan.checkpoint.is_due():
                    self._training.keep(plan.checkpoint, self.steps_done)
                    started = time.perf_counter()
                self._tell()

    def note(self, n_samples: int | None = None, **batch_means: Tensor | float) -> None:
        """Note means over the batch, such as its loss. The result has their means over all samples. A `WeightedMean`
        has its own weight.

        `n_samples`: in the batch; by default the length of the first tensor in it.
        """
        if not self.share:
            return
        means = {
            name: value if isinstance(value, WeightedMean) else torch.as_tensor(value)
            for name, value in batch_means.items()
        }
        self._means.add(means, self._n_samples if n_samples is None else n_samples)

    def note_measured(self, measured: Mapping[str, Tensor | WeightedMean], n_samples: int) -> None:
        """Note means of floating-point tensors and of `WeightedMean`s, and counts of integer tensors."""
        if self.share:
            note_measured(measured, n_samples, self._means, self._counts)

    def count(self, **batch_counts: Tensor) -> None:
        """Note integers that add up over batches and clients, such as confusion matrices; of one shape in all batches.

        Raises `ValueError` for others.
        """
        if self.share:
            self._counts.add(batch_counts)

    def result(self, sample_count: int, metrics: Mapping[str, Any] | None = None) -> TrainResult:
        """The result of the training. `sample_count`: the client's samples. `metrics`: beside those noted."""
        return TrainResult(
            sample_count,
            self.steps_done,
            self.steps_planned,
            {**self._means.result(), **(metrics or {})},
            self._counts.result(),
            steps_full=self._steps_full,
            first_loss=self._means.first("loss"),
            last_loss=self._means.last("loss"),
            samples_seen=self._means.n_samples,
        )

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told_at < _TELL_S:
            return
        self._told_at = now
        loss = self._means.last("loss")
        log.info(
            "%d of %d local steps done%s",
            self.steps_done,
            self.steps_planned,
            "" if loss is None else f"; the loss of the last batch is {loss:.4g}",
        )


def _steps_in_pass(plan: StepPlan, data: Data, accumulate: int) -> int:
    """The steps of one pass over the data. Raises `ValueError` for a plan with epochs of data without a length."""
    found = n_batches(data, plan.batch_size)
    if found is not None:
        # Accumulation splits the plan's batch where samples can be indexed. It joins consecutive batches of other data.
        return found if is_map_style(data) else -(-found // accumulate)
    if plan.steps is None:
        raise ValueError(
            "the data have no length, so nobody knows when an epoch ends: ask the operator for local_steps in "
            "[training] instead of local_epochs, or give data with a length"
        )
    return 1
