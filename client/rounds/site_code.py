"""Call the site's own code: train from the round's model, or measure it."""

import copy
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from umbel.aggregation.algorithms.scaffold import gradient_of
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.state import State
from umbel.aggregation.plans.training import GAMMA, PERSONAL, TrainingPlan
from umbel.aggregation.types import METRIC_ABS_MAX
from umbel.client.app import Client
from umbel.client.errors import ClientError, TrainingFailed, WorkRefused
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import Evaluation, TrainResult
from umbel.client.rounds.inexactness import MissingGamma, measured_gamma
from umbel.client.rounds.metric_names import require_free_names, require_no_figures, require_no_personal
from umbel.client.state.model_files import load_model
from umbel.client.state.site_state import SiteState
from umbel.client.training.kept import ControlChange, Kept, kept_after, with_pulls
from umbel.client.training.shared_state import SharedState
from umbel.client.user_code import where_raised

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
        inexactness=training.inexactness,
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


def train(
    app: Client, shared: SharedState, start: Path, plan: LocalPlan, missing: MissingGamma | None = None
) -> Trained:
    """Load the model file `start`, and train as `train_from` does."""
    return train_from(app, shared, load_model(start, shared.layout_in(plan)), plan, missing)


def train_from(
    app: Client,
    shared: SharedState,
    weights: Mapping[str, torch.Tensor],
    plan: LocalPlan,
    missing: MissingGamma | None = None,
) -> Trained:
    """Load the weights, measure them if asked, and train. Raises `TrainingFailed` if the site's code fails.

    `plan`: of `with_kept`. `missing`: of all rounds of this client; None: the log says anew why a round has no gamma.
    """
    shared.load(weights)
    plan = with_pulls(plan, shared, weights)
    try:
        gradients = _gradients(app, shared, weights, plan) if plan.control_variate == "gradient" else None
        first_private = shared.private() if plan.inexactness else {}
        done = _call(app, plan, shared.kept)
    except ClientError:
        raise
    except (Exception, SystemExit) as error:
        raise _own_code_failed(error) from error
    kept = gradients or kept_after(plan, shared, weights, done.result.steps_done)
    control = ControlChange(plan.kept, kept, plan.control_scale) if plan.has_control else None
    if plan.inexactness:
        missing = missing or MissingGamma()
        gamma = measured_gamma(app, shared, weights, first_private, plan, done.step_s, done.was_stopped, missing)
        if gamma is not None:
            done = replace(done, result=replace(done.result, metrics={**done.result.metrics, GAMMA: gamma}))
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
        is_whole=True,
        share=1.0,
        algorithm="fedavg",
        pulls={},
        evaluate=False,
        evaluate_after=False,
        inexactness=False,
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
    require_kind(result, TrainResult, "train")
    _require_applied(plan)
    require_free_names(plan, result)
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

    Raises `ValueError` if they are of different samples, and `TrainingFailed` for a metric with a name of the others.
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
    require_no_personal(before, after)
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
    """Call the site's `evaluate`. Raises what it raises, `TypeError` for another type of result, and `TrainingFailed`
    for a metric with a name that umbel sets.
    """
    evaluation = app.evaluate(app.model)
    if evaluation is not None:
        require_kind(evaluation, Evaluation, "evaluate")
        require_no_figures("evaluate", evaluation)
    return evaluation


def require_kind(answer: object, kind: type, method: str) -> None:
    """Raise `TypeError` for what the site's `method` must not return."""
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


def evaluation_of(app: Client, shared: SharedState, weights: Mapping[str, torch.Tensor]) -> Evaluation | None:
    """Load the weights, and call the site's `evaluate`. Raises `TrainingFailed` if the site's code fails."""
    shared.load(weights)
    try:
        return evaluated(app)
    except ClientError:
        raise
    except Exception as error:
        raise _own_code_failed(error) from error
