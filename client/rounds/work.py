"""From an assignment's model to its report: train and save the update, or measure the model."""

import copy
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from umbel.aggregation.algorithms.qfedavg import CHANGE_NORM, START_LOSS, loss_weight
from umbel.aggregation.algorithms.scaffold import gradient_of
from umbel.aggregation.codec.entropy.payload import Buffer
from umbel.aggregation.codec.one_update import read_one
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.codec.vector_update import VectorUpdateCodec
from umbel.aggregation.errors import LayoutError, NonFiniteUpdate, UpdateOutOfRange
from umbel.aggregation.model.state import State
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.plans.training import PERSONAL, TrainingPlan
from umbel.aggregation.reports import EvaluationDone, WorkDone
from umbel.aggregation.types import METRIC_ABS_MAX
from umbel.client.app import Client
from umbel.client.errors import ClientError, TrainingFailed, WorkRefused
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import Evaluation, TrainResult
from umbel.client.state.model_files import load_model
from umbel.client.state.site_state import SiteState
from umbel.client.state.store import PendingReport, Store
from umbel.client.training.encoding_device import CPU, where_memory_suffices
from umbel.client.training.kept import ControlChange, Kept, control_as_read, kept_after, with_pulls
from umbel.client.training.probe import probe_of
from umbel.client.training.shared_state import SharedState
from umbel.client.user_code import where_raised
from umbel.client.wire.timing import Bandwidth

NOTHING_HELD_OUT = "this client has no held-out data to measure the model on"
_STEPS_TO_SPARE = 2  # because the next step may be the longest
log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of the site's own code, and how long it took."""

    result: TrainResult
    evaluation: Evaluation | None
    train_s: float
    step_s: float  # of one step, without the first one if possible
    was_stopped: bool = False  # whether `should_stop` returned a reason
    could_go_on: bool = False  # whether it ended by itself with time for more steps
    kept: Kept = field(default_factory=dict[str, torch.Tensor], repr=False)  # what the algorithm has the client keep
    control: ControlChange | None = None  # what it sends of that, under SCAFFOLD
    start_loss: float | None = None  # under q-FedAvg: of the round's model, over the training data


def asked_of_site(
    training: TrainingPlan, seed: int, share: float = 1.0, *, run: str = "", number: int = 1, client: str = ""
) -> LocalPlan:
    """The plan of a run file's training in round `number` of `run`. The caller adds the deadline, and what stops it."""
    return LocalPlan(
        epochs=training.local_epochs,
        steps=training.local_steps,
        batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        proximal_mu=training.proximal_mu,
        seed=seed,
        evaluate=training.evaluate,
        evaluate_after=training.evaluate_after,
        share=share,
        run=run,
        round=number,
        client=client,
        optimizer=training.optimizer,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        clip_norm=training.clip_norm,
        algorithm=training.algorithm,
        control_variate=training.control_variate,
        control_scale=training.control_scale,
        options=dict(training.options),  # one client's code must not change what the next one reads
    )


def train(app: Client, shared: SharedState, start: Path, plan: LocalPlan) -> Trained:
    """Load the model file `start`, and train as `train_from` does."""
    return train_from(app, shared, load_model(start, shared.layout_in(plan)), plan)


def train_from(app: Client, shared: SharedState, weights: Mapping[str, torch.Tensor], plan: LocalPlan) -> Trained:
    """Load the weights, measure them if asked, and train. Raises `TrainingFailed` if the site's code fails.

    `plan`: of `with_kept`.
    """
    shared.load(weights)
    plan = with_pulls(plan, shared, weights)
    try:
        gradients = _gradients(app, shared, weights, plan) if plan.control_variate == "gradient" else None
        done = _call(app, plan, shared.kept)
    except ClientError:
        raise
    except (Exception, SystemExit) as error:
        raise _own_code_failed(error) from error
    kept = gradients or kept_after(plan, shared, weights, done.result.steps_done)
    control = ControlChange(plan.kept, kept, plan.control_scale) if plan.has_control else None
    return replace(done, kept=kept, control=control)


def _gradients(app: Client, shared: SharedState, weights: State, plan: LocalPlan) -> Kept:
    """The client's gradients at the round's model, of all its samples: from the change of one step over all of them.
    The model is as before then. Raises `TrainingFailed` for code that does not take one step.
    """
    own, usual = shared.private(), LocalPlan()
    asked = replace(
        plan,
        epochs=None,
        steps=1,
        batch_size=app.sample_count,
        share=1.0,
        algorithm="fedavg",
        pulls={},
        evaluate=False,
        evaluate_after=False,
        state=copy.deepcopy(plan.state),
        checkpoint=usual.checkpoint,
        told_to_stop=usual.told_to_stop,
    )
    done = _call(app, asked, shared.kept)
    if (n_steps := done.result.steps_done) != 1:
        raise TrainingFailed(
            f"the run asks for the gradient of all samples (control_variate), which is that of one step over all of "
            f"them, but train took {n_steps} steps: follow plan.steps and plan.batch_size, or ask the operator for "
            'control_variate = "change"'
        )
    found = {name: gradient_of(change, plan.learning_rate) for name, change in shared.stepped_changes(weights)}
    shared.load(weights)
    if own:
        shared.set_private(own)
    return found


def _own_code_failed(error: BaseException) -> TrainingFailed:
    # The error's message may quote data, so the coordinator sees only its type.
    public_reason = f"the client's own code failed with {type(error).__name__}; see the client's log"
    return TrainingFailed(f"the client's own code failed with {where_raised(error)}", public_reason)


def _call(app: Client, plan: LocalPlan, own: Collection[str]) -> Trained:
    app.prepare(plan)
    evaluation, evaluate_s = _timed_evaluation(app) if plan.evaluate else (None, 0.0)
    start_loss = _start_loss(app) if plan.weighs_by_loss else None
    asks, started = _StopQuestions(plan), time.perf_counter()
    plan = replace(plan.bound_to(app.model, own), told_to_stop=asks)
    result = app.train(app.model, plan)
    ended = time.perf_counter()
    _require_kind(result, TrainResult, "train")
    _require_applied(plan)
    step_s = _step_s(result.steps_done, started, asks.first_at, ended)
    if plan.evaluate_after and _has_time(plan, evaluate_s):
        evaluation = with_personal(evaluation, evaluated(app))
    could_go_on = not asks.was_stopped and plan.seconds_left > _STEPS_TO_SPARE * max(step_s, asks.longest_s)
    return Trained(result, evaluation, ended - started, step_s, asks.was_stopped, could_go_on, start_loss=start_loss)


def _start_loss(app: Client) -> float:
    """What the site's `training_loss` says. Raises `WorkRefused` for nothing, and for what is no loss."""
    loss = app.training_loss(app.model)
    if loss is None:
        raise WorkRefused(
            "the run weighs each client by its loss (q-FedAvg), and this client's code does not say it: write a "
            "training_loss that returns the model's mean loss over the training data, or ask the operator for another "
            "algorithm"
        )
    if not 0 <= (found := float(loss)) <= METRIC_ABS_MAX:  # also refuses a NaN
        raise WorkRefused(
            "training_loss must return a finite loss that is not negative, because q-FedAvg takes its powers: the "
            "model has diverged, or the loss is of another kind"
        )
    return found


def _timed_evaluation(app: Client) -> tuple[Evaluation | None, float]:
    """The evaluation, and the seconds that it took."""
    began = time.perf_counter()
    return evaluated(app), time.perf_counter() - began


def _has_time(plan: LocalPlan, evaluate_s: float) -> bool:
    """Whether there is time for another evaluation, as long as one before the training took; the log says if not."""
    if plan.seconds_left > evaluate_s:
        return True
    log.warning("this client's own model is not measured after its training, because the round's deadline is too near")
    return False


def with_personal(before: Evaluation | None, after: Evaluation | None) -> Evaluation | None:
    """The metrics of the model as it came, and those of the site's own model after its training, named `personal.`.

    Raises `ValueError` if they are of different samples.
    """
    if after is None:
        return before
    if before is not None and before.sample_count != after.sample_count:
        raise ValueError(
            f"evaluate measured {before.sample_count} samples before the training and {after.sample_count} after it; "
            "it must measure the same samples"
        )
    metrics = {f"{PERSONAL}{name}": value for name, value in after.metrics.items()}
    counts = {f"{PERSONAL}{name}": value for name, value in after.counts.items()}
    weights = {f"{PERSONAL}{name}": value for name, value in after.weights.items()}
    if before is None:
        return Evaluation(after.sample_count, metrics, counts, weights)
    return Evaluation(
        after.sample_count,
        {**before.metrics, **metrics},
        {**before.counts, **counts},
        {**before.weights, **weights},
    )


def with_kept(plan: LocalPlan, shared: SharedState, kept: SiteState, first_private: State) -> LocalPlan:
    """Give the model the private tensors that it begins a round with; returns the plan with all else that is kept.

    `kept`: of the client's last round. `first_private`: for a client without one, as it was made. Raises `WorkRefused`
    if they do not fit the model.
    """
    if private := kept.private or first_private:
        try:
            shared.set_private(private)
        except LayoutError as error:
            raise WorkRefused(str(error)) from error
    if not (plan.remembers_drift or plan.has_control):
        return replace(plan, state=kept.state)
    try:
        shared.require_kept(kept.kept, plan.algorithm)
    except LayoutError as error:
        raise WorkRefused(str(error)) from error
    return replace(plan, state=kept.state, kept=kept.kept)


def keep_state(shared: SharedState, plan: LocalPlan, done: Trained, write: Callable[[SiteState], None]) -> None:
    """Write what the client keeps after a training. Raises `TrainingFailed` if that cannot be kept."""
    try:
        write(SiteState(plan.state, shared.private(), done.kept))
    except (TypeError, ValueError) as error:
        raise TrainingFailed(f"plan.state cannot be kept: {error}") from error


def _require_applied(plan: LocalPlan) -> None:
    """Raise `TrainingFailed` for a site's own loop that has ignored what the run asks of gradients."""
    if not plan.ignored:
        return
    asked = " and ".join({"codec": "a structured codec"}.get(key, key) for key in plan.ignored)
    raise TrainingFailed(
        f"the run asks for {asked}, and train did not apply it: call plan.adjust_gradients(model) after backward and "
        "before each step of the optimizer (an ArrayClient: plan.adjust_arrays or plan.adjust_step in each step), or "
        f"plan.applied_by_site({', '.join(map(repr, plan.ignored))}) if train "
        "does the same by itself"
    )


def evaluated(app: Client) -> Evaluation | None:
    """Call the site's `evaluate`. Raises what it raises, and `TypeError` for another type of result."""
    evaluation = app.evaluate(app.model)
    if evaluation is not None:
        _require_kind(evaluation, Evaluation, "evaluate")
    return evaluation


def _require_kind(answer: object, kind: type, method: str) -> None:
    if not isinstance(answer, kind):
        raise TypeError(f"{method} must return {kind.__name__}, not {type(answer).__name__}")


class _StopQuestions:
    """Observes the questions whether to stop, which the site's code asks between two steps."""

    def __init__(self, plan: LocalPlan) -> None:
        self.first_at: float | None = None  # after the first step
        self.longest_s = 0.0  # between two questions: the longest step
        self.was_stopped = False  # whether the answer was ever yes, or the deadline had passed
        self._plan = plan
        self._last_at = 0.0

    def __call__(self) -> str | None:
        now = time.perf_counter()
        if self.first_at is None:
            self.first_at = now
        else:
            self.longest_s = max(self.longest_s, now - self._last_at)
        self._last_at = now
        reason = self._plan.told_to_stop()
        self.was_stopped |= reason is not None or self._plan.seconds_left <= 0
        return reason


def _step_s(n_steps: int, started: float, first_at: float | None, ended: float) -> float:
    """The mean step time without the first step, if that is known and shorter (a GPU may lag behind)."""
    mean_s = (ended - started) / max(n_steps, 1)
    return mean_s if first_at is None or n_steps < 2 else min(mean_s, (ended - first_at) / (n_steps - 1))


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
    metrics = finite(result.metrics)
    for name, weight in result.weights.items():
        if weight > offer.sample_count_max:
            raise WorkRefused(
                f"{function} returned the metric {name!r} with a weight of {weight}, but the run accepts at most "
                f"{offer.sample_count_max} (sample_count_max)"
            )
    return metrics, {name: weight for name, weight in result.weights.items() if name in metrics or not weight}


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are finite and not too large; the log names the others."""
    kept = {name: value for name, value in metrics.items() if abs(value) <= METRIC_ABS_MAX}
    if bad := metrics.keys() - kept:
        log.warning(
            "these metrics are left out of the report, because they are not finite or too large: %s",
            ", ".join(sorted(bad)),
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


def evaluation_of(app: Client, shared: SharedState, weights: Mapping[str, torch.Tensor]) -> Evaluation | None:
    """Load the weights, and call the site's `evaluate`. Raises `TrainingFailed` if the site's code fails."""
    shared.load(weights)
    try:
        return evaluated(app)
    except ClientError:
        raise
    except Exception as error:
        raise _own_code_failed(error) from error


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
