"""What one undisturbed training has returned, and what it has left behind."""

import traceback
from collections.abc import Collection, Iterator, Mapping

import torch

from umbel.aggregation.types import METRIC_ABS_MAX, METRICS_MAX, require_metric_name
from umbel.client.check.observed import GENERATORS, Marks, ObservedTraining
from umbel.client.check.trainee import Trainee
from umbel.client.findings import ClientFinding, passed, skipped, warned, wrong
from umbel.client.local.results import TrainResult
from umbel.client.user_code import where_raised

_RESULTS = "umbel.client.local.results"


def check_failed(training: ObservedTraining) -> ClientFinding | None:
    """Why `train` has returned no result, under the name of the check that it belongs to; None if it has."""
    if (error := training.error) is None:
        if isinstance(training.result, TrainResult):
            return None
        advice = "Return steps.result(sample_count), or a TrainResult"
        return wrong("train", f"train returned a {type(training.result).__name__}, not a TrainResult", advice)
    if (what := _refused_by(error)) is not None:
        return wrong(what, f"train cannot return its result: {error}", _ADVICE[what])
    found = f"train failed with {where_raised(error)}"
    is_of_none = isinstance(error, TypeError) and "NoneType" in str(error)
    why = " The plan of this check has local_steps, so plan.epochs is None" if is_of_none else ""
    return wrong("train", found, f"Correct train.{why}")


_ADVICE = {
    "counts": "Return whole numbers from 0 to 2^40, which add up over batches and clients",
    "metrics": "Return a mapping from names to numbers",
}


def _refused_by(error: BaseException) -> str | None:
    """The part of a `TrainResult` that its constructor has refused with this error; None if it was something else."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_qualname
        if module == "umbel.aggregation.counts" or (module == _RESULTS and function == "_counts"):
            return "counts"
        if function == "CountSums.add":
            return "counts"
        if module == _RESULTS and function == "_numbers":
            return "metrics"
    return None


def check_left(trainee: Trainee, training: ObservedTraining) -> Iterator[ClientFinding]:
    """What the training has done to the model, and to what it shares with others."""
    before, after = training.before, training.after
    yield (tensors := _tensors(before, after))
    if tensors.verdict == "wrong":
        return
    yield _weights(trainee, before, after)
    yield _base(trainee, before, after)
    yield _state(training)
    yield _process(training.touched)


def _tensors(before: Marks, after: Marks) -> ClientFinding:
    def shape(marks: Marks, name: str) -> tuple[object, ...] | None:
        return (marks[name].dtype, marks[name].shape) if name in marks else None

    differing = [name for name in {**before, **after} if shape(before, name) != shape(after, name)]
    if not differing:
        return passed("tensors", f"names, shapes and dtypes of all {len(before)} tensors are as they were")
    name = differing[0]
    found = f"train has changed the tensor {name!r}: {_words(before, name)} before, {_words(after, name)} after"
    return wrong("tensors", found, "Keep names, shapes and dtypes; work on a copy if a step needs others")


def _words(marks: Marks, name: str) -> str:
    return f"{marks[name].dtype} {list(marks[name].shape)}" if name in marks else "none"


def _changed(before: Marks, after: Marks, names: Collection[str]) -> list[str]:
    return [name for name in names if before[name] != after[name]]


def _weights(trainee: Trainee, before: Marks, after: Marks) -> ClientFinding:
    names = [name for name in trainee.shared.names_of("mean") if "float" in before[name].dtype]
    if not names:
        return skipped("weights", "the client sends no tensor of floating-point numbers")
    changed, state = _changed(before, after, names), trainee.shared.shared()
    if broken := [name for name in changed if not bool(torch.isfinite(state[name]).all())]:
        found = f"train has left a NaN or an infinity in the tensor {broken[0]!r}, which no update can carry"
        return wrong("weights", found, "Check the data, then try a smaller learning rate")
    if changed:
        return passed("weights", f"train has changed {len(changed)} of {len(names)} tensors that travel")
    found = "train has changed no weight of the model, so the client would send zeros"
    advice = (
        "Train the model that train is called with, in place. Give its parameters to the optimizer, and call the "
        "optimizer's step()"
    )
    return wrong("weights", found, advice)


def _base(trainee: Trainee, before: Marks, after: Marks) -> ClientFinding:
    names = trainee.shared.names_of("base")
    if not names:
        return skipped("base", "the model has no base tensors")
    if changed := _changed(before, after, names):
        found = f"train has changed the base tensor {changed[0]!r}, which must be the same at every site"
        return wrong("base", found, "Freeze it (requires_grad = False; eval() for layers with running statistics)")
    return passed("base", f"all {len(names)} base tensors are as they were")


def _state(training: ObservedTraining) -> ClientFinding:
    if training.state_error:
        found = f"plan.state cannot be kept on disk: {training.state_error}"
        return wrong("state", found, "Keep less, and only dicts, lists, tuples, tensors, arrays, numbers and texts")
    if not training.plan.state:
        return passed("state", "train keeps nothing in plan.state")
    return passed("state", "what train keeps in plan.state can be stored")


def _process(touched: tuple[str, ...]) -> ClientFinding:
    if not touched:
        return passed("process", "random generators and settings of the process are as they were")
    found = f"train has changed {' and '.join(touched)}"
    advice = (
        "Restore them at the end of train, because other clients may train in the same process. plan.drive restores "
        "the random generators"
    )
    if all(one in GENERATORS for one in touched):
        return warned("process", found, advice)
    return wrong("process", found, advice)


# --- the result -------------------------------------------------------------------------------------------------------


def check_result(trainee: Trainee, training: ObservedTraining, result: TrainResult) -> Iterator[ClientFinding]:
    """The numbers that the training has returned."""
    yield _samples(trainee.client.sample_count, training, result)
    yield check_steps(training, result)
    yield check_metrics("train", {**result.metrics, **_losses(result)})
    yield passed("counts", "train returns no counts" if not result.counts else "counts are whole and not negative")


def _samples(own: int, training: ObservedTraining, result: TrainResult) -> ClientFinding:
    advice = "Return the number of samples that the client trains on, the same as its sample_count"
    if not 1 <= result.sample_count <= own:
        found = f"train returned a sample_count of {result.sample_count}, and the client has {own} samples"
        return wrong("samples", found, advice)
    lengths = training.doings.data_lengths
    if not lengths or own in (sum(lengths), *lengths):
        return passed("samples", f"the client's update counts as {result.sample_count} samples")
    found = f"the client's sample_count is {own}, but train gives plan.drive data of {max(lengths)} samples"
    if own > max(sum(lengths), *lengths):
        return wrong("samples", found, "Set sample_count to the number of samples: it is the weight of the update")
    return warned("samples", found, "Set sample_count to the number of samples, unless it is smaller on purpose")


def check_steps(training: ObservedTraining, result: TrainResult) -> ClientFinding:
    """Whether an undisturbed training has done the steps of its plan, and says so."""
    done, planned, asked = result.steps_done, result.steps_planned, training.plan.steps_for(1)
    if planned != asked:
        found = f"train says that {planned} steps were planned, and the plan asks for {asked}"
        return wrong("steps", found, "Return plan.steps_for(batches in an epoch) as steps_planned; plan.drive does it")
    if done != asked:
        found = f"train did {done} of {asked} steps, and nothing told it to stop"
        return wrong("steps", found, "Do all steps of the plan; plan.drive begins another pass over the data if needed")
    taken = training.doings.steps_of.values()
    if taken and min(taken) > done:
        found = f"train says that it did {done} steps, but its optimizer took {min(taken)}"
        return wrong("steps", found, "Take one step of the optimizer for each step of the plan")
    if taken and max(taken) < done:
        found = f"train says that it did {done} steps, but its optimizer took only {max(taken)}"
        return warned("steps", found, "Take one step of the optimizer for each item of plan.drive; see accumulate")
    return passed("steps", f"train did the {done} steps of its plan")


def _losses(result: TrainResult) -> dict[str, float]:
    named = {"first_loss": result.first_loss, "last_loss": result.last_loss}
    return {name: value for name, value in named.items() if value is not None}


def check_metrics(function: str, metrics: Mapping[str, float]) -> ClientFinding:
    """Whether a report can have these metrics."""
    if bad := [name for name, value in metrics.items() if not abs(value) <= METRIC_ABS_MAX]:
        found = f"{function} returned the metric {bad[0]!r} = {metrics[bad[0]]}, which reports leave out"
        return wrong("metrics", found, "Check the data and the loss; leave out a metric that has no value")
    try:
        for name in metrics:
            require_metric_name(name)
    except ValueError as error:
        return wrong("metrics", f"{function} returned a metric that no report may have: {error}", "Change its name")
    if len(metrics) > METRICS_MAX:
        found = f"{function} returned {len(metrics)} metrics, and a report may have at most {METRICS_MAX}"
        return wrong("metrics", found, "Return fewer")
    return passed("metrics", f"all {len(metrics)} metrics of {function} are finite")
