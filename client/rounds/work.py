"""From what the site's code has made to what is sent: the update and its report, or an evaluation's."""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from umbel.aggregation.algorithms.qfedavg import CHANGE_NORM, START_LOSS, loss_weight
from umbel.aggregation.codec.entropy.payload import Buffer
from umbel.aggregation.codec.one_update import read_one
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.codec.vector_update import VectorUpdateCodec
from umbel.aggregation.errors import LayoutError, NonFiniteUpdate, UpdateOutOfRange
from umbel.aggregation.model.state import State
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.reports import EvaluationDone, WorkDone
from umbel.aggregation.types import METRIC_ABS_MAX
from umbel.client.app import Client
from umbel.client.errors import WorkRefused
from umbel.client.local.results import Evaluation, TrainResult
from umbel.client.rounds.site_code import Trained, evaluation_of
from umbel.client.state.model_files import load_model
from umbel.client.state.store import PendingReport, Store
from umbel.client.training.encoding_device import CPU, where_memory_suffices
from umbel.client.training.kept import control_as_read
from umbel.client.training.probe import probe_of
from umbel.client.training.shared_state import SharedState
from umbel.client.wire.timing import Bandwidth

NO_HASH = "0" * 64  # of an update that nobody keeps
NOTHING_HELD_OUT = "this client has no held-out data to measure the model on"
log = logging.getLogger("umbel.client")


def save_work(
    app: Client,
    shared: SharedState,
    start: Path,
    offer: Assignment,
    done: Trained,
    store: Store,
    bandwidth: Bandwidth,
    keep: Callable[[Trained], None],
) -> PendingReport:
    """Write the weight change and the report to disk. Raises `WorkRefused` for an update that must not be sent.

    `bandwidth`: as measured, for a canary's report. `keep`: writes what the client keeps of this training.
    """
    with unfit_refused(offer):
        done = with_fair_metrics(shared, lambda: load_model(start, shared.layout), offer, done)
        sha256, update_bytes = _save_update(shared, start, offer, done, store)
    if offer.task.makes_model:
        update = b"" if done.control is None else store.update()
        keep(kept_of_update(shared, update, offer, done))
    pending = PendingReport(offer.id, work_done(app, done, sha256, offer, bandwidth), update_bytes)
    store.save_report(pending)
    return pending


@contextmanager
def unfit_refused(offer: Assignment) -> Generator[None]:
    """Raise `WorkRefused` for a weight change that cannot be sent, without any number of it."""
    try:
        yield
    except LayoutError as error:
        raise WorkRefused(str(error)) from error
    except NonFiniteUpdate as error:
        raise WorkRefused(
            "the update is not finite: training diverged, or the data hold a NaN or infinity; "
            "check the data, then try a smaller learning rate"
        ) from error
    except UpdateOutOfRange as error:
        log.info("%s", error)  # it quotes a value, so only the log has it
        raise WorkRefused(
            f"a value of the update is beyond the run's max_abs of {offer.grid.max_abs:g}; try a smaller learning "
            "rate, or ask the operator for a larger max_abs"
        ) from error


def _save_update(shared: SharedState, start: Path, offer: Assignment, done: Trained, store: Store) -> tuple[str, int]:
    """Write the update, and the residual of error feedback beside it. A canary's update has no residual."""
    codec = codec_for(offer.codec, offer.grid, shared.layout_in(offer.training))

    def encode(device: torch.device) -> tuple[str, int]:
        change = partial(weight_changes, shared, start, offer.training, done, device)
        if not (isinstance(codec, VectorUpdateCodec) and offer.codec.feedback) or offer.task.tries_clients:
            return store.save_update(codec.encode(change, offer.rank))
        version = offer.model.version
        fed = codec.encode_fed(change, offer.rank, version, store.feedback.before(offer.run, offer.round, version))
        saved = store.save_update(fed.pieces)
        store.feedback.wait(offer.run, offer.round, offer.id, fed.left)
        return saved

    return where_memory_suffices(encode, shared.encoding_device)


def kept_of_update(shared: SharedState, update: Buffer, offer: Assignment, done: Trained) -> Trained:
    """The training with what the client keeps if the coordinator takes this update."""
    if done.control is None:
        return done
    layout = shared.layout_in(offer.training)
    read = read_one(codec_for(offer.codec, offer.grid, layout), update, offer.rank)
    control = done.control
    return replace(done, kept=control_as_read(layout.update, control.scale, read.change.mean_slice, control.before))


def weight_changes(
    shared: SharedState, start: Path, training: TrainingPlan, done: Trained, device: torch.device = CPU
) -> Iterator[torch.Tensor]:
    """What the client sends of its change since the model file `start`. Memory does not hold the start weights."""
    return changes_from(shared, load_model(start, shared.layout_in(training)), training, done, device)


def changes_from(
    shared: SharedState, weights: State, training: TrainingPlan, done: Trained, device: torch.device = CPU
) -> Iterator[torch.Tensor]:
    """What the client sends of its change since these weights, as `SharedState.changes`."""
    per_steps = done.result.steps_done if training.is_normalised else None
    weight = weight_to_multiply_by(training, done)
    return shared.changes(weights, device, per_steps=per_steps, weight=weight, control=done.control)


def weight_to_multiply_by(training: TrainingPlan, done: Trained) -> float | None:
    """The weight by which q-FedAvg multiplies this change; None under other algorithms."""
    terms = training.fair_terms
    return None if terms is None or done.start_loss is None else loss_weight(done.start_loss, terms)


def with_fair_metrics(shared: SharedState, start: Callable[[], State], offer: Assignment, done: Trained) -> Trained:
    """The training with the metrics that q-FedAvg needs; as it is under other algorithms.

    `start`: reads the weights that it began with. Raises `NonFiniteUpdate` for a change that has no norm.
    """
    if offer.training.fair_terms is None or done.start_loss is None:
        return done
    norm = shared.change_norm(start())
    if not norm <= METRIC_ABS_MAX:  # also refuses a NaN
        raise NonFiniteUpdate("the training diverged: the norm of the change is not finite, or beyond all bounds")
    fair = {START_LOSS: done.start_loss, CHANGE_NORM: norm}
    return replace(done, result=replace(done.result, metrics={**done.result.metrics, **fair}))


def work_done(app: Client, done: Trained, sha256: str, offer: Assignment, bandwidth: Bandwidth) -> WorkDone:
    """The report of a training. `sha256`: of the update. Raises `WorkRefused` for a result that makes no sense."""
    result, evaluation = done.result, done.evaluation
    if result.sample_count > app.sample_count:
        raise WorkRefused(
            f"train returned a sample_count of {result.sample_count}, but this client has {app.sample_count} samples: "
            "train must return no more than the client's sample_count"
        )
    _require_accepted("train", result.sample_count, offer)
    metrics, weights = _reported("train", result, offer)
    held_out, held_out_weights = _reported("evaluate", evaluation, offer) if evaluation else ({}, {})
    try:
        return WorkDone(
            sample_count=result.sample_count,
            steps_done=result.steps_done,
            steps_planned=result.steps_planned,
            update_sha256=sha256,
            train_s=done.train_s,
            metrics=metrics,
            evaluation=held_out,
            evaluation_sample_count=evaluation.sample_count if evaluation else 0,
            probe=probe_of(app, result, done.step_s, offer, bandwidth) if offer.task.tries_clients else None,
            counts=result.counts,
            evaluation_counts=evaluation.counts if evaluation else {},
            weights=weights,
            evaluation_weights=held_out_weights,
        )
    except ValueError as error:
        raise WorkRefused(f"the site's code returned an inconsistent result: {error}") from error


def _require_accepted(function: str, sample_count: int, offer: Assignment) -> None:
    if sample_count > offer.sample_count_max:
        raise WorkRefused(
            f"{function} returned a sample_count of {sample_count}, but the run accepts at most "
            f"{offer.sample_count_max} (sample_count_max)"
        )


def _reported(
    function: str, result: TrainResult | Evaluation, offer: Assignment
) -> tuple[dict[str, float], dict[str, int]]:
    """The metrics of a report, and the weights of those that have their own. Raises `WorkRefused` for one too large."""
    metrics = finite(result.metrics, f"{name_of(offer)}: {function}")
    for name, weight in result.weights.items():
        if weight > offer.sample_count_max:
            raise WorkRefused(
                f"{function} returned the metric {name!r} with a weight of {weight}, but the run accepts at most "
                f"{offer.sample_count_max} (sample_count_max)"
            )
    return metrics, {name: weight for name, weight in result.weights.items() if name in metrics or not weight}


def finite(metrics: Mapping[str, float], source: str) -> dict[str, float]:
    """The metrics that are finite and not too large; the log has the others with their values.

    `source`: who has measured them, such as "round 3: train".
    """
    kept = {name: value for name, value in metrics.items() if abs(value) <= METRIC_ABS_MAX}
    if bad := sorted(metrics.keys() - kept):
        log.warning(
            "%s returned %s. The report leaves this out, because a metric must be finite and between -%g and %g",
            source,
            ", ".join(f"{name} = {metrics[name]:g}" for name in bad),
            METRIC_ABS_MAX,
            METRIC_ABS_MAX,
        )
    return kept


def measure(app: Client, shared: SharedState, start: Path, offer: Assignment) -> EvaluationDone | None:
    """Measure the model in the file `start`, as `measure_from` does."""
    return measure_from(app, shared, load_model(start, shared.layout_in(offer.training)), offer)


def measure_from(
    app: Client, shared: SharedState, weights: Mapping[str, torch.Tensor], offer: Assignment
) -> EvaluationDone | None:
    """Measure the model with these weights; None if the site has no held-out data.

    Raises `TrainingFailed` if the site's code fails, `WorkRefused` for a result that makes no sense.
    """
    started = time.perf_counter()
    evaluation = evaluation_of(app, shared, weights)
    if evaluation is None or not (evaluation.metrics or evaluation.counts):
        return None
    took_s, n_samples = time.perf_counter() - started, evaluation.sample_count
    _require_accepted("evaluate", n_samples, offer)
    metrics, own = _reported("evaluate", evaluation, offer)
    try:
        return EvaluationDone(n_samples, metrics, took_s, evaluation.counts, own)
    except ValueError as error:
        raise WorkRefused(f"the site's code returned an inconsistent evaluation: {error}") from error


def name_of(offer: Assignment) -> str:
    """The round's name in the log: its number, and its kind if it makes no model."""
    return f"round {offer.round}" + ("" if offer.task.makes_model else f" {offer.task.value}")


def warn_if_too_slow(offer: Assignment, done: Trained, late_s: float) -> None:
    """Log why training ended after the window. Otherwise a site that is always late would never learn the cause."""
    if late_s <= 0:
        return
    help_for_it = (
        f"one step is too long for the window: ask the operator for a window_s of at least "
        f"{2 * (offer.window_s + late_s):.0f}, or a smaller batch_size"
        if done.result.steps_done <= 1
        else "`train` must call plan.should_stop() before every step, and return as soon as it gives a reason"
    )
    log.warning(
        "round %d: training ended %.1f s after the end of the round's window of %g s, with %d of %d steps done. That is"
        " too late to count; %s",
        offer.round,
        late_s,
        offer.window_s,
        done.result.steps_done,
        done.result.steps_planned,
        help_for_it,
    )
